"""Emulated tests share compiled kernels, and one that fails says which seed it ran with."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        report.sections.append(("emulator", f"BSRGEMM_EMULATOR_SEED={emulator.seed()}"))
    return report
