"""``BSR @ BSR`` as a product with a filled matrix, of which the blocks of the result are taken.

Small and odd blocks make more pairs than a card can list and multiply in the time of a dense product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import cupy
import numpy as np

from .._backend.base import Array, Blocks
from .._kernels import jit, overlapping
from .._kernels.card import Card, card, tensor_arch
from .._kernels.element_types import Types, element
from .._kernels.jit import MAX_GRID_X
from .._kernels.kernel import Kernel
from .._kernels.launch import Launch, run
from .._kernels.rearrange import LINE
from . import pairs, reals, spgemm_pattern
from .arguments import TAKE_BLOCKS
from .block_products import BlockProblem, is_preferred
from .call import MOST_BYTES, Problem
from .costs import from_l2, memory
from .filled import Fill, Filled, filled
from .gemm_simt import INDEX, names_of
from .operand import Kind, Operand
from .prepared import fastest
from .spgemm_pattern import KEPT, Joining


@dataclass(frozen=True)
class TakeBlocks(Kernel, source="take_blocks.cu", argument=TAKE_BLOCKS, needs="sm_80"):
    """The blocks of a result, from a product with a filled matrix; what its zeros have spoiled is computed anew."""

    types: Types

    threads, wide = 128, 8

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[TakeBlocks]:
        for dtype, index in itertools.product((d for d in dtypes if d.kind in "fV"), INDEX):
            yield cls(names_of(dtype, index))

    @property
    def rare(self) -> bool:
        return self.types.index == "i64"

    def grid(self, elements: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-elements // (self.threads * self.wide))),)


@dataclass(frozen=True)
class SparseDense:
    """``A @ B`` of two BSR matrices of one dtype: B is filled up, A is multiplied by it, and blocks are taken.

    Complex matrices are real ones here, as `reals` says.
    """

    #: the product of A and B filled up
    problem: Problem
    dtype: np.dtype[Any]
    #: dtype and sides (R, K, N) of the blocks as they are stored
    stored: np.dtype[Any]
    sides: tuple[int, int, int]
    #: columns of a block of B, its block columns, and its blocks
    N: int
    columns: int
    blocks: int

    #: microseconds of launches that others do not need, and of a pair that is listed; how many times the bits of a row
    #: of B are read from the L2, and the share of the bandwidth of memory that `take_blocks` reaches
    costs: ClassVar = {"t0": 30.0, "pair": 0.2e-3, "bits": 2.0, "take": 0.25}

    @classmethod
    def of(cls, A: Operand, B: Operand, block_cols: int, dtype: np.dtype[Any]) -> SparseDense | None:
        """The product of two matrices, if it is possible and predicted to be faster, otherwise None."""
        (a, _, indptr), (b, *_, b_indptr) = A.arrays, B.arrays
        if A.whole is None or B.whole is None or not a.dtype == b.dtype == dtype or dtype.kind not in "fcV":
            return None
        counts = len(indptr) - 1, len(b_indptr) - 1, block_cols
        sides = (*a.shape[1:], b.shape[2])
        aligned, forced = A.pointer % LINE == 0, Kernel.forced
        return _chosen(sides, counts, (len(a), len(b)), dtype, A.indices_dtype, aligned, forced, card())

    @property
    def served(self) -> bool:
        """Whether what is counted by 31 bits is few enough, and the memory is bounded."""
        p, size = self.problem, self.dtype.itemsize
        rows, inner = p.block_rows * p.R, p.block_cols * p.K
        return (
            p.blocks > 0
            and self.blocks > 0
            and tensor_arch(p.arch)
            and max(p.N, inner) + LINE < 2**31
            and max(p.K, p.R) * self.N < 2**31
            and max(p.block_rows, p.block_cols) * self.columns < 2**31
            and size * ((rows + inner) * (p.N + LINE) + rows * (inner + LINE)) <= MOST_BYTES
        )

    @property
    def expected(self) -> tuple[float, int]:
        """The pairs of blocks, and the blocks of the result, if both matrices store blocks at random."""
        p = self.problem
        return spgemm_pattern.expected(p.block_rows, self.columns, p.block_cols, (p.blocks, self.blocks))

    def seconds(self, card: Card) -> float:
        """The pattern, B filled up, the product, and its blocks."""
        p, x, fill, size = self.problem, self.costs, Filled.costs, self.dtype.itemsize
        stored, written = self.blocks * p.K * self.N * size, p.block_cols * p.K * p.N * size
        around = memory(card, stored) / fill["store"] + memory(card, written) / fill["fill"]
        bits = x["bits"] * from_l2(card, 4 * p.blocks * -(-self.columns // 32))
        taken = memory(card, 2 * self.expected[1] * p.R * self.N * size) / x["take"]
        return fastest(p, card, True).seconds(p, card) + 1e-6 * (x["t0"] + bits + around + taken)

    def other_seconds(self, card: Card) -> float:
        """The list of pairs, and their products."""
        each = BlockProblem(self.problem.arch, self.stored, self.stored, self.stored, *self.sides)
        listed = 1e-6 * self.costs["pair"] * self.expected[0]
        return listed + pairs.seconds(each, (self.problem.blocks, self.blocks), self.expected, card)

    def product(self, A: Operand, B: Operand, data: Array) -> Blocks | None:
        """The product of real matrices, the second one with these blocks; None if B has a block twice."""
        pattern = Blocks(data, *B.arrays[1:])
        bits = spgemm_pattern.row_bits(B, pattern, self.columns)
        joining = KEPT.get(A, B, "joined") or spgemm_pattern.join(Blocks(*A.arrays), pattern, self.columns, bits)
        if joining is None:
            return None
        p = self.problem
        rows, inner = p.block_rows * p.R, p.block_cols * p.K
        line = -(-p.N * self.dtype.itemsize // LINE) * LINE // self.dtype.itemsize
        full_b, full = (cupy.empty((n, line), self.dtype)[:, : p.N] for n in (inner, rows))
        device = cupy.cuda.runtime.getDevice()
        filling, shape = B.calls.made(("fill", self, device), lambda: self._filling(B, line))
        filling.start((data, full_b, cupy.empty(shape, np.uint8)))  # what is stored twice is known from the bits
        key = ("dense", self, overlapping.thread.active, device)
        multiply = A.calls.made(key, lambda: fastest(p, card(), True).prepare(Kind(p, A, full_b, full), card()))
        multiply.start((full_b, full), 1, 0)
        blocks = joining.finish()
        if blocks is None:
            return None
        KEPT.add(A, B, "joined", joining)
        out = cupy.empty((blocks, p.R, self.N), self.dtype)
        if blocks:
            self._take(A, joining, full_b, full, out)
        return Blocks(out, *joining.index(blocks))

    def _filling(self, B: Operand, line: int) -> tuple[Launch, tuple[int, int, int]]:
        """The launch for B's blocks, B filled up in rows of `line` elements, and numbers of this shape."""
        p, index = self.problem, element(B.indices_dtype)
        stored = replace(
            p, types=replace(p.types, index=index), R=p.K, K=self.N, N=1, block_rows=p.block_cols,
            block_cols=self.columns, blocks=self.blocks, aligned=B.pointer % 16 == 0,
        )  # fmt: skip
        rows = replace(filled(stored), K=p.N, block_cols=1, blocks=1, line=line if line > p.N else 0)
        return Fill.of(stored, rows).prepare(Kind(stored, B, None, None), card(), rows)

    def _take(self, A: Operand, joining: Joining, full_b: Array, full: Array, out: Array) -> None:
        """Start what takes the blocks of the result."""
        p, (data, indices, indptr), line = self.problem, A.arrays, full.strides[0] // self.dtype.itemsize
        arrays = {
            "data": data, "indices": indices, "indptr": indptr, "b": full_b, "full": full, "out": out,
            "places": joining.places, "bits": joining.bits,
        }  # fmt: skip
        packed = TAKE_BLOCKS.pack(
            **{name: x.data.ptr for name, x in arrays.items()}, blocks=len(out), a_blocks=p.blocks,
            a_rows=p.block_rows, b_rows=p.block_cols, columns=self.columns, b_row=line, full_row=line, R=p.R, K=p.K,
            N=self.N, words=joining.words,
        )  # fmt: skip
        kernel = TakeBlocks(p.types)
        run(kernel, kernel.grid(out.size), (jit.argument(packed),), uses=arrays.values())


