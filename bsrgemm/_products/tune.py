"""`tune` measures which kernel is fastest for one matrix and one number of columns, and stores it on disk per card."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .._array.base import BsrBase, no_bsr
from .._kernels.card import card
from .._kernels.timing import time_gpu
from ..dtypes import accumulator_dtype, check_dtype, result_dtype
from .call import ProductCall

if TYPE_CHECKING:
    from .dense import Dense

_REPEATS = 10


def tune(A: Any, N: int, *, dtype: Any = None, precision: str | None = None) -> list[tuple[str, float]]:
    """Measure every kernel that can multiply `A` by N columns, and store the fastest one for this card.

    Later products use the stored kernel, in this process and in others, if they have the same sizes, dtypes and number
    of blocks, row-major operands whose rows start at multiples of 16 bytes, and `beta` 0. For all other products, the
    kernel with the shortest predicted time is chosen.

    Parameters
    ----------
    A : bsr_array or bsr_matrix
        The left operand, a matrix on the GPU. If it is the transpose of another matrix (``A.T``), the product with
        the transpose is measured.
    N : int
        Number of columns of the right-hand side, which is taken to be row-major.
    dtype : dtype, optional
        Dtype of the right-hand side; by default the dtype of `A`.
    precision : {"float32", "tf32"}, optional
        Precision of products in float32, as in `matmul`.

    Returns
    -------
    list of (str, float)
        The kernels and their times in seconds, fastest first.

    Raises
    ------
    TypeError
        If `A` is not a BSR matrix, if it is on the CPU, where there is only one implementation, or if `dtype` is not
        supported.
    ValueError
        If `N` is not a positive integer, or if `precision` is not one of the values above.
    OSError
        If the result cannot be written to the cache folder.

    Notes
    -----
    The right-hand side is filled with random numbers. Each kernel is compiled if necessary, run a few times to warm up
    and timed 10 times with the L2 cache flushed before each run. The call waits for the GPU, and it needs memory for
    the right-hand side, the result and 512 MiB of data that flush the cache. Where an operand would be copied, that way
    is measured too; if it is the fastest, nothing is stored, and it is chosen again.

    Examples
    --------
    A matrix on the CPU is refused:

    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    >>> bg.tune(A, 8)
    Traceback (most recent call last):
    ...
    TypeError: A: wanted a BSR matrix on the GPU, got one on 'cpu': there is one kernel there and nothing to choose
    """
    if not isinstance(A, BsrBase):
        raise TypeError(f"A: wanted a bsr_array or bsr_matrix, got {no_bsr(A, 'A')}")
    if A._backend.name != "cuda":
        raise TypeError(
            f"A: wanted a BSR matrix on the GPU, got one on {A._backend.name!r}: there is one kernel "
            "there and nothing to choose"
        )
    if isinstance(N, bool) or not isinstance(N, int | np.integer) or N < 1:
        raise ValueError(f"N: wanted a positive integer, got {N!r}")
    if not isinstance(precision, str | None) or precision not in (None, "float32", "tf32"):
        raise ValueError(f"precision: wanted 'float32' or 'tf32', got {precision!r}")
    dtype = A.dtype if dtype is None else check_dtype(dtype, A._backend.dtypes)
    import cupy

    from .choice import variants
    from .cuda import prepared_for
    from .dense import Holder
    from .operand import operand_of, problem_of
    from .prepared import fastest as fastest_of
    from .tuned import keep

    rng = cupy.random.default_rng(0)
    K = A.shape[1]
    B = rng.standard_normal((K, int(N)), dtype=np.float32).astype(dtype)
    result = result_dtype(A.dtype, np.dtype(dtype))
    out = cupy.empty((A.shape[0], int(N)), result)
    matrix, transposed = A._source()
    operand = operand_of(matrix)
    call = ProductCall(matrix, B, out, accumulator_dtype(result), transposed=transposed, tf32=precision == "tf32")
    problem = problem_of(operand, call)
    tried = list(dict.fromkeys([fastest_of(problem, card(), True), *variants(problem)]))
    times: list[tuple[Dense, float]] = []
    for kernel in tried:
        launch = prepared_for(replace(call, kernel=kernel))
        times.append((kernel, time_gpu(partial(launch.start, (B, out), 1, 0), _REPEATS)))
    times.sort(key=lambda pair: pair[1])
    fastest = times[0][0]
    keep(problem, None if isinstance(fastest, Holder) else fastest)
    operand.calls.clear()
    return [(_named(kernel), seconds) for kernel, seconds in times]


def _named(kernel: Dense) -> str:
    """What a kernel is called in the result of `tune`: everything that is compiled for it."""
    from .dense import Holder
    from .prepared import innermost

    if isinstance(kernel, Holder):
        return f"{innermost(kernel).spec()} with copies"
    return str(kernel.spec())
