"""Configurations of the kernels that implement array primitives on the GPU.

`expand` finds the row of each entry of a compressed index, `segment` reduces segments of rows, `vector_steps` has the
inner products and updates of Krylov methods. The others are operations on matrices, which `device_arrays` launches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .._kernels.element_types import BYTES, accumulator, element
from .._kernels.jit import MAX_GRID_X
from .._kernels.kernel import Kernel
from .._kernels.structs import Struct, fields
from ..dtypes import BOOL, accumulator_dtype

OPERATIONS = {"add": "kAdd", "maximum": "kMaximum", "minimum": "kMinimum", "fmax": "kFmax", "fmin": "kFmin"}
#: The argument of `vector_steps`.
VECTOR_STEPS = Struct(
    "VectorSteps",
    (
        *((name, "P") for name in ("x", "u", "v", "p", "a", "b", "sum", "numbers", "partial", "arrived")),
        ("n", "q"),
        ("aligned", "i"),
    ),
)
#: The argument of `diagonal`.
DIAGONAL = Struct(
    "Diagonal",
    (
        *fields("P", "data indices indptr out stored missing"),
        *fields("q", "rows blocks count below above"),
        *fields("i", "R C canonical turned single"),
    ),
)
#: The argument of `check_pattern`.
CHECK_PATTERN = Struct(
    "CheckPattern", (*fields("P", "indices indptr found partial arrived"), *fields("q", "entries rows"))
)
#: The argument of `block_elements`.
BLOCK_ELEMENTS = Struct(
    "BlockElements",
    (
        *fields("P", "data indices indptr values rows columns runs found wrong arrived"),
        *fields("q", "block_rows block_cols blocks elements tile row_stride col_stride"),
        *fields("i", "R C"),
    ),
)
#: The argument of `reduce_lines`.
REDUCE_LINES = Struct(
    "ReduceLines",
    (
        *fields("P", "data places starts out"),
        *fields("q", "groups entries blocks length"),
        *fields("i", "side width line_step step only_stored"),
    ),
)
#: The arguments of `merge_patterns`, `kept_places` and `combine_blocks`.
MERGE_PATTERNS = Struct(
    "MergePatterns",
    (
        *fields("P", "a a_ptr b b_ptr left right indices counts total arrived"),
        *fields("q", "rows a_blocks b_blocks"),
    ),
)
KEPT_PLACES = Struct("KeptPlaces", (*fields("P", "kept places counts total arrived"), *fields("q", "n tile")))
COMBINE_BLOCKS = Struct(
    "CombineBlocks",
    (
        *fields("P", "a b left right a_ptr b_ptr a_indices data indices indptr nonzero found nonzeros arrived count"),
        *fields("q", "blocks a_blocks b_blocks rows column_shift block_shift"),
        *fields("i", "size tile listed turned"),
    ),
)
#: The argument of `csr_blocks`.
CSR_BLOCKS = Struct(
    "CsrBlocks",
    (
        *fields("P", "columns pointers counts indptr indices runs found total arrived"),
        *fields("q", "block_rows block_cols elements blocks"),
        *fields("i", "R C"),
    ),
)
#: The operations of two elements that `combine_blocks` has, by the names that their functions have.
COMBINATIONS = {
    "add": "kAdd", "sub": "kSubtract", "mul": "kMultiply", "maximum": "kMaximum", "minimum": "kMinimum",
    "ne": "kNotEqual", "lt": "kLess", "gt": "kGreater",
}  # fmt: skip
_COMPARISONS = ("ne", "lt", "gt")
#: Operations that need an order, which complex numbers have by convention alone.
_ORDERING = ("maximum", "minimum", "lt", "gt")
#: The dtypes of vectors that `vector_steps` takes, each with those that the vector v may have beside it.
VECTOR_DTYPES = {np.dtype(a): tuple(map(np.dtype, b)) for a, b in (("f", "f"), ("d", "df"), ("F", "F"), ("D", "DF"))}


@dataclass(frozen=True)
class Segment(Kernel, source="segment.cu"):
    """Configuration of the kernel that reduces segments of rows."""

    element_a: str
    accumulator: str
    operation: str
    lanes: int
    columns: int

    threads = 128

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Segment]:
        for dtype in dtypes:
            for operation in OPERATIONS:
                yield from (segment(dtype, operation, 1, 1 << n) for n in range(6))
                yield segment(dtype, operation, 32, 1)

    def grid(self, segments: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-segments // (self.threads // (self.lanes * self.columns)))),)


@dataclass(frozen=True)
class Expand(Kernel, source="expand.cu"):
    """Configuration of the kernel that writes the row of each entry of a compressed index."""

    index: str

    threads = 128
    entries = 8

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Expand]:
        yield from map(cls, ("i32", "i64"))

    def grid(self, entries: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-entries // (self.threads * self.entries))),)


@dataclass(frozen=True)
class VectorSteps(Kernel, source="vector_steps.cu", argument=VECTOR_STEPS, derived="unroll"):
    """Configuration of the kernel with the steps of Krylov methods; `element_b` is that of the vector v."""

    operation: str
    element_a: str
    element_b: str

    threads = 256
    #: The most CTAs: as many as run at once on 128 multiprocessors. A grid follows from n and the types alone, so that
    #: sums have the same bits on every card.
    most_ctas = 512
    #: Bytes of a load.
    pack_bytes = 16

    @property
    def unroll(self) -> int:
        """Loads of each vector that a thread has under way; an advance reads four vectors in place of two."""
        return 2 if self.operation == "kAdvance" else 4

    @property
    def has_sum(self) -> bool:
        """Whether there is a sum over all elements."""
        return self.operation != "kDirection"

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[VectorSteps]:
        for dtype in dtypes:
            yield from vector_steps_of(dtype)

    def grid(self, n: int) -> tuple[int]:
        """One CTA at least, which writes a sum of nothing."""
        chunk = self.threads * self.unroll * self.pack_bytes // BYTES[self.element_a]
        return (max(1, min(self.most_ctas, -(-n // chunk))),)


#: For values that are only moved, the CUDA name of a type with so many bytes.
MOVED = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "c128"}
_INDICES = ("i32", "i64")


def most_ctas(items: int, each: int) -> tuple[int]:
    """Return the grid for so many items, of which a CTA takes `each`; its loops go on beyond the largest grid."""
    return (min(MAX_GRID_X, -(-items // each)),)


@dataclass(frozen=True)
class Diagonal(Kernel, source="diagonal.cu", argument=DIAGONAL):
    """Configuration of the kernel that reads and sets diagonals, and reads the blocks on the diagonal."""

    operation: str
    element_a: str
    accumulator: str
    index: str

    threads = 128

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Diagonal]:
        for index in _INDICES:
            for dtype in dtypes:
                yield from (cls.reading(name, dtype, index) for name in ("kElements", "kBlocks"))
            yield cls.moving("kFind", 1, index)
            yield from (cls.moving("kSet", size, index) for size in MOVED)

    @classmethod
    def reading(cls, operation: str, dtype: np.dtype[Any], index: str) -> Diagonal:
        """Return the kernel that reads elements of `dtype`."""
        return cls(operation, element(dtype), accumulator(dtype)[0], index)

    @classmethod
    def moving(cls, operation: str, size: int, index: str) -> Diagonal:
        """Return the kernel that looks for elements of so many bytes, or sets them."""
        return cls(operation, MOVED[size], MOVED[size], index)


@dataclass(frozen=True)
class CheckPattern(Kernel, source="check_pattern.cu", argument=CHECK_PATTERN):
    """Configuration of the kernel that tells whether index arrays are valid, in order, and without duplicates."""

    index: str

    threads = 256
    entries = 4
    #: The most CTAs, whose parts the last of them joins.
    most_ctas = 512
    #: Bytes of what a CTA leaves for the last one.
    partial_bytes = 48

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[CheckPattern]:
        yield from map(cls, _INDICES)

    def grid(self, entries: int) -> tuple[int]:
        return (max(1, min(self.most_ctas, -(-entries // (self.threads * self.entries)))),)


@dataclass(frozen=True)
class BlockElements(Kernel, source="block_elements.cu", argument=BLOCK_ELEMENTS):
    """Configuration of the kernel that moves the elements of all blocks to CSR, COO and dense matrices, and back."""

    format: str
    element_a: str
    index: str
    to: str

    threads = 256
    #: Elements that a CTA takes at once, at least and at most, and the CTAs that there are to be before it takes more.
    part, most, ctas = 8 * threads, 32 * threads, 1024

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BlockElements]:
        sizes = sorted({x.itemsize for x in dtypes})
        for index, to in itertools.product(_INDICES, _INDICES):
            yield from (cls.of(name, size, index, to) for name in ("kCsr", "kCoo") for size in sizes)
        for index in _INDICES:
            yield cls.of("kFind", 1, index, index)
            yield from (cls.of(name, size, index, index) for name in ("kFill", "kPut", "kTake") for size in sizes)

    @classmethod
    def of(cls, format: str, size: int, index: str, to: str) -> BlockElements:
        """Return the kernel for elements of so many bytes."""
        return cls(format, MOVED[size], index, to)

    @classmethod
    def tile(cls, elements: int) -> int:
        """Return how many elements a CTA takes at a time."""
        return max(cls.part, min(cls.most, elements // cls.ctas // cls.part * cls.part))


@dataclass(frozen=True)
class ReduceLines(Kernel, source="reduce_lines.cu", argument=REDUCE_LINES):
    """Configuration of the kernel that reduces each row or column of a matrix; `lanes` of a warp share one."""

    operation: str
    element_a: str
    element_c: str
    accumulator: str
    lanes: int
    index: str

    threads = 128

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[ReduceLines]:
        for dtype, index, elements in itertools.product(dtypes, _INDICES, (0, 16, 256)):
            for operation in (*OPERATIONS, "count"):
                for out in sorted(reduced_dtypes(operation, dtype), key=str):
                    yield reduce_lines(operation, dtype, out, elements, index)

    def grid(self, lines: int) -> tuple[int]:
        return most_ctas(lines, self.threads // self.lanes)


def reduced_dtypes(operation: str, dtype: np.dtype[Any]) -> set[np.dtype[Any]]:
    """Return the dtypes that `reduce_lines` can give reductions of `dtype`: extremes their own, sums NumPy's too."""
    if operation == "count":
        return {np.dtype(np.int64)}
    if operation != "add":
        return {dtype}
    wide = np.dtype(np.uint64 if dtype.kind == "u" else np.int64) if dtype.kind in "biu" else accumulator_dtype(dtype)
    return {dtype, wide}


