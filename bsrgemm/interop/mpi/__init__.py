"""Matrices and attention over the ranks of MPI, by mpi4py.

mpi4py is imported by whoever makes a communicator, not here.
"""

from .matrix import DistributedMatrix
from .partition import from_file, from_local, partition

__all__ = ["DistributedMatrix", "from_file", "from_local", "partition"]
