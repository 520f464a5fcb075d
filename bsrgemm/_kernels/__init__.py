"""Compiling and loading CUDA kernels, and what a launch needs; knows nothing of matrices."""
