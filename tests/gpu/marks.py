"""Marks for tests of kernels: which cases also run under compute-sanitizer, and which are for Hopper alone."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def some_under_memcheck(every: Iterable[Any], some: Container[Any]) -> list[Any]:
    """Parameters of which a few, since they take ten times as long there, also run under compute-sanitizer."""
    return [pytest.param(x, id=str(x), marks=pytest.mark.sanitizer if x in some else ()) for x in every]


def on_hopper() -> bool:
    """Is this a card of the kernels that are for Hopper alone?"""
    import cupy

    return bool(cupy.cuda.Device().compute_capability == "90")
