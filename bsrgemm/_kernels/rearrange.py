"""Copies of operands by one kernel: turned, with longer lines, in another order, or with numbers in another form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .jit import MAX_GRID_X, MAX_GRID_YZ
from .kernel import Kernel
from .launch import Launch
from .structs import Struct, fields

#: Lines of 16 bytes, as TMA and the copies of Ampere read them.
LINE = 16
#: Matrices of at most so many words are copied together.
_SMALL_WORDS = 2048


#: The argument of rearrange, which copies an operand.
REARRANGE = Struct(
    "Rearrange",
    (
        *fields("P", "from to places"),
        *fields("q", "from_batch from_row from_column to_batch to_row to_column"),
        *fields("q", "batches rows columns to_batches to_rows to_columns part"),
        *fields("i", "way lanes"),
    ),
)


class Lie(NamedTuple):
    """How an array lies that is not there yet: columns of an operand, or a copy."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: where it begins, as far as that matters: new arrays begin at a multiple of 16 bytes
    address: int = 0

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def data(self) -> SimpleNamespace:
        """The memory, of which only the address is known."""
        return SimpleNamespace(ptr=self.address)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def size(self) -> int:
        """The elements between the first and the last one, and the rest of the last line."""
        return max(n * stride for n, stride in zip(self.shape, self.strides, strict=True)) // self.itemsize

    def columns(self, first: int, count: int) -> Lie:
        """Some columns of it."""
        address = self.address + first * self.strides[-1]
        return self._replace(shape=(*self.shape[:-1], count), address=address)

    @classmethod
    def in_order(cls, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Lie:
        """A new array in row-major order."""
        return cls(dtype, shape, tuple(int(np.prod(shape[i + 1 :])) * dtype.itemsize for i in range(len(shape))))


class Way(IntEnum):
    """How words are copied: through tiles, along the fastest index of both sides, or matrix after matrix."""

    TURNED = 0
    STRAIGHT = 1
    SMALL = 2


class Form(IntEnum):
    """What is written of a number: itself, in one or two parts of tf32, with i times it, or of fp8 as 16-bit floats."""

    AS_IT_IS = 0
    TF32 = 1
    TWO_TF32 = 2
    TIMES_I = 3
    F16 = 4
    BF16 = 5


@dataclass(frozen=True)
class Rearrange(Kernel, source="rearrange.cu", argument=REARRANGE):
    """A copy of an operand, read in words of so many bytes: turned, or with longer lines, or in another form."""

    word: int
    form: Form = Form.AS_IT_IS

    #: words of a thread: of small matrices, and of lines
    threads, words, lines = 256, 8, 4

    @property
    def side(self) -> int:
        """The rows and columns of a tile."""
        return 32 if self.word > 8 else 64

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Rearrange]:
        yield from (cls(word) for word in (1, 2, 4, 8, 16))
        yield from (cls(4, form) for form in (Form.TF32, Form.TWO_TF32))
        yield from (cls(word, Form.TIMES_I) for word in (8, 16))
        yield from (cls(word, form) for form in (Form.F16, Form.BF16) for word in (1, 2, 4, 8))

    @classmethod
    def copying(
        cls, x: Any, to: Lie, *, places: Any = None, form: Form = Form.AS_IT_IS, part: int = 0, both: bool = False
    ) -> Launch:
        """The launch that copies x to `to`, both batches of matrices; its operands are arrays that lie like both.

        `to` may have more rows and columns, which become zero. Its matrix b is number ``places[b]`` of x; without
        `places` they are in order. Of a form with two numbers for one, the second is `part` elements behind the first.
        With `both`, the matrices are two operands and their copies, which begin at multiples of 16 bytes.
        """
        size, wider = x.itemsize, to.itemsize
        shape, steps = x.shape, [n // size for n in x.strides]
        ends, ways = list(to.shape), [n // wider for n in to.strides]
        batches, rows, columns = shape
        row = (rows * steps[1], rows * ways[1])
        if not both and places is None and ends[1] == rows and (batches == 1 or (steps[0], ways[0]) == row):
            rows, batches, ends = rows * batches, 1, [1, rows * batches, ends[2]]
        across = steps[2] <= steps[1] or columns == 1  # lanes run along the rows of x
        straight = across == (ways[2] <= ways[1])
        fast, slow = (2, 1) if across else (1, 2)
        wide = 1
        if straight and steps[fast] == ways[fast] == 1 and form in (Form.AS_IT_IS, Form.F16, Form.BF16):
            extents = (columns if across else rows, ends[fast], steps[0], steps[slow], ways[0], ways[slow])
            wide = math.gcd(LINE // wider, *extents, x.data.ptr // size, to.data.ptr // wider)
            rows, columns = (rows, columns // wide) if across else (rows // wide, columns)
            ends[fast] //= wide
            steps = [n if i == fast else n // wide for i, n in enumerate(steps)]
            ways = [n if i == fast else n // wide for i, n in enumerate(ways)]
        kernel, small = cls(size * wide, form), batches > 1 and ends[1] * ends[2] <= _SMALL_WORDS
        way = Way.SMALL if small else Way.STRAIGHT if straight else Way.TURNED
        lanes = min(kernel.side, 1 << (max(1, ends[fast]) - 1).bit_length())
        packed = REARRANGE.pack(
            **{"from": 0}, to=0, places=0 if places is None else places.data.ptr,
            **{f"from_{name}": n for name, n in zip(("batch", "row", "column"), steps, strict=True)},
            **{f"to_{name}": n for name, n in zip(("batch", "row", "column"), ways, strict=True)},
            batches=batches, rows=rows, columns=columns, to_batches=ends[0], to_rows=ends[1], to_columns=ends[2],
            part=part, way=way, lanes=lanes,
        )  # fmt: skip
        write = _writer_of_both(kernel.word) if both else REARRANGE.patch("from", "to").write
        return Launch(kernel, kernel.grid(way, ends, fast, lanes), packed, pointers=write, holds=places)

    def grid(self, way: Way, ends: list[int], fast: int, lanes: int) -> tuple[int, int, int]:
        """The CTAs for a copy with these ends, of which `fast` is the fastest; the kernel loops over what exceeds it.

        Tiles of columns, tiles of rows, batches; of a straight copy lanes, lines, batches.
        """
        batches, rows, columns = (max(1, n) for n in ends)  # a grid has a CTA where there is nothing to copy
        if way is Way.SMALL:
            return min(MAX_GRID_X, -(-batches * rows * columns // (self.threads * self.words))), 1, 1
        x, y = -(-columns // self.side), -(-rows // self.side)
        if way is Way.STRAIGHT:
            along, lines = (columns, rows) if fast == 2 else (rows, columns)
            x, y = -(-along // lanes), -(-lines // (self.lines * self.threads // lanes))
        return min(MAX_GRID_X, x), min(MAX_GRID_YZ, y), min(MAX_GRID_YZ, batches)


def _writer_of_both(word: int) -> Callable[..., None]:
    """What writes the addresses of two operands and of their copies, as batches of two."""
    addresses = REARRANGE.patch("from", "to").write
    distances = [REARRANGE.patch(name).write for name in ("from_batch", "to_batch")]

    def write(argument: Any, x: int, y: int, copy_x: int, copy_y: int) -> None:
        addresses(argument, x, copy_x)
        for distance, apart in zip(distances, (y - x, copy_y - copy_x), strict=True):
            distance(argument, apart // word)

    return write
