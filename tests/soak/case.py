"""What a case is: random numbers from (seed, number) alone, a place to compute in, and comparisons that are counted.

A case belongs to a chapter of cases. The chapter draws the dtypes, blocks and heads of its cases from a small pool, so
that a GPU compiles few kernels and then runs them often; on the CPU, where nothing is compiled, the pool is everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES

from ..strategies import Place, assert_values, quietly

#: Cases of a chapter, and the share of the operations on arrays that a chapter on a GPU has.
CHAPTER, _SHARE = 20_000, 0.3
#: Mixed into the seeds of pools and of threads, so that they draw other numbers than the cases.
_POOL, _CHILD = 0x506F6F6C, 0x4368696C

FLOATS = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
PRODUCT_DTYPES = (*FLOATS, *FLOATS, np.dtype("F"), np.dtype("D"), *(np.dtype(c) for c in "?bBhHiIlL"))
BLOCKS = (
    (1, 1),
    (2, 2),
    (3, 3),
    (4, 4),
    (2, 3),
    (5, 2),
    (6, 6),
    (8, 8),
    (9, 4),
    (16, 16),
    (17, 13),
    (32, 32),
    (64, 16),
)
SMALL_BLOCKS = BLOCKS[:9]
WIDTHS = (1, 2, 3, 7, 16, 33, 64)
HEADS = ((64, 64), (128, 128), (64, 32), (80, 80), (36, 36), (96, 96))
DECODE_HEADS = (64, 80, 96, 128)


@dataclass(frozen=True)
class Pool:
    """What the cases of a chapter draw from."""

    arrays: Sequence[np.dtype[Any]]
    array_blocks: Sequence[tuple[int, int]]
    #: dtypes of A and of the dense operand, the block, and the numbers of columns
    products: Sequence[tuple[np.dtype[Any], np.dtype[Any], tuple[int, int], Sequence[int]]]
    #: dtype, head dim of keys, head dim of values
    heads: Sequence[tuple[np.dtype[Any], int, int]]
    decode_heads: Sequence[tuple[np.dtype[Any], int]]
    mask_blocks: Sequence[int]
    #: names of the operations on arrays that are left out
    without: frozenset[str]


def pick(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def _some(rng: np.random.Generator, options: Sequence[Any], count: int) -> list[Any]:
    return [options[int(i)] for i in rng.permutation(len(options))[:count]]


@lru_cache(maxsize=8)
def pool(seed: int, chapter: int, everything: bool) -> Pool:
    """The pool of a chapter."""
    rng = np.random.default_rng([_POOL, seed, chapter])
    names = sorted(name for name in KINDS if name.startswith("array."))
    products = []
    for _ in range(400 if everything else 4):
        a = pick(rng, PRODUCT_DTYPES)
        b = a if everything is False or rng.random() < 0.7 else pick(rng, PRODUCT_DTYPES)
        products.append((a, b, pick(rng, BLOCKS), WIDTHS if everything else _some(rng, WIDTHS, 2)))
    heads = [(dtype, *dims) for dtype in FLOATS for dims in HEADS]
    decoding = [(dtype, D) for dtype in (FLOATS if everything else FLOATS[:2]) for D in DECODE_HEADS]
    if everything:
        return Pool(DEVICE_DTYPES, SMALL_BLOCKS, products, heads, decoding, (16, 32, 48, 64), frozenset())
    left_out = frozenset(_some(rng, names, round(len(names) * (1 - _SHARE))))
    blocks = _some(rng, SMALL_BLOCKS, 3)
    chosen = [*_some(rng, heads[: 2 * len(HEADS)], 1), *_some(rng, heads, 1)]
    return Pool(
        _some(rng, DEVICE_DTYPES, 2),
        blocks,
        products,
        chosen,
        _some(rng, decoding, 1),
        _some(rng, (16, 32, 64), 2),
        left_out,
    )


class Case:
    """The random numbers of a case, where it computes, and what was compared so far."""

    def __init__(self, seed: int, number: int, place: Place, threads: int = 8) -> None:
        self.seed, self.number, self.place, self.threads = seed, number, place, threads
        self.rng = np.random.default_rng([seed, number])
        self.pool = pool(seed, number // CHAPTER, place.is_host)
        self.checks = 0
        #: what the case is about to do, for the report of a difference
        self.doing = ""

    def child(self, thread: int) -> Case:
        """A case for one thread of this one."""
        found = Case(self.seed, self.number, self.place, self.threads)
        found.rng = np.random.default_rng([_CHILD, self.seed, self.number, thread])
        return found

    # ------------------------------------------------------------------------------------------ drawing
    def pick(self, options: Sequence[Any]) -> Any:
        return pick(self.rng, options)

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def number_from(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return int(self.rng.integers(low, high, endpoint=True))

    # ---------------------------------------------------------------------------------------- comparing
    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """A dense result or a number as a NumPy array."""
        backend = self.place.backend
        return np.asarray(backend.to_host(x)) if backend.is_dense(x) else np.asarray(x)

    def same(self, what: str, actual: Any, expected: Any, bound: Any = 0.0) -> None:
        """Compare a dense result with what it has to be; AssertionError says what differs."""
        self.checks += 1
        try:
            assert_values(self.host(actual), expected, bound)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None

    def true(self, what: str, found: Any) -> None:
        self.checks += 1
        if not found:
            raise AssertionError(f"{what}: not true")

    def same_matrix(self, what: str, A: Any, expected: Any, bound: Any = 0.0) -> None:
        """Compare one of our matrices, read as its blocks (all that its arrays promise is checked) or as dense."""
        if self.chance(0.5):
            self.same(what, self.place.blocks(A).dense, expected, bound)
        else:
            self.same(what, A.toarray(), expected, bound)


# ---------------------------------------------------------------------------------------------- kinds
@dataclass(frozen=True)
class Kind:
    """A kind of case: how often it is drawn, and whether it needs streams of a card."""

    run: Callable[[Case], None]
    weight: float
    card: bool


KINDS: dict[str, Kind] = {}


def kind(name: str, weight: float = 1.0, *, card: bool = False) -> Callable[[Callable[[Case], None]], Any]:
    """Add a function to the kinds of cases; a decorator."""

    def add(function: Callable[[Case], None]) -> Callable[[Case], None]:
        KINDS[name] = Kind(function, weight, card)
        return function

    return add


@lru_cache(maxsize=8)
def _shares(without: frozenset[str], on_host: bool) -> tuple[list[str], np.ndarray[Any, Any]]:
    names = [name for name in sorted(KINDS) if name not in without and not (KINDS[name].card and on_host)]
    weights = np.cumsum([KINDS[name].weight for name in names])
    return names, weights / weights[-1]


def kind_of(case: Case) -> str:
    """The kind of a case: the first thing that its random numbers decide."""
    names, shares = _shares(case.pool.without, case.place.is_host)
    return names[int(np.searchsorted(shares, case.rng.random(), side="right"))]


def run_case(case: Case) -> str:
    """Run a case and return its kind; whatever it raises is a difference."""
    name = kind_of(case)
    case.doing = name
    with quietly():
        KINDS[name].run(case)
    return name
