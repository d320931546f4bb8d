"""What the target says: its answers, its distributions over them, its hidden states."""
