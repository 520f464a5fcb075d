"""What every test of a kernel may ask for: its own random numbers, and a Hopper card."""

from __future__ import annotations

import zlib

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
