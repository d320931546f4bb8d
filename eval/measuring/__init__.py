"""Measures drafts: from models and prompts to numbers with intervals."""
