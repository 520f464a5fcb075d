"""scipy's own BSR tests on our classes over a NumPy that behaves like CuPy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..fake_device import install
from .facade import device_suite, point_at
from .point import FEW_DTYPES

HOME = install()

_suites = point_at(HOME, "TestFake", __name__, dtypes=FEW_DTYPES)
#: By default, matrices that are not canonical are those of the host alone.
globals().update({name: pytest.mark.long(x) if "NonCanonical" in name else x for name, x in _suites.items()})


@pytest.fixture(autouse=True)
def narrowed_suite() -> Iterator[None]:
    with device_suite(HOME):
        yield
