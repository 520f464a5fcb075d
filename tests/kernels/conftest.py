"""What every test of a kernel may ask for."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems of attention_sm90 have the tiles of large ones."""
    from bsrgemm._attention import attention_sm90, choose

    monkeypatch.setattr(attention_sm90, "_FEW_ROWS", 0)
    monkeypatch.setattr(attention_sm90, "_FEW_KEYS", 0)
    monkeypatch.setattr(choose, "_FEW_BLOCKS", -1)


@pytest.fixture(params=["few", "many"])
def tiles(request: pytest.FixtureRequest) -> None:
    """Small problems have the small tiles that they have by rule, or those of large ones."""
    if request.param == "many":
        request.getfixturevalue("many")
