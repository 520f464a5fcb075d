"""The block-sparse array: construction, conversion, indexing, arithmetic."""
