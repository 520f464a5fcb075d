"""Products of a matrix that is filled up with zeros: what fills it, and what mends the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import cupy
import numpy as np

from .._kernels.card import Card
from .._kernels.element_types import BYTES, Types
from .._kernels.jit import MAX_GRID_X, MAX_GRID_YZ
from .._kernels.kernel import Kernel
from .._kernels.launch import Chain, Launch
from .._kernels.rearrange import LINE, Lie
from .._kernels.structs import Struct
from . import arguments
from .call import MOST_BYTES, Problem
from .choice import plain
from .costs import memory, operand_bytes
from .dense import Dense, Holder, ceil_power_of_two
from .gemm_simt import INDEX, names_of
from .operand import Kind, Operand

#: Rows of a part of a block row; block columns of a window, and bytes of a part of it, at most and at least; CTAs that
#: a multiprocessor should have.
_HIGH, _MOST_WINDOW, _LEAST_BYTES, _CTAS = 8, 4096, 4096, 8
#: Bytes of the lines of the blocks into which a filled matrix is divided, if one divides its columns, and of the
#: longest and the shortest lines otherwise.
_LINES = (512, 384, 256, 128)
_MOST_LINE, _LEAST_LINE = 1024, 96


@dataclass(frozen=True)
class Fill(Kernel, source="fill.cu", argument=arguments.FILL, needs="sm_80"):
    """A matrix filled up with zeros, in blocks as high as the matrix, in words of so many bytes."""

    word: int
    index: str = "i32"

    threads, shared_bytes = 256, 0

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Fill]:
        yield from (cls(word, index) for word in (1, 2, 4, 8, 16) for index in ("i32", "i64"))

    @classmethod
    def of(cls, problem: Problem, inner: Problem) -> Fill:
        """In the longest words of which the lines of both consist; blocks of a transpose are read by elements."""
        size = BYTES[problem.types.a]
        whole = problem.aligned and not problem.transposed
        return cls(math.gcd(16, problem.K * size, inner.K * size) if whole else size, problem.types.index)

    @property
    def rare(self) -> bool:
        return self.index == "i64"

    def prepare(self, call: Kind, card: Card, inner: Problem | None = None) -> tuple[Launch, tuple[int, int, int]]:
        """The launch for (blocks, the filled matrix, what is stored twice), and the shape of the last one.

        `inner` says how the filled matrix is divided; by default as `filled` does it.
        """
        p, inner = call.problem, inner or filled(call.problem)
        size = BYTES[p.types.a]
        K, wide, line = (n * size // self.word for n in (p.K, inner.K, inner.lines))
        index = call.operand.index(call.stored_columns, p.transposed)
        addresses = [0 if x is None else x.data.ptr for x in index]
        high = min(p.R, _HIGH)
        parts = -(-p.R // high)
        # As many windows as give every multiprocessor some CTAs, of which each has at least some kilobytes.
        least, some = high * K * self.word, max(1, _CTAS * card.multiprocessors // (p.block_rows * parts))
        window = max(1, -(-_LEAST_BYTES // least), -(-p.block_cols // some))
        window = min(window, _MOST_WINDOW, p.block_cols)
        windows = -(-p.block_cols // window)
        lanes = ceil_power_of_two(high * K, self.threads)
        packed = arguments.FILL.pack(
            data=0, to=0, twice=0, **dict(zip(("indices", "indptr", "places"), addresses, strict=True)),
            block_rows=p.block_rows, block_cols=p.block_cols, blocks=p.blocks, wide=wide, line=line,
            R=p.R, K=K, high=high, parts=parts, window=window, windows=windows, lanes=lanes,
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


@lru_cache(maxsize=256)
def _divisor(columns: int, size: int) -> int:
    """The most elements, in lines of 16 n bytes from about 100 to 1,000, that divide so many; all if there are none.

    Multiples of 16 elements are preferred, since more kernels take them.

    >>> [_divisor(columns, 2) for columns in (4080, 1000, 4092, 997)]
    [272, 200, 4092, 997]
    """
    fits = [n for n in range(_LEAST_LINE // size, _MOST_LINE // size + 1) if columns % n == 0 and n * size % LINE == 0]
    return max(fits, key=lambda n: (n % 16 == 0) + n / columns, default=columns)


def filled(problem: Problem) -> Problem:
    """The product with the matrix filled up: one block row, divided into blocks of equal lines if that is possible.

    >>> names = Types("f16", "f16", "f16", "f32")
    >>> thirds = Problem("sm_90a", names, 3, 3, 64, 1, 1024, 1024, 9000, False, "C", "C", True, True)
    >>> (filled(thirds).R, filled(thirds).K, filled(thirds).blocks)
    (3072, 256, 12)
    """
    rows, columns, size = problem.block_rows * problem.R, problem.block_cols * problem.K, BYTES[problem.types.a]
    wide = next((line // size for line in _LINES if columns * size % line == 0), 0) or _divisor(columns, size)
    line = -(-wide * size // LINE) * LINE // size
    return replace(
        problem, types=replace(problem.types, index="i32"), R=rows, K=wide, block_rows=1, block_cols=columns // wide,
        blocks=columns // wide, transposed=False, aligned=True, line=line if line > wide else 0, uneven=1,
    )  # fmt: skip


@dataclass(frozen=True)
class Filled(Holder):
    """Fill the matrix up with zeros, and multiply it as one block row of large blocks.

    Small and odd blocks leave tensor cores idle: where enough of the matrix is stored, the dense product is faster.
    What is not finite afterwards is computed again from what is stored, and so is a block row that has a block twice.
    """

    costs: ClassVar = {
        "t0": 8.62, "fill": 0.458, "store": 0.276, "read": 0.575,
    }  # fmt: skip

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        columns, size = problem.block_cols * problem.K, BYTES[problem.types.a]
        return (
            problem.block_rows > 1
            and problem.blocks > 0
            and problem.overwrite
            and problem.parts == 1
            and problem.line == 0
            and not problem.turned
            and max(columns + LINE, problem.R * problem.K) < 2**31
            and problem.block_rows * problem.R * (columns * size + LINE) <= MOST_BYTES
        )

    def inner(self, problem: Problem) -> Problem:
        return filled(problem)

    def around(self, problem: Problem, inner: Problem, card: Card) -> float:
        """The filled matrix is written, and the result is read."""
        x = self.costs
        stored, _, result = operand_bytes(problem)
        written = inner.blocks * inner.R * inner.lines * BYTES[problem.types.a]
        around = [memory(card, n) / x[of] for n, of in ((stored, "store"), (written, "fill"), (result, "read"))]
        return 1e-6 * (x["t0"] + float(sum(around)))

    def prepare(self, call: Kind, card: Card) -> Chain:
        problem, inner, stored = call.problem, filled(call.problem), call.operand.arrays[0]
        data = Lie.in_order(stored.dtype, (inner.blocks, inner.R, inner.lines))
        operand = call.operand.remembered(("filled", inner.R, inner.K), lambda: self._operand(call, inner))
        launch = self.kernel.prepare(Kind(inner, operand, call.B, call.out, True), card)
        names = problem.types
        fill, shape = Fill.of(problem, inner).prepare(call, card)
        mend = Mend(names, problem.transposed).mending(call, shape[1] * shape[2])

        def multiply(arrays: Any, alpha: Any, beta: Any) -> None:
            B, out, full, twice = arrays
            fill.start((stored, full, twice))
            launch.start((B, out, full), alpha, beta)
            mend.start((B, out, twice), alpha, beta)

        rooms = [(data.shape, data.dtype), (shape, np.dtype(np.uint8))]
        return Chain([multiply], rooms, otherwise=lambda: plain(problem, card).prepare(call, card))

    @staticmethod
    def _operand(call: Kind, inner: Problem) -> Operand:
        """The filled matrix: one block row, all of whose blocks are stored."""
        dtype, line = call.operand.arrays[0].dtype, inner.lines * BYTES[inner.types.a]
        data = Lie(dtype, (inner.blocks, inner.R, inner.K), (inner.R * line, line, dtype.itemsize))
        indices = cupy.arange(inner.blocks, dtype=np.int32)
        bounds = cupy.arange(0, inner.blocks + 1, inner.blocks, dtype=np.int32)
        return call.operand.derived(data, indices, bounds, (inner.R, inner.block_cols * inner.K))
