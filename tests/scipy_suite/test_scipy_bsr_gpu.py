"""scipy's own BSR tests on our classes with the data on the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from bsrgemm._backend import registry

from ..conftest import has_cuda
from ..fake_cupy import Card, in_place
from .facade import device_suite, point_at
from .point import Difference

pytestmark = pytest.mark.gpu

pytest.importorskip("cupy")

# Without a device the classes are made only to be counted.
HERE = contextlib.nullcontext() if has_cuda() else in_place(Card())
_LAST_DIGIT = "scipy compares bit for bit with NumPy, whose {} differs from CUDA's in the last digit"
DIFFERS = {
    "test_unary_ufunc_overrides": Difference(
        # scipy's own test ends before floor, ceil and trunc, which NumPy asks of numbers alone, of scipy's classes too.
        _LAST_DIGIT.format("sine"),
        ("assert_array_equal(X2.toarray(), X0)", "check(name)"),
    )
}
ARRAY_DIFFERS = {"test_pow": Difference(_LAST_DIGIT.format("power"), ("assert_array_equal(ret_sp.toarray(), ret_np)",))}

with HERE:
    HOME = registry.cuda()
    globals().update(point_at(HOME, "TestCuda", __name__, DIFFERS, ARRAY_DIFFERS))


@pytest.fixture(autouse=True)
def narrowed_suite() -> Iterator[None]:
    with device_suite(HOME):
        yield
