"""Masked attention and decoding."""
