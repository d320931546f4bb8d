"""The reference decoder: forward passes, drafters, the decoding loop and verification."""
