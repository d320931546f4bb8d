"""Recipes by domain, each with the builder of its embedded prompts."""
