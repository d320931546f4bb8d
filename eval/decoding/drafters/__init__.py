"""The kinds of drafter, one file each."""
