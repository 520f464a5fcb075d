"""Pictures made from plain arrays."""
