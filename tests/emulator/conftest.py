"""Emulated tests share compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cupy")

from . import emulator


@pytest.fixture(autouse=True, scope="session")
def compiler() -> None:
    """Every test here compiles kernels with the C++ compiler of the machine."""
    if emulator.COMPILER is None:
        pytest.skip("there is neither g++ nor clang++ on the PATH")


@pytest.fixture(scope="session")
def folder() -> Path:
    """Where compiled kernels are: those that any process has compiled before are there."""
    return emulator.builds()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that are marked `races` run twice."""
    if metafunc.definition.get_closest_marker("races"):
        metafunc.parametrize("watched", [False, True], ids=["plain", "races"], indirect=True)


@pytest.fixture(autouse=True)
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With True, a race of two threads ends the process."""
    if getattr(request, "param", False):
        if not emulator.can_watch_races():
            pytest.skip("races are watched in kernels that g++ compiles")
        monkeypatch.setenv("BSRGEMM_EMULATOR_RACES", "1")
