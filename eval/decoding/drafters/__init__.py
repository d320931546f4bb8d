"""Drafters. A kind of draft is a file with a FORMAT (formats.py); loading.py finds it."""
