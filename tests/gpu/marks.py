"""Marks for tests of kernels: which kernels a test proves, and which of its cases also run under compute-sanitizer."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def kernel(*names: str) -> Any:
    return pytest.mark.kernel(*names)


def some_under_memcheck(every: Iterable[Any], some: Container[Any]) -> list[Any]:
    """Parameters of which a few, since they take ten times as long there, also run under compute-sanitizer."""
    return [pytest.param(x, id=str(x), marks=pytest.mark.sanitizer if x in some else ()) for x in every]


def on_hopper() -> bool:
    """Is this a card of the kernels that are for Hopper alone?"""
    import cupy

    return bool(cupy.cuda.Device().compute_capability == "90")
