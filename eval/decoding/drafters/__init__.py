"""Drafters. A kind of draft is one file with a KIND (kind.py); loading.py finds it."""
