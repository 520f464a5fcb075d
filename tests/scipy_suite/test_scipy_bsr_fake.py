"""scipy's own BSR tests on our classes over a NumPy that behaves like CuPy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..fake_device import install
from .facade import device_suite, point_at

HOME = install()

globals().update(point_at(HOME, "TestFake", __name__))


@pytest.fixture(autouse=True)
def narrowed_suite() -> Iterator[None]:
    with device_suite(HOME):
        yield
