"""The kinds of draft in training: how each starts, what its LM head reads, what is exported."""
