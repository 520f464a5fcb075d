"""The memory of an array, and the sizes of elements in maps of tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import tensor_map

X = np.arange(120.0).reshape(4, 5, 6)


@pytest.mark.parametrize(
    "x",
    [X, X[1:], X[::-1], X[:, ::-2], X[::2, ::-1, 1:4], X.T, X[:, :, ::-1], X[1:1, ::-1], X[:, :0], X[..., 0]],
    ids=range(10),
)  # fmt: skip
def test_the_extent_of_an_array_is_that_of_its_bytes(x: Any) -> None:
    first, last = HOST.extent(x)
    if x.size:
        assert (first, last) == np.lib.array_utils.byte_bounds(x)
    else:
        assert first == last


def test_the_elements_of_a_tensor_map_have_the_bytes_of_their_dtype() -> None:
    for name, (_, size) in tensor_map.DTYPES.items():
        assert size == np.dtype(getattr(ml_dtypes, name, name)).itemsize
    codes = [code for code, _ in tensor_map.DTYPES.values()]
    assert codes == [0, 3, 6, 7, 8, 9]  # CUtensorMapDataType
