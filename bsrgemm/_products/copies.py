"""Copies of B that make a product faster, since the tensor cores cannot read B as it is."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .._kernels.element_types import BYTES
from .configs import ColumnsTf32, Gemm
from .heuristics import Problem, by_rows, gemm, sm80_serves, sm90_serves, tensor_cores_serve

#: A copy of B with aligned rows pays if the number of elements of A times the number of columns of B is at least this.
_WORTH_A_COPY = 1 << 22
#: A copy by columns pays, by its number of parts, if that product is at least the first number, and if a column of A
#: has at least so many stored elements, in blocks of 16, 32 and 64 n rows. Each element of the copy is used as often.
_WORTH_COLUMNS = {1: (1 << 32, 192, 512, 512), 2: (1 << 29, 128, 448, 256)}
#: It pays for no fewer columns: tiles of gemm_sm90 would be empty in part.
_LEAST_COLUMNS = 96
#: A copy by columns has at most so many bytes; the product is computed in panels if B has more.
_PANEL_BYTES = 256 << 20
#: The number of columns of a panel is a multiple of this.
_PANEL_COLUMNS = 256


@lru_cache(maxsize=1024)
def wants_aligned_rows(problem: Problem) -> bool:
    """Return whether a copy of B, with rows that start at multiples of 16 bytes, makes this product faster.

    That is so if the tensor cores can compute the product only with such a B, and if the product is large enough.

    >>> import numpy as np
    >>> from bsrgemm._kernels.element_types import types
    >>> names = types(*[np.dtype("float16")] * 3, np.dtype("float32"), np.dtype("int32"))
    >>> sizes = {"R": 64, "K": 64, "batches": 1, "block_rows": 128, "block_cols": 128, "blocks": 3584}
    >>> layout = {"transposed": False, "b_order": "", "c_order": "", "overwrite": True, "aligned": True}
    >>> odd = Problem("sm_90a", names, N=101, **sizes, **layout)
    >>> [wants_aligned_rows(replace(odd, **x)) for x in ({}, {"b_order": "C"}, {"blocks": 9})]
    [True, False, False]
    """
    work = problem.blocks * problem.R * problem.K * problem.N * problem.batches
    if problem.b_order or problem.N == 1 or work < _WORTH_A_COPY:
        return False
    aligned = replace(problem, b_order="C")
    return tensor_cores_serve(aligned) and (sm90_serves(aligned) or sm80_serves(aligned))


def column_kernels(problem: Problem) -> tuple[ColumnsTf32, Gemm]:
    """Return the kernels of a product with copies by columns: the one that copies, and the one that multiplies."""
    parts = column_parts(problem.tf32)
    return ColumnsTf32(parts), gemm(replace(problem, b_order="F", parts=parts))


def kernels_of(problem: Problem) -> tuple[ColumnsTf32 | Gemm, ...]:
    """Return the kernels of a product: the one that multiplies, and before it the one that copies B, if that pays."""
    return column_kernels(problem) if column_panel(problem) else (gemm(problem),)


def column_parts(tf32: bool) -> int:
    """Return the number of parts of a copy by columns: tf32 takes one, float32 two."""
    return 1 if tf32 else 2


@lru_cache(maxsize=1024)
def column_panel(problem: Problem) -> int:
    """Return how many columns of B are copied at a time, column by column, or 0 if the product is faster with B itself.

    Hopper's tensor cores read tf32 along K only, and float32 in two parts of tf32; with any other B, gemm_sm80 computes
    the product. TFLOP/s on an H200, n = 8192, density 0.22, by gemm_sm80 / by gemm_sm90 with the time of the copy:

    ========  =========  =========  =========
    16        32         64         128
    ========  =========  =========  =========
    40 / 106  103 / 156  126 / 224  162 / 255
    ========  =========  =========  =========

    At density 0.05 (410 elements in a column of A), they are 36 / 55, 84 / 81, 101 / 111 and 124 / 119. In float32:

    =======  =======  =======  =======  ========
    density  16       32       64       128
    =======  =======  =======  =======  ========
    0.22     19 / 40  45 / 60  50 / 86  51 / 101
    0.05     17 / 26  41 / 41  46 / 55  46 / 61
    0.035    16 / 23  40 / 36  45 / 46  44 / 49
    =======  =======  =======  =======  ========

    >>> import numpy as np
    >>> from bsrgemm._kernels.element_types import types
    >>> names = types(*[np.dtype("float32")] * 4, np.dtype("int32"))
    >>> sizes = {"R": 32, "K": 32, "N": 8192, "batches": 1, "block_rows": 256, "block_cols": 256, "blocks": 14400}
    >>> layout = {"transposed": False, "b_order": "C", "c_order": "C", "overwrite": True, "aligned": True, "tf32": True}
    >>> usual = Problem("sm_90a", names, **sizes, **layout)
    >>> [column_panel(replace(usual, **x)) for x in ({}, {"b_order": "F"}, {"blocks": 3000}, {"tf32": False})]
    [8192, 0, 0, 4096]
    """
    parts = column_parts(problem.tf32)
    turned = replace(problem, b_order="F", parts=parts)
    work = problem.blocks * problem.R * problem.K * problem.N * problem.batches
    uses = problem.blocks * problem.R / max(1, problem.block_cols)
    least, *least_uses = _WORTH_COLUMNS[parts]
    if not problem.types.of_one("f32") or (problem.tf32 and problem.b_order == "F") or work < least:
        return 0
    if problem.N < _LEAST_COLUMNS:
        return 0
    if uses < least_uses[(problem.R % 32 == 0) + (problem.R % 64 == 0)]:
        return 0
    if not tensor_cores_serve(turned) or by_rows(turned) or not sm90_serves(turned):
        return 0
    column = problem.block_cols * problem.K * problem.batches * parts * BYTES["f32"]
    if problem.N * column <= _PANEL_BYTES:
        return problem.N
    most = _PANEL_BYTES // column // _PANEL_COLUMNS * _PANEL_COLUMNS
    # A last panel of few columns would be computed by a kernel of the CUDA cores.
    widths = (n for n in range(most, 0, -_PANEL_COLUMNS) if not 0 < problem.N % n < _PANEL_COLUMNS // 4)
    return next(widths, 0)
