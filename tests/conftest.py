"""What every test may ask for: a backend to run in, hypothesis profiles, and no GPU test without a GPU."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from bsrgemm._backend.registry import Backend, by_name

LONG = os.environ.get("BSRGEMM_LONG") == "1"

# The quick profile draws the same examples every time, so that a change is judged by what it changed.
settings.register_profile("quick", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile("long" if LONG else "quick")


@cache
def has_cuda() -> bool:
    """Is there CuPy, and a device for it?"""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return cupy.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and not LONG:
        pytest.skip("the long profile: BSRGEMM_LONG=1")
    if item.get_closest_marker("gpu") and not has_cuda():
        pytest.skip("needs a CUDA device")


#: Every backend, for ``pytest.mark.parametrize("backend", BACKENDS, indirect=True)`` or the fixture alone.
BACKENDS = [
    pytest.param("cpu", id="numpy"),
    pytest.param("fake", id="fake"),
    pytest.param("cuda", id="cupy", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """The host, the fake device, and the GPU where there is one."""
    if request.param == "fake":
        from .fake_device import install

        return install()
    return by_name(request.param)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the emulator compiles kernels: one that was met before is there."""
    return tmp_path_factory.mktemp("emulated")
