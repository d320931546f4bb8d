"""Speculative decoding: the reference decoder, measurements and reports."""