@lru_cache(maxsize=4096)
def _chosen(
    sides: tuple[int, int, int],
    counts: tuple[int, int, int],
    blocks: tuple[int, int],
    dtype: np.dtype[Any],
    index: np.dtype[Any],
    aligned: bool,
    forced: str | None,
    card: Card,
) -> SparseDense | None:
    """The product of blocks of R x K and K x N, so many along each side of both matrices, if a dense one is faster."""
    each, real = (2, reals.REALS[dtype]) if dtype.kind == "c" else (1, dtype)
    (R, K, N), (rows, inner, columns) = sides, counts
    problem = Problem(
        card.arch, names_of(real, index), R, each * K, each * N * columns, batches=1, block_rows=rows,
        block_cols=inner, blocks=blocks[0], transposed=False, b_order="C", c_order="C", overwrite=True, aligned=aligned,
    )  # fmt: skip
    found = SparseDense(problem, real, dtype, sides, each * N, columns, blocks[1])
    faster = found.served and is_preferred("SparseDense", found.seconds(card) < found.other_seconds(card))
    return found if faster else None


def multiplied(A: Operand, B: Operand, block_cols: int, dtype: np.dtype[Any]) -> Blocks | None:
    """Return ``A @ B`` as a dense product, where that is predicted to be faster and possible; otherwise None.

    It is impossible too if B has a block twice, and without memory.
    """
    dense = SparseDense.of(A, B, block_cols, dtype)
    if dense is None:
        return None
    try:
        if dtype.kind != "c":
            return dense.product(A, B, B.arrays[0])
        found = dense.product(A.remembered("reals", lambda: _reals_of(A)), B, reals.right(B.arrays[0]))
        return None if found is None else found._replace(data=found.data.view(dtype))
    except MemoryError:
        return None


def _reals_of(A: Operand) -> Operand:
    """A complex matrix as a real one, without a copy."""
    data, indices, indptr = A.arrays
    found = A.derived(reals.left(data), indices, indptr, (A.shape[0], 2 * A.shape[1]))
    found.pointer = A.pointer
    return found
