"""Products with block-sparse (BSR) matrices."""
