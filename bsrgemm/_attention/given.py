"""Numbers that a caller gives as lists, or in arrays of the host, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


def host_array(name: str, numbers: Any, wanted: str) -> np.ndarray[Any, Any]:
    """`numbers` as an array; ValueError, which says what was `wanted`, for nested lists of different lengths."""
    try:
        return np.asarray(numbers)
    except ValueError:
        raise ValueError(f"{name}: wanted {wanted}, got {numbers!r}") from None
