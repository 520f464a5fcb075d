"""The parts of the block-sparse array classes: construction, conversion, indexing, arithmetic, reductions, norms."""
