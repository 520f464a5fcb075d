"""The kernels that most programs meet: `A @ x`, `A @ B`, solvers, attention and decode in common dtypes and sizes.

The rules that choose kernels for real calls make the list, from the problems below, with int32 indices, B and C in
C order, and no scaling. Everything else is compiled when it is first used, or by ``compile --all``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from .._attention.choose import choose
from .._attention.decode_kernel import Decode, KvAppend
from .._attention.forward import PLAIN
from .._attention.forward import Problem as AttentionProblem
from .._backend.array_kernels import (
    MOVED,
    BlockElements,
    CheckPattern,
    Diagonal,
    Expand,
    MergePatterns,
    combine_blocks,
    reduce_lines,
    segment,
    vector_steps_of,
)  # fmt: skip
from .._kernels import element_types
from .._kernels.card import Card
from .._kernels.rearrange import Rearrange
from .._products.call import Problem
from .._products.lists import RowMatching, WorkListKernel
from .._products.prepared import compiled_for
from .._products.spgemm_pattern import SpgemmPattern
from ..dtypes import HALF_DTYPES, accumulator_dtype, result_dtype

#: The dtypes of the list unless others are asked for.
COMMON_DTYPES = ("float16", "bfloat16", "float32", "float64")
_INDEX = np.dtype(np.int32)
#: Sides of square blocks, and numbers of columns of B.
_BLOCKS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)
_COLUMNS = (1, 4, 16, 64, 128, 1024, 4096)
#: Stored blocks of a block row: a grid of finite elements, and a pruned layer.
_ROW = 27
#: Rows of a large and of a small matrix.
_ROWS = (65536, 8192)
#: Sizes of heads, and of the query heads of a group, that are common in language models.
_HEADS, _GROUPS = (64, 128), (1, 32)
#: Queries (all heads of all sequences), and keys: a prompt, and a few tokens.
_QUERIES = ((10**6, 8192), (2048, 1024))


def common_kernels(arch: str, dtypes: Collection[np.dtype[Any]]) -> Iterator[Any]:
    """Yield the kernels that the problems of this module lead to on `arch`; some come twice."""
    index = element_types.element(_INDEX)
    yield from (Expand(index), WorkListKernel(index), RowMatching("row_bits", index))
    yield from map(RowMatching, ("overlaps", "match_rows"))
    yield from Rearrange.every(())
    yield from (CheckPattern(index), MergePatterns(False, index), MergePatterns(True, index))
    yield from (SpgemmPattern(entry, index) for entry in SpgemmPattern.entries)
    for dtype in dtypes:
        yield segment(dtype, "add", 1, 1)
        yield from (combine_blocks(name, dtype, index) for name in ("add", "sub", "mul"))
        yield Diagonal.reading("kElements", dtype, index)
        yield BlockElements("kCsr", MOVED[dtype.itemsize], index, index)
        yield from (reduce_lines("add", dtype, accumulator_dtype(dtype), length, index) for length in (16, 256))
        yield from vector_steps_of(dtype)
        yield from _products(arch, dtype)
        yield from _attention(arch, dtype)


def _products(arch: str, dtype: np.dtype[Any]) -> Iterator[Any]:
    out = result_dtype(dtype, dtype)
    names = element_types.types(dtype, dtype, out, accumulator_dtype(out), _INDEX)
    for side, all_rows in itertools.product(_BLOCKS, _ROWS):
        rows = max(64, all_rows // side)
        for columns in _COLUMNS:
            counts = (rows, rows, rows * min(_ROW, rows // 4))
            problem = Problem(arch, names, side, side, columns, 1, *counts, False, "C", "C", True, True)
            yield compiled_for(problem, Card(arch, 132))


def _attention(arch: str, dtype: np.dtype[Any]) -> Iterator[Any]:
    if dtype not in (*HALF_DTYPES, np.dtype(np.float32), np.dtype(np.float64)):
        return
    for width in _HEADS:
        for sizes in _QUERIES:
            acc = accumulator_dtype(dtype)
            yield choose(AttentionProblem(arch, dtype, dtype, acc, width, width, PLAIN, True, True, *sizes))
        if dtype in HALF_DTYPES:
            decodes = (Decode.of(dtype, width, width, rows) for rows in _GROUPS)
            yield from (kernel for kernel in decodes if kernel.runs_on(arch))
    if dtype in HALF_DTYPES:
        yield KvAppend(element_types.element(dtype))
