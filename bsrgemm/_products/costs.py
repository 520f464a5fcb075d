"""The terms from which kernels predict their time: rows of blocks, bytes, and how parts that overlap add up.

The numbers of a kernel are its `costs`, in nanoseconds and microseconds on an H200; the clock, the multiprocessors and
the bandwidth of another card scale them. They were fitted to 6,100 times of all options of 1,365 products, by least
squares of the logarithms; bench/NOTES.md says how well they predict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._kernels.card import Card
from .._kernels.element_types import BYTES
from .call import Problem

#: The shares of the bandwidth that kernels reach, and bytes per nanosecond from the L2 to all multiprocessors.
_BANDWIDTH, _L2 = 0.875, 7000.0
#: The longest of some hundred rows at random has so many standard deviations more than the mean.
_SPREAD = 2.5
#: The card on which times were measured.
H200 = Card("sm_90a", 132)
#: What a multiprocessor's L1 cache keeps, and its registers.
_L1_BYTES, REGISTERS = 200e3, 65536


@dataclass(frozen=True)
class Rows:
    """Block rows at random columns: how many, with how many blocks, and how much more the longest may have."""

    count: int
    columns: int
    mean: float
    uneven: int

    def union(self, together: int) -> float:
        """The block columns that some rows have together."""
        if together <= 1 or self.columns == 0:
            return self.mean
        return self.columns * (1 - (1 - min(1.0, self.mean / self.columns)) ** together)

    def most(self, together: int) -> float:
        """The block columns of the longest union of so many rows."""
        mean = self.union(together)
        spread = _SPREAD * math.sqrt(mean * max(0.0, 1 - mean / max(1, self.columns)))
        return min(self.columns, max(1.0, mean * self.uneven + spread))  # a row has a block if there are any

    @property
    def longest(self) -> float:
        """The blocks of the longest row."""
        return self.most(1)


def rows_of(problem: Problem) -> Rows:
    """The block rows of a product. They are taken to be drawn at random, so that the longest exceeds the mean."""
    return Rows(problem.block_rows, problem.block_cols, problem.blocks / max(1, problem.block_rows), problem.uneven)


def overlapped(*times: float) -> float:
    """The time of parts that overlap: somewhat more than the longest.

    >>> overlapped(3.0, 0.0), round(overlapped(3.0, 3.0), 2)
    (3.0, 3.57)
    """
    most = max(times)
    return most * float(sum((t / most) ** 4 for t in times)) ** 0.25 if most > 0 else 0.0


def operand_bytes(problem: Problem) -> tuple[float, float, float]:
    """The bytes of A, B and the result."""
    names, columns = problem.types, problem.N * problem.batches
    stored = problem.blocks * (problem.R * problem.K * BYTES[names.a] + BYTES[names.index])
    return (
        float(stored),
        float(problem.block_cols * problem.K * columns * BYTES[names.b]),
        float(problem.block_rows * problem.R * columns * BYTES[names.c]),
    )


def memory(card: Card, *sizes: float) -> float:
    """Microseconds in which so many bytes are read or written."""
    return sum(sizes) / (card.bandwidth * _BANDWIDTH) * 1e6


def from_l2(card: Card, size: float) -> float:
    """Microseconds in which the L2 delivers so many bytes."""
    return size / _L2 / 1e3 * H200.multiprocessors / card.multiprocessors / speed(card)


def missed(lines: float) -> float:
    """The share of loads that miss the L1 if so many lines are to be kept there until they are used again."""
    return 1 / (1 + (_L1_BYTES / max(1.0, lines * 128)) ** 3)


def speed(card: Card) -> float:
    """The clock of a card, that of an H200 being 1."""
    return card.clock / H200.clock


def width(problem: Problem) -> str:
    """What decides the cost of an addition: "h" for 16 bits, "s", "d", and "i" for bytes; complex numbers take four."""
    name = problem.types.acc
    if problem.types.a in ("f16", "bf16"):
        return "h"
    return "i" if problem.types.a in ("i8", "e4m3") else "d" if name in ("f64", "u64", "c128", "i64") else "s"


def work(problem: Problem) -> int:
    """How many multiplications of reals one of this type takes."""
    return 4 if problem.types.acc in ("c64", "c128") else 1
