"""Gradients on Hopper's tensor cores on the CPU: what is written once, and by whom; see test_emulated_backward.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bsrgemm as bg

from . import emulator
from .test_emulated_backward import Emulated, operands

CUDA = Path(__file__).resolve().parents[2] / "cuda"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Emulated]:
    with emulator.emulated(folder, emulator.guarded, arch="sm_90a"):
        yield Emulated(monkeypatch)


@pytest.mark.parametrize(
    ("source", "line", "dim"),
    [
        ("attention_backward_sm90.cu", "write_key_again(problem.rows, y, key + __ffs(redo) - 1);", 64),
        ("attention_backward_keys_sm90.cu", "write_key_again(problem.rows, y, key + __ffs(redo) - 1);", 192),
        ("attention_backward_queries_sm90.cu", "write_query(b(), x, query, statistic_of(query));", 192),
    ],
)
def test_ordinary_rows_are_not_computed_twice(source, line, dim, emulated, folder, rng) -> None:
    """A wrong sum that is not finite would be mended by the care that is taken of infinity and NaN."""
    assert (CUDA / source).read_text().count(line) == 1
    with emulator.forbidden(folder, line):
        emulated.check(*operands(rng, 200, 150, dim, heads=(2, 1)), causal=True)
        emulated.check(*operands(rng, 70, 90, dim, heads=(1, 1)), mask=bg.BlockMask.random(70, 90, per_row=1, block=64))
