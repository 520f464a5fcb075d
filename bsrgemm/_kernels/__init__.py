"""Compiling, loading and launching CUDA kernels. Nothing in this package knows about matrices."""
