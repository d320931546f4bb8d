"""Kinds of draft as they are trained: how each starts, what its head reads, what is exported."""
