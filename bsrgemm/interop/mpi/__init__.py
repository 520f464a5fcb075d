"""Matrices and attention over the ranks of MPI, by mpi4py.

mpi4py is imported by whoever makes a communicator, not here.
"""

from .matrix import DistributedMatrix
from .panels import from_file, from_local, partition
from .ring import ring_attention, ring_attention_backward
from .ring_plan import zigzag_join, zigzag_positions, zigzag_split

__all__ = [
    "DistributedMatrix",
    "from_file",
    "from_local",
    "partition",
    "ring_attention",
    "ring_attention_backward",
    "zigzag_join",
    "zigzag_positions",
    "zigzag_split",
]
