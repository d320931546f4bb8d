"""Distil a draft for a target on domain prompts, and measure it."""
