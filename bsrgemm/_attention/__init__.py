"""Masked attention, and attention of the last tokens of a key-value cache."""
