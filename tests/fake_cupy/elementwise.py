"""What the package's kernels of single elements compute, by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _safe_ratio(a: Any, b: Any) -> Any:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), a.dtype), where=b != 0)


def _add_multiple(f: Any, x: Any, y: Any) -> Any:
    y[...] = y + f * x
    return y


def _subtract_multiple(f: Any, x: Any, y: Any) -> Any:
    y[...] = y - f * x
    return y


def _multiply_and_add(f: Any, x: Any, y: Any) -> Any:
    y[...] = f * y + x
    return y


#: By the names of the kernels; the last operand of those in place is their result.
KERNELS: dict[str, Callable[..., Any]] = {
    "bsrgemm_safe_ratio": _safe_ratio,
    "bsrgemm_add_multiple": _add_multiple,
    "bsrgemm_subtract_multiple": _subtract_multiple,
    "bsrgemm_multiply_and_add": _multiply_and_add,
}
