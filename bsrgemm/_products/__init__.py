"""Products with block-sparse matrices."""
