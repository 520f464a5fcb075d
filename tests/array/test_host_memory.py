"""The memory of arrays, who is asked whether it is shared, and the sizes of elements and indices."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import tensor_map

from .. import fake_cupy

pytestmark = pytest.mark.fake

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


def test_blocks_that_are_added_are_asked_for_shared_memory_on_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy cannot answer for arrays of a device."""
    fake = fake_cupy.backend()
    A = bg.eye(4, blocksize=(2, 2)).to_device(fake.name)
    monkeypatch.setattr(np, "may_share_memory", lambda *_: pytest.fail("it was asked"))
    A.assemble(fake.from_host(np.ones((1, 2, 2))), [0], [0])
    np.testing.assert_array_equal(fake.to_host(A.data)[0], np.ones((2, 2)) + np.eye(2))


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_a_line_that_is_repeated_keeps_the_width_of_its_indices(shape: tuple[int, int]) -> None:
    A = bg.bsr_array(np.arange(1.0, 5).reshape(shape), blocksize=(1, 1))
    product = A.multiply(np.ones((4, 4)))
    assert product.format == "coo" and product.row.dtype == product.col.dtype == np.int32
