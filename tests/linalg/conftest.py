"""A fake card, for tests of solvers on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .. import fake_cupy


@pytest.fixture
def fake(fake_card: Any) -> Iterator[Any]:
    """The library's backend of GPUs on a fake card."""
    if fake_card is not None:
        yield fake_cupy.backend()
        return
    with fake_cupy.installed(fake_cupy.Card()):
        yield fake_cupy.backend()
