"""Engines other than our own decoder, measured from outside."""
