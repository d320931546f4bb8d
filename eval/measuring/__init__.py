"""From models and prompts to numbers with intervals."""