def reduce_lines(operation: str, dtype: np.dtype[Any], out: np.dtype[Any], elements: int, index: str) -> ReduceLines:
    """Choose the kernel for lines of so many elements on average."""
    lanes = 2 if elements < 16 else 8 if elements < 256 else 32
    acc = accumulator(out)[0] if operation in ("add", "count") else _ordered(dtype)
    name = OPERATIONS.get(operation, "kCount")
    return ReduceLines(name, element(dtype), element(out), acc, lanes, index)


@dataclass(frozen=True)
class MergePatterns(Kernel, source="merge_patterns.cu", argument=MERGE_PATTERNS):
    """Configuration of a pass of the kernel that finds the union of two patterns."""

    fill: bool
    index: str

    threads = 128
    #: Positions on the path through both patterns that a CTA takes at a time.
    tile = 8 * threads

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[MergePatterns]:
        yield from itertools.starmap(cls, itertools.product((False, True), _INDICES))


@dataclass(frozen=True)
class KeptPlaces(Kernel, source="kept_places.cu", argument=KEPT_PLACES):
    """Configuration of a pass of the kernel that lists what is kept."""

    fill: bool
    element_a: str
    accumulator: str
    index: str

    threads = 256
    #: Numbers that a CTA takes at once, and the tiles that there are to be before a tile has more.
    part, tiles = 8 * threads, 4096

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[KeptPlaces]:
        for fill, index, dtype in itertools.product((False, True), _INDICES, dtypes):
            yield cls.of(fill, dtype, index)

    @classmethod
    def of(cls, fill: bool, dtype: np.dtype[Any], index: str) -> KeptPlaces:
        """Return a pass over numbers of `dtype`; a pass that only counts is the same for all index types."""
        return cls(fill, element(dtype), _ordered(dtype), index if fill else _INDICES[0])

    @classmethod
    def tile(cls, n: int) -> int:
        """Return the length of a tile of n numbers."""
        return cls.part * max(1, n // (cls.part * cls.tiles))


@dataclass(frozen=True)
class CombineBlocks(Kernel, source="combine_blocks.cu", argument=COMBINE_BLOCKS):
    """Configuration of the kernel that combines the blocks of two matrices, or gathers those of one."""

    operation: str
    element_a: str
    element_c: str
    accumulator: str
    index: str

    threads = 256

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[CombineBlocks]:
        for index in _INDICES:
            yield from (gather_blocks(size, index) for size in sorted({dtype.itemsize for dtype in dtypes}))
            for dtype, name in itertools.product(dtypes, COMBINATIONS):
                if combines(name, dtype):
                    yield combine_blocks(name, dtype, index)

    @staticmethod
    def tile(blocks: int, size: int) -> int:
        """Return how many blocks of so many elements a CTA takes at a time: fewer of few, for 512 CTAs."""
        elements = min(8192, max(1024, blocks * size // 512))
        return max(1, min(2048, elements // size))


def combines(name: str, dtype: np.dtype[Any]) -> bool:
    """Whether `combine_blocks` has an operation of this name for operands of `dtype`."""
    refused = (name == "sub" and dtype == BOOL) or (name in _ORDERING and dtype.kind == "c")
    return name in COMBINATIONS and not refused


def combined_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the result of an operation with two operands of `dtype`."""
    return BOOL if name in _COMPARISONS else dtype


def combine_blocks(name: str, dtype: np.dtype[Any], index: str) -> CombineBlocks:
    """Return the kernel for an operation with two operands of `dtype`."""
    acc = accumulator(dtype)[0] if name in ("add", "sub", "mul") else _ordered(dtype)
    return CombineBlocks(COMBINATIONS[name], element(dtype), element(combined_dtype(name, dtype)), acc, index)


def gather_blocks(size: int, index: str) -> CombineBlocks:
    """Return the kernel that copies some blocks whose elements have so many bytes."""
    return CombineBlocks("kFirst", MOVED[size], MOVED[size], MOVED[size], index)


@dataclass(frozen=True)
class CsrBlocks(Kernel, source="csr_blocks.cu", argument=CSR_BLOCKS):
    """Configuration of a pass of the kernel that finds the blocks of a matrix in CSR; a lane has so many `rows`."""

    fill: bool
    lanes: int
    rows: int
    index: str

    threads = 128
    #: Blocks of more rows have no kernel, nor have those of more columns, whose runs do not fit into a word.
    most_rows, most_columns = 128, 1 << 23

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[CsrBlocks]:
        for index, height, fill in itertools.product(_INDICES, (1, 2, 4, 8, 16, 32, 64, 128), (False, True)):
            yield cls.of(fill, height, index)

    @classmethod
    def of(cls, fill: bool, R: int, index: str) -> CsrBlocks:
        """Return a pass for blocks of R rows."""
        lanes = min(32, 1 << (R - 1).bit_length())
        return cls(fill, lanes, 1 << (-(-R // lanes) - 1).bit_length(), index)


def vector_steps_of(dtype: np.dtype[Any]) -> Iterator[VectorSteps]:
    """Yield the configs of all steps with vectors of `dtype`; in an advance all vectors have it."""
    for other in VECTOR_DTYPES.get(dtype, ()):
        yield from (vector_step(name, dtype, other) for name in ("kInnerProduct", "kDirection"))
    if dtype in VECTOR_DTYPES:
        yield vector_step("kAdvance", dtype, dtype)


@lru_cache(maxsize=64)
def vector_step(operation: str, dtype: np.dtype[Any], other: np.dtype[Any]) -> VectorSteps:
    """Return the kernel for vectors of `dtype`, of which v has the dtype `other`."""
    return VectorSteps(operation, element(dtype), element(other))


@lru_cache(maxsize=1024)
def segment(dtype: np.dtype[Any], operation: str, average: int, width: int) -> Segment:
    """Choose the kernel for segments that have `average` rows of `width` values.

    A warp reduces each column of a segment of 32 rows or more; a single thread reduces a column of a shorter one.
    """
    lanes = 32 if average >= 32 else 1
    columns = 1 if lanes == 32 else min(32, 1 << (max(1, width) - 1).bit_length())
    acc = accumulator(dtype)[0] if operation == "add" else _ordered(dtype)
    return Segment(element(dtype), acc, OPERATIONS[operation], lanes, columns)


def _ordered(dtype: np.dtype[Any]) -> str:
    """Return the device type in which values of `dtype` are compared: float32 for 16-bit floats, else their own type.

    Unlike an accumulator it keeps the signedness of integers, which decides their order.
    """
    return "f32" if accumulator_dtype(dtype) != dtype else element(dtype)


#: The kernels that implement array primitives.
ARRAYS: tuple[type[Kernel], ...] = (
    *(Expand, Segment, VectorSteps, Diagonal, CheckPattern, BlockElements, ReduceLines),
    *(MergePatterns, KeptPlaces, CombineBlocks, CsrBlocks),
)
