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
from bsrgemm._products import tuned
from bsrgemm._products.call import Problem
from bsrgemm._products.choice import by_rule, variants
from bsrgemm._products.gemm_simt import GemmSimt
from bsrgemm._products.gemm_sm80 import GemmSm80
from bsrgemm._products.gemm_sm90 import GemmSm90
from bsrgemm._products.prepared import choose

FLOAT16 = np.dtype(np.float16)
PROBLEM = Problem(
    "sm_90a",
    element_types.types(FLOAT16, FLOAT16, FLOAT16, np.dtype(np.float32), np.dtype(np.int32)),
    *(64, 64, 512, 1, 100, 100, 2000, False, "C", "C", True, True),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "_card", lambda: "some-card")
    tuned._loaded.clear()
    yield tmp_path / "bsrgemm"
    tuned._loaded.clear()


def test_nothing_is_chosen_before_anything_was_measured() -> None:
    assert tuned.stored(PROBLEM) is None


def test_a_choice_is_kept_for_this_problem_and_this_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(variants(PROBLEM))
    assert every[0] == by_rule(PROBLEM)
    assert {type(c) for c in every} == {GemmSm90, GemmSm80, GemmSimt}
    for config in every:
        assert tuned.keep(PROBLEM, config) == folder / "tuned-some-card.json"
        tuned._loaded.clear()  # as another process would find it
        assert tuned.stored(PROBLEM) == config
    assert tuned.stored(replace(PROBLEM, N=513)) is None
    assert tuned.stored(replace(PROBLEM, blocks=2001)) is None
    monkeypatch.setattr(tuned, "_card", lambda: "another-card")
    assert tuned.stored(PROBLEM) is None


def test_two_problems_share_the_file(folder: Path) -> None:
    other = replace(PROBLEM, N=64)
    tuned.keep(PROBLEM, by_rule(PROBLEM))
    tuned.keep(other, by_rule(other))
    tuned._loaded.clear()
    assert tuned.stored(PROBLEM) == by_rule(PROBLEM)
    assert tuned.stored(other) == by_rule(other)
    assert sorted(p.name for p in folder.iterdir()) == ["tuned-some-card.json"]


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"x": 1}', "entry"])
def test_a_damaged_file_is_as_good_as_none(folder: Path, damage: str) -> None:
    path = tuned.keep(PROBLEM, by_rule(PROBLEM))
    if damage == "entry":
        entries = json.loads(path.read_text())
        entries[tuned.signature(PROBLEM)]["tile_n"] = 77
        damage = json.dumps(entries)
    path.write_text(damage)
    tuned._loaded.clear()
    assert tuned.stored(PROBLEM) is None
    tuned.keep(PROBLEM, by_rule(PROBLEM))
    assert tuned.stored(PROBLEM) == by_rule(PROBLEM)


def test_only_asks_for_one_kernel_and_says_so_where_it_cannot() -> None:
    with forced_kernel.force_kernel("GemmSm80"):
        assert isinstance(choose(PROBLEM), GemmSm80)
        with pytest.raises(ValueError, match="GemmSm80 cannot multiply this"):
            choose(replace(PROBLEM, R=7))
    assert choose(PROBLEM) == by_rule(PROBLEM)


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
