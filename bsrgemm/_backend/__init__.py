"""Where arrays live: NumPy on the host or CuPy on a GPU, and what both must offer."""
