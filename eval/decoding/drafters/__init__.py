"""Drafters. A kind of draft is a file with a FORMAT (formats.py); loading.py finds it."""

LOOKUP = "prompt-lookup"  # the spec of n-gram speculation
LOOKUP_FIRST = "lookup-first:"  # a draft's spec with this prefix has n-gram speculation before it
