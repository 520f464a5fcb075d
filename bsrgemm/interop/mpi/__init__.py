"""Matrices and attention over the ranks of MPI, by mpi4py."""
