"""A model of the shape of Llama 3.1 8B with random weights, and one token of it as a CUDA graph."""
