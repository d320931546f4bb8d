"""What a serving engine would have: forward passes, drafters, the loop, verification."""
