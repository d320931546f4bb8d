"""The target's outputs, its distributions over them, its hidden states."""
