"""Sampled products as dense ones, of which the blocks of the pattern are taken: for small, odd and many blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels.card import Card, card
from .._kernels.element_types import BYTES, types
from .._kernels.launch import Chain
from .._kernels.rearrange import LINE, Lie, Rearrange
from ..dtypes import accumulator_dtype
from .block_products import BlockProblem, is_preferred, sampled_simt_seconds
from .call import MOST_BYTES, Problem, order_of
from .copied import Copied
from .costs import memory
from .dense import Dense
from .filled import filled
from .operand import Kind, Operand
from .prepared import options
from .sampled import SampledLaunch, sampled_seconds

#: What 70 products took on an H200, over what the terms of their kernels and copies add up to.
_FACTOR = 1.3


@dataclass(frozen=True)
class SampledDense:
    """``X @ Y`` in full, then its blocks: X is copied into one block row, as a filled matrix is."""

    problem: Problem
    block: tuple[int, int]
    blocks: int
    #: dtypes of the operands and of the result
    dtypes: tuple[Any, Any, Any]
    #: orders of X and Y, see `order_of`
    orders: tuple[str, str]

    @classmethod
    def of(cls, X: Array, Y: Array, operand: Operand, block: tuple[int, int], dtype: Any, tf32: bool) -> SampledDense:
        """The product for some operands and the pattern of a matrix."""
        acc = accumulator_dtype(dtype)
        names = types(X.dtype, Y.dtype, np.dtype(dtype), acc, np.dtype(np.int32))
        (M, K), N = X.shape, Y.shape[1]
        lie = _product(M, N, np.dtype(dtype))
        problem = Problem(
            card().arch, names, M, K, N, batches=1, block_rows=1, block_cols=1, blocks=1, transposed=False,
            b_order=order_of(Y), c_order=order_of(lie), overwrite=True, aligned=True, tf32=tf32,
        )  # fmt: skip
        orders = order_of(X), order_of(Y)
        return cls(problem, block, operand.blocks, (X.dtype, Y.dtype, np.dtype(dtype)), orders)

    @property
    def served(self) -> bool:
        """Whether places are counted by 31 bits, and the memory is bounded."""
        p, (a, c) = self.problem, self.sizes
        written = p.R * (p.N + LINE // c)
        return p.types.a == p.types.b and written < 2**31 and p.R * (p.K + 16) * a + written * c <= MOST_BYTES

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of an element of X and of the result."""
        return BYTES[self.problem.types.a], BYTES[self.problem.types.c]

    def seconds(self, card: Card) -> float:
        """The copy of X, the dense product, and the copy of its blocks."""
        p, (a, c) = self.problem, self.sizes
        moved = 2 * p.R * p.K * a + 2 * self.blocks * self.block[0] * self.block[1] * c
        inner, kernel = _multiplying(p, card)
        copies = 2 * Copied.costs["launch"] + memory(card, moved) / Copied.costs["copy"]
        return _FACTOR * (kernel.seconds(inner, card) + 1e-6 * copies)

    def other_seconds(self, card: Card) -> float:
        """The blocks alone, on the tensor cores if these can compute them, otherwise on the CUDA cores."""
        p, (R, N) = self.problem, self.block
        each = BlockProblem(p.arch, *self.dtypes, R, p.K, N, self.orders[1], p.tf32, self.orders[0])
        counts = (self.blocks, self.blocks, p.R // R, p.N // N)
        return min(sampled_seconds(each, counts, card), sampled_simt_seconds(each, self.blocks, card))

    def is_chosen(self, card: Card) -> bool:
        """Whether it is possible, and predicted to be faster."""
        return self.served and is_preferred("SampledDense", self.seconds(card) < self.other_seconds(card))

    def prepare(self, X: Array, Y: Array, operand: Operand, card: Card) -> SampledLaunch:
        """What starts the product with operands like these."""
        p, (R, C), (a, c) = self.problem, self.block, self.sizes
        inner, kernel = _multiplying(p, card)
        row, column = X.strides
        wide, line = inner.K, inner.lines
        parts = Lie(X.dtype, (inner.blocks, p.R, wide), (wide * column, row, column), X.data.ptr)
        room = Lie.in_order(X.dtype, (inner.blocks, p.R, line))
        copy = Rearrange.copying(parts, room)
        data = Lie(X.dtype, (inner.blocks, p.R, wide), (p.R * line * a, line * a, a))
        full = operand.derived(
            data, cupy.arange(inner.blocks, dtype=np.int32),
            cupy.arange(0, inner.blocks + 1, inner.blocks, dtype=np.int32), (p.R, p.K),
        )  # fmt: skip
        dtype = self.dtypes[2]
        product = _product(p.R, p.N, dtype)
        line = product.strides[0] // c
        multiply = kernel.prepare(Kind(inner, full, Y, product, True), card)
        unit = math.gcd(C, R * line)  # of the elements before a block
        steps = R * line // unit, C // unit
        places = operand.remembered(("places", *steps, p.N // C), lambda: _places(operand, steps, p.N // C))
        blocks = Lie(dtype, (p.R * line // unit, R, C), (unit * c, line * c, c))
        take = Rearrange.copying(blocks, Lie.in_order(dtype, (self.blocks, R, C)), places=places)

        def start(arrays: Any) -> None:
            left, right, out, copied = arrays
            dense = cupy.empty((p.R, line), dtype)[:, : p.N]
            copy.start((left, copied))
            multiply.start((right, dense, copied), 1, 0)
            take.start((dense, out))

        chain = Chain([start], [(room.shape, room.dtype)])
        return SampledLaunch(chain, (self.blocks, R, C), dtype, (X, Y), True)


@lru_cache(maxsize=4096)
def _multiplying(problem: Problem, card: Card) -> tuple[Problem, Dense]:
    """The dense product with a copy of X, in lines of whole 16 bytes or not, and its fastest kernel."""
    whole = filled(problem)
    every = ((inner, kernel) for inner in dict.fromkeys((whole, replace(whole, line=0))) for kernel in options(inner))
    return min(every, key=lambda one: one[1].seconds(one[0], card))


def _product(rows: int, columns: int, dtype: np.dtype[Any]) -> Lie:
    """How the dense product lies: in lines of whole 16 bytes."""
    line = -(-columns * dtype.itemsize // LINE) * LINE
    return Lie(dtype, (rows, columns), (line, dtype.itemsize))


def _places(operand: Operand, steps: tuple[int, int], columns: int) -> Array:
    """Where each block begins, by the steps of a block row and of a block; -1 for a column outside of the matrix."""
    _, indices, indptr = operand.arrays
    rows = operand.backend.expand(indptr, len(indices)).astype(np.int64, copy=False)
    inside = (indices >= 0) & (indices < columns)
    return cupy.where(inside, rows * steps[0] + indices * steps[1], -1).astype(np.int32)
