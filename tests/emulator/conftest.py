"""Emulated tests share compiled kernels, and one that fails says which seed it ran with."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy")

from ..conftest import runs_everything
from . import emulator, races


@pytest.fixture(autouse=True, scope="session")
def compiler() -> None:
    """Every test here compiles kernels with the C++ compiler of the machine."""
    if emulator.COMPILER is None:
        pytest.skip("there is neither g++ nor clang++ on the PATH")


@pytest.fixture(scope="session")
def folder() -> Path:
    """Where compiled kernels are: those that any process has compiled before are there."""
    return emulator.builds()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "races: run it again with kernels that end the process at a race of two threads")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that are marked `races` run twice."""
    if metafunc.definition.get_closest_marker("races"):
        metafunc.parametrize("watched", [False, True], ids=["plain", "races"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A run of everything takes one half of a test that runs twice, always the same."""
    if runs_everything(config):
        for item in items:
            if item.get_closest_marker("races"):
                watches = item.callspec.params["watched"]  # type: ignore[attr-defined]
                if races.left_out(item.nodeid.partition("[")[0], watches):
                    item.add_marker("long")


@pytest.fixture(autouse=True)
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With True, a race of two threads ends the process."""
    if getattr(request, "param", False):
        if not emulator.can_watch_races():
            pytest.skip("races are watched in kernels that g++ compiles")
        monkeypatch.setenv("BSRGEMM_EMULATOR_RACES", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        report.sections.append(("emulator", f"BSRGEMM_EMULATOR_SEED={emulator.seed()}"))
    return report
