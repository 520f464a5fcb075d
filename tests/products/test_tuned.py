"""Choices that were measured: kept per card, read back by other processes, never trusted blindly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels import element_types, forced_kernel
from bsrgemm._products import configs, heuristics, measured

FLOAT16 = np.dtype(np.float16)
PROBLEM = heuristics.Problem(
    "sm_90a",
    element_types.types(FLOAT16, FLOAT16, FLOAT16, np.dtype(np.float32), np.dtype(np.int32)),
    *(64, 64, 512, 1, 100, 100, 2000, False, "C", "C", True, True),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measured, "_card", lambda: "some-card")
    measured._loaded.clear()
    yield tmp_path / "bsrgemm"
    measured._loaded.clear()


def test_nothing_is_chosen_before_anything_was_measured() -> None:
    assert measured.choice(PROBLEM) is None


def test_a_choice_is_kept_for_this_problem_and_this_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(heuristics.candidates(PROBLEM))
    assert every[0] == heuristics.gemm(PROBLEM)
    assert {type(c) for c in every} == {configs.GemmSm90, configs.GemmSm80, configs.GemmSimt}
    for config in every:
        assert measured.keep(PROBLEM, config) == folder / "tuned-some-card.json"
        measured._loaded.clear()  # as another process would find it
        assert measured.choice(PROBLEM) == config
    assert measured.choice(replace(PROBLEM, N=513)) is None
    assert measured.choice(replace(PROBLEM, blocks=2001)) is None
    monkeypatch.setattr(measured, "_card", lambda: "another-card")
    assert measured.choice(PROBLEM) is None


def test_two_problems_share_the_file(folder: Path) -> None:
    other = replace(PROBLEM, N=64)
    measured.keep(PROBLEM, heuristics.gemm(PROBLEM))
    measured.keep(other, heuristics.gemm(other))
    measured._loaded.clear()
    assert measured.choice(PROBLEM) == heuristics.gemm(PROBLEM)
    assert measured.choice(other) == heuristics.gemm(other)
    assert sorted(p.name for p in folder.iterdir()) == ["tuned-some-card.json"]


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"x": 1}', "entry"])
def test_a_damaged_file_is_as_good_as_none(folder: Path, damage: str) -> None:
    path = measured.keep(PROBLEM, heuristics.gemm(PROBLEM))
    if damage == "entry":
        entries = json.loads(path.read_text())
        entries[measured.signature(PROBLEM)]["tile_n"] = 77
        damage = json.dumps(entries)
    path.write_text(damage)
    measured._loaded.clear()
    assert measured.choice(PROBLEM) is None
    measured.keep(PROBLEM, heuristics.gemm(PROBLEM))
    assert measured.choice(PROBLEM) == heuristics.gemm(PROBLEM)


def test_only_asks_for_one_kernel_and_says_so_where_it_cannot() -> None:
    with forced_kernel.force_kernel("GemmSm80"):
        assert isinstance(measured.choice(PROBLEM), configs.GemmSm80)
        with pytest.raises(ValueError, match="GemmSm80 cannot multiply this"):
            measured.choice(replace(PROBLEM, R=7))
    assert measured.choice(PROBLEM) is None


def test_tune_wants_a_matrix_on_the_gpu() -> None:
    with pytest.raises(TypeError, match="A: wanted a bsr_array or bsr_matrix, got ndarray"):
        bg.tune(np.ones((2, 2)), 4)
    with pytest.raises(TypeError, match="A: wanted a BSR matrix on the GPU, got one on 'cpu'"):
        bg.tune(bg.bsr_array(np.eye(4)), 4)


@pytest.mark.gpu
def test_tune_names_what_is_wrong() -> None:
    A = bg.bsr_array(np.eye(32, dtype=np.float32), blocksize=(16, 16), device="cuda")
    for N in (0, -1, 2.5, True, "8"):
        with pytest.raises(ValueError, match="N: wanted a positive integer"):
            bg.tune(A, N)
    with pytest.raises(ValueError, match="precision: wanted 'float32' or 'tf32', got 'half'"):
        bg.tune(A, 16, precision="half")
