"""Generate and cache the target's outputs, distributions and hidden states."""
