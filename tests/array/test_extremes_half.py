"""Extremes along an axis of dtypes that COO does not support: a dense array, as `sum` returns it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.base import Backend
from bsrgemm.dtypes import BFLOAT16


@pytest.mark.parametrize("name", ["max", "min", "nanmax", "nanmin"])
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.int32], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("kind", [bg.bsr_array, bg.bsr_matrix])
def test_extremes_are_dense_where_coo_does_not_hold_the_dtype(
    backend: Backend, kind: Any, dtype: Any, name: str
) -> None:
    dense = np.array([[-1, -2, 0, 0], [3, -4, 0, 0], [0, 0, 5, 6], [-7, -8, -9, -10]])
    A = kind(dense.astype(dtype), blocksize=(2, 2)).to_device(backend.name)
    for axis in (0, 1, -1):
        result, like = getattr(A, name)(axis=axis), A.sum(axis=axis, dtype=dtype)
        want = getattr(np, name)(dense, axis=axis)
        if np.dtype(dtype) in backend.foreign_dtypes:
            assert result.format == "coo"
            continue
        assert type(result) is type(like) and result.shape == like.shape and result.dtype == dtype
        np.testing.assert_array_equal(backend.to_host(result).astype(int).reshape(-1), want)
