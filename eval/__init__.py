"""Speculative decoding, what it is worth, and the report that says so."""
