"""scipy's own BSR tests on our host classes with blocks up to 3 x 3: scipy's matrices have 1 x 1 mostly."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from bsrgemm.bsr import host_bsr_array, host_bsr_matrix

from .point import FEW_DTYPES, SCIPY_CLASSES, Difference, point
from .test_scipy_bsr import DIFFERS


def _blocksize(arg1: Any) -> tuple[int, int] | None:
    """The largest block up to 3 x 3 that divides the matrix; None where `arg1` has blocks or no shape."""
    if sp.issparse(arg1):
        shape = arg1.shape if arg1.format != "bsr" else ()
    elif isinstance(arg1, tuple):
        shape = arg1 if all(isinstance(n, int | np.integer) and n >= 0 for n in arg1) else ()
    else:
        shape = np.shape(arg1)
    if len(shape) != 2:
        return None
    rows, cols = (next(side for side in (3, 2, 1) if n % side == 0) for n in shape)
    return rows, cols


class _Blocked:
    """A block size for every constructor call that leaves it open."""

    def __init__(
        self,
        arg1: Any,
        shape: Any = None,
        dtype: Any = None,
        copy: bool = False,
        blocksize: Any = None,
        **kwargs: Any,
    ) -> None:
        blocksize = _blocksize(arg1) if blocksize is None else blocksize
        super().__init__(arg1, shape, dtype, copy, blocksize, **kwargs)  # type: ignore[call-arg]


class blocked_bsr_array(_Blocked, host_bsr_array):
    """`bsr_array` that prefers blocks to single elements."""


class blocked_bsr_matrix(_Blocked, host_bsr_matrix):
    """`bsr_matrix` that prefers blocks to single elements."""


_FILL = "zeros that fill up a block are stored, so nnz, size and explicit=True count them"
#: Further differences, each one of blocks as such (scipy's own class with these blocks differs there too, but
#: for the negative zero).
BLOCKED_DIFFERS = {
    "test_minmax_axis": Difference(_FILL, ("X.min(axis=axis, explicit=True)",)),
    "test_repr": Difference("the expected text says blocksize=1x1", ("assert repr(datsp) == expected",)),
    "test_resize": Difference(
        "BSR resizes to multiples of its block size only",
        ("S.resize((2, 2))", "[[1, 0], [2, 0]", "S.resize((3, 3))", "[[1, 0, 0], [2, 0, 0], [0, 0, 0]]"),
    ),
    "test_scalar_idx_dtype": Difference(
        "expects int64 indices where the columns, not the block columns, pass 2**31", ("d.indptr.dtype",)
    ),
}
CANONICAL_DIFFERS = {
    "test_minmax": Difference(
        "a block keeps the -0.0 of dense input, so max() is -0.0 as NumPy's is; scipy stores 0.0", ("X.max(), 0)",)
    ),
}
RESHAPE = Difference(_FILL, ("x.reshape, (x.size,)", "x.reshape, (1, x.size, 1)"))
GETNNZ = Difference(f"{_FILL}; an axis raises, as it does in scipy", ("getnnz(axis=None)", "getnnz())", "getnnz"))

for _class in SCIPY_CLASSES:
    _name = f"TestBlocked{_class.__name__.removeprefix('Test')}"
    _is_array, _is_canonical = "Matrix" not in _name, "NonCanonical" not in _name
    _differs = DIFFERS | BLOCKED_DIFFERS
    if _is_canonical:
        _differs |= CANONICAL_DIFFERS | ({"test_reshape": RESHAPE} if _is_array else {"test_getnnz_axis": GETNNZ})
    _container = blocked_bsr_array if _is_array else blocked_bsr_matrix
    globals()[_name] = point(_class, _name, _container, _differs, __name__, FEW_DTYPES)
del _class
