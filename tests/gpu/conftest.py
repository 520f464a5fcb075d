"""What every test of a kernel may ask for: its own random numbers, a Hopper card, and a checksum for the record."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .marks import on_hopper


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def hopper() -> None:
    """Skip the test on other cards: its kernel is for Hopper."""
    if not on_hopper():
        pytest.skip("this kernel is for Hopper")


@pytest.fixture
def checksum(record_property: Callable[[str, object], None]) -> Callable[[Any], None]:
    """Add an output to the checksum of the test."""
    state = {"crc": 0}

    def add(x: Any) -> None:
        state["crc"] = zlib.crc32(np.ascontiguousarray(x.get()).view(np.uint8).tobytes(), state["crc"])
        record_property("checksum", f"{state['crc']:08x}")

    return add
