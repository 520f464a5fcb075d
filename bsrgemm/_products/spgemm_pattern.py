"""Launches of cuda/spgemm_pattern.cu, which finds the pairs of blocks that ``BSR @ BSR`` multiplies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import cupy
import numpy as np

from .._backend import structure
from .._backend.base import Array, Blocks
from .._kernels import graphs, jit, workspace
from .._kernels.card import card
from .._kernels.element_types import element
from .._kernels.jit import MAX_GRID_X
from .._kernels.kernel import Kernel, host
from .._kernels.launch import contiguous, run
from .._kernels.workspace import StreamOrdered
from . import arguments
from .arguments import BLOCK_PATTERN, SPGEMM_PATTERN
from .call import ProductPattern

#: Blocks, pairs, rows and columns are numbered with 31 bits, with those that warps ask for after the last one.
_MOST = 2**31 - 2**20
#: Bytes of shared memory that a CTA has without an explicit request, which is the limit for a CTA of more than one
#: warp, and the largest number of warps of a CTA.
_SHARED_BYTES, _WARPS = 48 << 10, 4
#: Patterns with more block columns, or with lists for more pairs (32 MiB), are not listed at once.
_MOST_COLUMNS, _MOST_ROOM = 2048, 1 << 22
#: The bytes of the largest lists that are kept.
_MOST_KEPT = 16 << 20
#: The fields of the argument that not every kernel has a value for.
_ZEROS = dict.fromkeys(
    (
        *("before", "most", "left", "right", "column", "start", "count", "indices", "starts", "counters", "sums"),
        *("totals", "most_pairs", "most_columns", "bits", "places", "slots", "listed"),
    ),
    0,
)


@dataclass(frozen=True)
class SpgemmPattern(Kernel, source="spgemm_pattern.cu", argument=arguments.SPGEMM_PATTERN):
    """One of the kernels that find the pairs of blocks which ``BSR @ BSR`` multiplies."""

    entry: str = host("")
    index: str = "i32"
    #: bytes of shared memory of a launch
    shared_bytes: int = host(0)

    threads = 128
    entries = ("list_at_once", "count_pairs", "list_pairs", "pack_columns", "set_bits", "join_rows")

    @staticmethod
    def grid(ctas: int) -> tuple[int]:
        """Return the grid; CTAs go on with block rows beyond it."""
        return (min(MAX_GRID_X, ctas),)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[SpgemmPattern]:
        yield from (cls(entry, index) for index in ("i32", "i64") for entry in cls.entries)


def expected(rows: int, columns: int, inner: int, sizes: tuple[int, int]) -> tuple[float, int]:
    """Return how many pairs, and blocks of a result of rows x columns, two matrices with so many blocks have at random.

    >>> expected(10, 10, 10, (100, 50)), expected(10, 10, 10, (20, 20))
    ((500.0, 99), (40.0, 33))
    """
    pairs = sizes[0] * sizes[1] / max(1, inner)
    places = rows * columns
    return pairs, max(1, round(-places * math.expm1(-pairs / places)))


class Listing:
    """The pairs of ``A @ B`` while the GPU lists them, in memory that suffices for any pattern without duplicates.

    Work that does not depend on the number of pairs can go on until `finish` waits for it.
    """

    def __init__(self, patterns: _Patterns, room: tuple[int, int]) -> None:
        pairs, blocks = self._room = room
        self._numbers: list[int] | None = None
        #: whether other products use it too, and their launches by what these depend on
        self.is_kept = False
        self.launches: dict[Any, Any] = {}
        #: the numbers of pairs and of blocks of the result, if both matrices store blocks at random
        self.expected = expected(patterns.rows, patterns.block_cols, patterns.inner, patterns.sizes)
        rows, index = patterns.rows, patterns.index
        memory = cupy.empty(2 * pairs + blocks, np.int32)
        self.left, self.right, self.starts = memory[:pairs], memory[pairs:], memory[2 * pairs :]
        self.nbytes = memory.nbytes
        self.indices, self.indptr = cupy.empty(blocks, index), cupy.empty(rows + 1, index)
        counters = workspace.counters(2 * rows + 2)
        zeros = counters.data.ptr
        slots = -(-patterns.block_cols // 32) * 32
        arrays = {"left": self.left, "right": self.right, "starts": self.starts, "indices": self.indices}
        arrays |= {"count": self.indptr}
        pointers = {name: x.data.ptr for name, x in arrays.items()} | {"counters": zeros, "sums": zeros + 8}
        pointers["totals"] = workspace.answer()
        sizes = {"most_pairs": pairs, "most_columns": blocks, "slots": slots}
        uses = (patterns, memory, self.indices, self.indptr, counters)
        patterns.start("list_at_once", patterns.rows, 1, 4 * slots, pointers | sizes, uses)

    @property
    def lists(self) -> tuple[Array, Array, Array]:
        """The left block and the right block of each pair, and the first pair of each block of the result."""
        pairs, blocks = self._room
        return self.left, self.right[:pairs], self.starts[:blocks]

    def finish(self) -> tuple[int, int] | None:
        """Wait for the numbers of pairs and of blocks of the result; None if there is no pair or too little memory."""
        if self._numbers is None:
            self._numbers = workspace.read_answer(2)  # synchronize!
        pairs, blocks = self._numbers
        return (pairs, blocks) if 0 < pairs <= self._room[0] and blocks <= self._room[1] else None

    def index(self, blocks: int) -> tuple[Array, Array]:
        """Return the index arrays of the result. If they take less than half of their memory, a copy is made."""
        return _index(self.indices, self.indptr, blocks, self.is_kept)


class Joining:
    """The pattern of ``A @ B`` while the GPU joins rows of bits: without pairs, whose number may be large.

    What is started after it does not delay `finish`.
    """

    def __init__(self, patterns: _Patterns, bits: Array) -> None:
        rows, cols, index = patterns.rows, patterns.block_cols, patterns.index
        a_blocks, b_blocks = patterns.sizes
        self._room = min(rows * cols, a_blocks * min(cols, b_blocks))
        self.words, self.bits = -(-cols // 32), bits[2:]
        self._numbers: list[int] | None = None
        #: whether other products use it too, and the bytes of its lists
        self.is_kept, self.nbytes = False, 8 * self._room + bits.nbytes
        self._indices, self.places = cupy.empty(self._room, index), cupy.empty(self._room, np.int32)
        self.indptr = cupy.empty(rows + 1, index)
        counters = workspace.counters(2 * rows + 2)
        zeros = counters.data.ptr
        arrays = {"indices": self._indices, "places": self.places, "count": self.indptr, "bits": self.bits}
        pointers = {name: x.data.ptr for name, x in arrays.items()} | {"counters": zeros, "sums": zeros + 8}
        pointers |= {"totals": workspace.answer(), "most": bits.data.ptr}
        values = pointers | {"most_columns": self._room, "slots": self.words}
        uses = (patterns, *arrays.values(), bits, counters)
        patterns.start("join_rows", rows, _WARPS, 8 * self.words, values, uses)
        self._event = cupy.cuda.get_current_stream().record()

    def finish(self) -> int | None:
        """Wait for the number of blocks of the result; None if B has a block twice."""
        if self._numbers is None:
            self._numbers = workspace.read_answer(2, self._event)  # synchronize!
        twice, blocks = self._numbers
        return None if twice or blocks > self._room else blocks

    def index(self, blocks: int) -> tuple[Array, Array]:
        """Return the index arrays of the result. If they take less than half of their memory, a copy is made."""
        return _index(self._indices, self.indptr, blocks, self.is_kept)


def _index(indices: Array, indptr: Array, blocks: int, is_kept: bool) -> tuple[Array, Array]:
    """Return the index arrays of a result: the columns in memory of their own if they are less than half of all.

    Of a pattern that `is_kept` for other products, both are copies.
    """
    is_cut = is_kept or 2 * blocks < len(indices)
    return indices[:blocks].copy() if is_cut else indices[:blocks], indptr.copy() if is_kept else indptr


class KeptPatterns:
    """The patterns of products of two matrices that were multiplied before, so that nothing is waited for again.

    The first product leaves a note, the second one its pattern, unless that is large. Patterns live as long as both
    matrices store the same blocks at the same places.
    """

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, Any]]] = WeakKeyDictionary()

    def get(self, A: Any, B: Any, kind: Any) -> Any:
        """Return the pattern that was found for two operands, or None."""
        found = self._found.get(A, {}).get(B, {}).get(kind)
        return found.get() if isinstance(found, StreamOrdered) and not graphs.is_capturing() else None

    def add(self, A: Any, B: Any, kind: Any, pattern: Listing | Joining) -> None:
        """Note that a pattern was found; keep it the second time."""
        notes = self._found.setdefault(A, WeakKeyDictionary()).setdefault(B, {})
        if kind not in notes:
            notes[kind] = None
        elif notes[kind] is None and pattern.nbytes <= _MOST_KEPT:
            pattern.is_kept = True
            notes[kind] = StreamOrdered(pattern)


#: All that are kept.
KEPT = KeptPatterns()


class _Patterns:
    """The patterns of two matrices, as kernels read them."""

    def __init__(self, a: Blocks, b: Blocks, block_cols: int) -> None:
        self.rows, self.block_cols, self.sizes = len(a.indptr) - 1, block_cols, (len(a.indices), len(b.indices))
        self.inner = len(b.indptr) - 1
        self.index = structure.index_dtype(0, *a[1:], *b[1:])
        # copies stay alive until the kernels that read them have been started
        self._arrays = [tuple(contiguous(x.astype(self.index, copy=False)) for x in matrix[1:]) for matrix in (a, b)]
        self._sides = [_packed(indices, indptr) for indices, indptr in self._arrays]

    @property
    def room(self) -> tuple[int, int] | None:
        """The most pairs and blocks of a result without duplicates; None if they cannot be listed at once."""
        a_blocks, b_blocks = self.sizes
        pairs = a_blocks * min(self.block_cols, b_blocks)
        fits = 0 < pairs <= _MOST_ROOM and self.block_cols <= _MOST_COLUMNS and b_blocks < _MOST // 64
        return (pairs, min(pairs, self.rows * self.block_cols)) if fits else None

    def start(self, entry: str, ctas: int, warps: int, shared_bytes: int, values: dict[str, int], uses: Any) -> None:
        """Start a kernel in CTAs of some warps with these values of its argument; all others are zero."""
        packed = SPGEMM_PATTERN.pack(a=self._sides[0], b=self._sides[1], columns=self.block_cols, **_ZEROS | values)
        kernel = SpgemmPattern(entry, element(self.index), shared_bytes)
        run(kernel, kernel.grid(ctas), (jit.argument(packed),), 32 * warps, uses)


def begin(a: Blocks, b: Blocks, block_cols: int) -> Listing | None:
    """Start to list the pairs of ``A @ B`` in one launch; None if its tables or lists might take too much memory."""
    patterns = _patterns(a, b, block_cols)
    room = None if patterns is None else patterns.room
    return None if patterns is None or room is None else Listing(patterns, room)


def row_bits(B: Any, b: Blocks, block_cols: int) -> Array:
    """Return a bit for each block of a matrix, behind a number of 64 bits: whether it has a block twice.

    They are kept with the operand B, if there are few.
    """
    if (len(b.indptr) - 1) * block_cols > 8 * _MOST_KEPT:
        return _row_bits(b, block_cols)
    found: Array = B.remembered(("bits", block_cols), lambda: _row_bits(b, block_cols))
    return found


def _row_bits(b: Blocks, block_cols: int) -> Array:
    patterns, words = _Patterns(b, b, block_cols), -(-block_cols // 32)
    found = cupy.zeros(2 + patterns.rows * words, np.uint32)
    values = {"bits": found[2:].data.ptr, "most": found.data.ptr, "slots": words}
    patterns.start("set_bits", -(-patterns.rows // _WARPS), _WARPS, 0, values, (patterns, found))
    return found


def join(a: Blocks, b: Blocks, block_cols: int, bits: Array) -> Joining | None:
    """Start to find the pattern of ``A @ B`` alone; None for sizes that are counted with more than 31 bits.

    `bits` are those that `row_bits` has found for B.
    """
    patterns = _patterns(a, b, block_cols)
    few = patterns is not None and patterns.rows * block_cols < _MOST and block_cols // 4 < _SHARED_BYTES
    return Joining(patterns, bits) if patterns is not None and few else None


def product_pattern(a: Blocks, b: Blocks, block_cols: int) -> ProductPattern | None:
    """Return the pairs of blocks of ``A @ B`` and the pattern of the result. Waits once or twice for the GPU.

    The result is None if there are no pairs, if a size exceeds 31 bits, or if a block row of the result may have more
    blocks than fit into a hash table in shared memory.
    """
    patterns = _patterns(a, b, block_cols)
    if patterns is None:
        return None
    room = patterns.room
    if room is not None:
        listing = Listing(patterns, room)
        found = listing.finish()
        if found is not None:
            pairs, blocks = found
            left, right, starts = listing.left[:pairs], listing.right[:pairs], listing.starts[:blocks]
            return ProductPattern(left.copy(), right.copy(), starts.copy(), *listing.index(blocks))
    return _in_steps(patterns)


def _patterns(a: Blocks, b: Blocks, block_cols: int) -> _Patterns | None:
    if len(a.indptr) < 2 or max(len(a.indices), len(b.indices), len(a.indptr) - 1, block_cols) >= _MOST:
        return None
    return _Patterns(a, b, block_cols)


def _in_steps(patterns: _Patterns) -> ProductPattern | None:
    """Count the pairs, list them and pack the columns of the result: three launches and two waits."""
    rows, index = patterns.rows, patterns.index
    before = cupy.zeros(rows + 2, np.int64)
    values: dict[str, int] = {"before": before.data.ptr, "most": before[-1:].data.ptr}
    patterns.start("count_pairs", -(-rows // _WARPS), _WARPS, 0, values, (patterns, before))
    cupy.cumsum(before[:-1], out=before[:-1])
    pairs, most = before[-2:].tolist()  # synchronize!
    slots, listed = _table(min(most, patterns.block_cols))
    bytes_of_warp = 4 * (2 * slots + listed)
    if not 0 < pairs < _MOST or bytes_of_warp > card().shared_bytes:
        return None
    left, right, column, start = (cupy.empty(pairs, np.int32) for _ in range(4))
    indptr = cupy.zeros(rows + 1, index)
    arrays = {"left": left, "right": right, "column": column, "start": start, "count": indptr}
    values |= {name: x.data.ptr for name, x in arrays.items()}
    warps = max(1, min(_WARPS, _SHARED_BYTES // bytes_of_warp))
    sizes = {"slots": slots, "listed": listed}
    patterns.start("list_pairs", -(-rows // warps), warps, warps * bytes_of_warp, values | sizes, ())
    cupy.cumsum(indptr, out=indptr)
    blocks = int(indptr[-1])  # synchronize!
    indices, starts = cupy.empty(blocks, index), cupy.empty(blocks, np.int32)
    values |= {"indices": indices.data.ptr, "starts": starts.data.ptr}
    patterns.start("pack_columns", -(-rows // _WARPS), _WARPS, 0, values, ())
    return ProductPattern(left, right, starts, indices, indptr)


def _packed(indices: Array, indptr: Array) -> bytearray:
    return BLOCK_PATTERN.pack(
        indices=indices.data.ptr, indptr=indptr.data.ptr, rows=len(indptr) - 1, blocks=len(indices)
    )


def _table(columns: int) -> tuple[int, int]:
    """Return the size of a hash table for so many columns, and the size of the array in which columns are sorted.

    Both are powers of two. At least a fifth of the hash table stays free.
    """
    return (_power(max(32, columns * 5 // 4 + 1)), _power(max(1, columns)))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
