"""What fills a matrix up with zeros, so that a dense product can be computed, and what mends its result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._kernels.card import Card
from .._kernels.element_types import BYTES, Types
from .._kernels.jit import MAX_GRID_X, MAX_GRID_YZ
from .._kernels.kernel import Kernel
from .._kernels.launch import Launch
from .._kernels.rearrange import LINE
from .._kernels.structs import Struct
from . import arguments
from .call import Problem
from .dense import Dense, ceil_power_of_two
from .gemm_simt import INDEX, names_of
from .operand import Kind

#: Rows of a part of a block row; block columns of a window, and bytes of a part of it, at most and at least; CTAs that
#: a multiprocessor should have.
_HIGH, _MOST_WINDOW, _LEAST_BYTES, _CTAS = 8, 4096, 4096, 8
#: Bytes of the lines of the blocks into which a filled matrix is divided, if one of these divides its columns.
_LINES = (512, 384, 256, 128)


@dataclass(frozen=True)
class Fill(Kernel, source="fill.cu", argument=arguments.FILL, needs="sm_80"):
    """A matrix filled up with zeros, in blocks as high as the matrix, of elements of so many bytes."""

    word: int
    index: str = "i32"

    threads, shared_bytes = 256, 0

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Fill]:
        yield from (cls(word, index) for word in (1, 2, 4, 8, 16) for index in ("i32", "i64"))

    @property
    def rare(self) -> bool:
        return self.index == "i64"

    def prepare(self, call: Kind, card: Card, inner: Problem | None = None) -> tuple[Launch, tuple[int, int, int]]:
        """The launch for (blocks, the filled matrix, what is stored twice), and the shape of the last one.

        `inner` says how the filled matrix is divided; by default as `filled` does it.
        """
        p, inner = call.problem, inner or filled(call.problem)
        index = call.operand.index(call.stored_columns, p.transposed)
        addresses = [0 if x is None else x.data.ptr for x in index]
        high = min(p.R, _HIGH)
        parts = -(-p.R // high)
        # As many windows as give every multiprocessor some CTAs, of which each has at least some kilobytes.
        least, some = high * p.K * self.word, max(1, _CTAS * card.multiprocessors // (p.block_rows * parts))
        window = max(1, -(-_LEAST_BYTES // least), -(-p.block_cols // some))
        window = min(window, _MOST_WINDOW, p.block_cols)
        windows = -(-p.block_cols // window)
        lanes = ceil_power_of_two(high * p.K, self.threads)
        packed = arguments.FILL.pack(
            data=0, to=0, twice=0, **dict(zip(("indices", "indptr", "places"), addresses, strict=True)),
            block_rows=p.block_rows, block_cols=p.block_cols, blocks=p.blocks, wide=inner.K, line=inner.lines,
            R=p.R, K=p.K, high=high, parts=parts, window=window, windows=windows, lanes=lanes,
        )  # fmt: skip
        grid = (min(MAX_GRID_X, p.block_rows), min(MAX_GRID_YZ, parts * windows))
        write_data, write = arguments.FILL.patch("data").write, arguments.FILL.patch("to", "twice").write

        def pointers(to: Any, data: int, room: int, twice: int) -> None:
            write_data(to, data)
            write(to, room, twice)

        return Launch(self, grid, packed, pointers=pointers, holds=index), (p.block_rows, parts, windows)


@dataclass(frozen=True)
class Mend(Dense, source="mend.cu", argument=arguments.mend, needs="sm_80"):
    """Computes anew what zeros of a filled matrix have spoiled, because B has an infinity or NaN there."""

    types: Types
    a_transposed: bool = False

    threads, shared_bytes, wide = 128, 0, 8

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Mend]:
        for dtype, index in itertools.product((d for d in dtypes if d.kind in "fcV" or d == np.int8), INDEX):
            yield cls(names_of(dtype, index))
            if index == np.int32:
                yield cls(names_of(dtype, index), True)
        if np.dtype(np.uint8) in dtypes:
            yield from (cls(Types("e4m3", "e4m3", c, "f32")) for c in ("f16", "bf16", "f32"))

    @property
    def rare(self) -> bool:
        return self.types.index == "i64"

    def mending(self, call: Kind, each: int) -> Launch:
        """The launch for (B, the result, what is stored twice), of which a block row has so many numbers."""
        p, out = call.problem, call.out
        across = abs(out.strides[-2]) < abs(out.strides[-1])
        rows = p.block_rows * p.R
        fast, slow = (rows, p.N) if across else (p.N, rows)
        grid = (
            min(MAX_GRID_X, -(-fast // (self.threads * self.wide))), min(MAX_GRID_YZ, slow), min(MAX_GRID_YZ, p.batches)
        )  # fmt: skip
        index = call.operand.index(call.stored_columns, p.transposed)
        return self.launch(call, grid, index, more={"twice": 0, "each": each, "across": across})

    @staticmethod
    def _pointers(layout: Struct, inner: str, copied: bool) -> Callable[..., None]:
        """What writes the addresses of B, the result, and what is stored twice."""
        write, write_twice = layout.patch(inner + "b", inner + "c").write, layout.patch("twice").write

        def write_all(to: Any, b: int, c: int, twice: int) -> None:
            write(to, b, c)
            write_twice(to, twice)

        return write_all


def filled(problem: Problem) -> Problem:
    """The product with the matrix filled up: one block row, divided into blocks of equal lines if that is possible.

    >>> names = Types("f16", "f16", "f16", "f32")
    >>> thirds = Problem("sm_90a", names, 3, 3, 64, 1, 1024, 1024, 9000, False, "C", "C", True, True)
    >>> (filled(thirds).R, filled(thirds).K, filled(thirds).blocks)
    (3072, 256, 12)
    """
    rows, columns, size = problem.block_rows * problem.R, problem.block_cols * problem.K, BYTES[problem.types.a]
    wide = next((line // size for line in _LINES if columns * size % line == 0), columns)
    line = -(-wide * size // LINE) * LINE // size
    return replace(
        problem, types=replace(problem.types, index="i32"), R=rows, K=wide, block_rows=1, block_cols=columns // wide,
        blocks=columns // wide, transposed=False, aligned=True, line=line if line > wide else 0,
    )  # fmt: skip
