"""The interface to the array modules: NumPy on the host and CuPy on a GPU."""
