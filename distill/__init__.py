"""From domain prompts to a tuned draft."""
