"""Copies of B that make a product faster, since the tensor cores cannot read B as it is."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .heuristics import Problem, by_rows, sm80_serves, sm90_serves, tensor_cores_serve

#: A copy of B pays if the number of elements of A times the number of columns of B is at least this: with aligned rows,
#: or by columns.
_WORTH_A_COPY, _WORTH_COLUMNS = 1 << 22, 1 << 32
#: A copy by columns pays if a column of A has at least so many stored elements, in row tiles of 16 rows and in larger
#: ones. Each element of the copy is used as often.
_USES_OF_16, _USES = 192, 512
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


@lru_cache(maxsize=1024)
def tf32_panel(problem: Problem) -> int:
    """Return how many columns of B are copied at a time, column by column, or 0 if the product is faster with B itself.

    Hopper's tensor cores read tf32 along K only; with a row-major B, gemm_sm80 computes the product. TFLOP/s on an
    H200, n = 8192, density 0.22, by gemm_sm80 / by gemm_sm90 with the time of the copy:

    ========  =========  =========  =========
    16        32         64         128
    ========  =========  =========  =========
    40 / 106  103 / 156  126 / 224  162 / 255
    ========  =========  =========  =========

    At density 0.05 (410 elements in a column of A), they are 36 / 55, 84 / 81, 101 / 111 and 124 / 119.

    >>> import numpy as np
    >>> from bsrgemm._kernels.element_types import types
    >>> names = types(*[np.dtype("float32")] * 4, np.dtype("int32"))
    >>> sizes = {"R": 32, "K": 32, "N": 8192, "batches": 1, "block_rows": 256, "block_cols": 256, "blocks": 14400}
    >>> layout = {"transposed": False, "b_order": "C", "c_order": "C", "overwrite": True, "aligned": True, "tf32": True}
    >>> usual = Problem("sm_90a", names, **sizes, **layout)
    >>> [tf32_panel(replace(usual, **x)) for x in ({}, {"b_order": "F"}, {"blocks": 3000}, {"batches": 4})]
    [8192, 0, 0, 2048]
    """
    turned = replace(problem, b_order="F")
    work = problem.blocks * problem.R * problem.K * problem.N * problem.batches
    uses = problem.blocks * problem.R / max(1, problem.block_cols)
    if not problem.tf32 or problem.b_order == "F" or work < _WORTH_COLUMNS:
        return 0
    if uses < (_USES if problem.R % 32 == 0 else _USES_OF_16):
        return 0
    if not tensor_cores_serve(turned) or by_rows(turned) or not sm90_serves(turned):
        return 0
    column = problem.block_cols * problem.K * problem.batches * 4
    if problem.N * column <= _PANEL_BYTES:
        return problem.N
    most = _PANEL_BYTES // column // _PANEL_COLUMNS * _PANEL_COLUMNS
    # A last panel of few columns would be computed by a kernel of the CUDA cores.
    widths = (n for n in range(most, 0, -_PANEL_COLUMNS) if not 0 < problem.N % n < _PANEL_COLUMNS // 4)
    return next(widths, 0)
