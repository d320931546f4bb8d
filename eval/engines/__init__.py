"""Measures engines other than the reference decoder from outside."""
