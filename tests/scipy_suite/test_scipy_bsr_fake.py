"""scipy's own BSR tests on our classes over the library's backend of GPUs, on a fake card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("cupy")

from bsrgemm._backend import registry

from ..fake_cupy import Card, in_place, renumbered
from .facade import device_suite, point_at
from .point import FEW_DTYPES

#: The card of all these tests, since scipy's test classes share matrices.
CARD = Card()
renumbered(CARD)
with in_place(CARD):
    HOME = registry.cuda()
    _suites = point_at(HOME, "TestFake", __name__, dtypes=FEW_DTYPES)
#: By default, matrices that are not canonical are those of the host alone.
globals().update({name: pytest.mark.long(x) if "NonCanonical" in name else x for name, x in _suites.items()})


@pytest.fixture(autouse=True)
def narrowed_suite() -> Iterator[None]:
    with in_place(CARD), device_suite(HOME):
        yield
