"""Choices that were measured: kept per card, read back by other processes, never trusted blindly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels import disk_cache, element_types
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._kernels.launch import Chain
from bsrgemm._products import prepared, tuned
from bsrgemm._products import tune as tune_module
from bsrgemm._products.call import Problem
from bsrgemm._products.choice import variants
from bsrgemm._products.costs import H200
from bsrgemm._products.dense import Dense
from bsrgemm._products.gemm_simt import GemmSimt
from bsrgemm._products.gemm_sm80 import GemmSm80
from bsrgemm._products.gemm_sm90 import GemmSm90
from bsrgemm._products.prepared import choose, fastest

from ..devices import Device

FLOAT16 = np.dtype(np.float16)
PROBLEM = Problem(
    "sm_90a",
    element_types.types(FLOAT16, FLOAT16, FLOAT16, np.dtype(np.float32), np.dtype(np.int32)),
    *(64, 64, 512, 1, 100, 100, 2000, False, "C", "C", True, True),
)


def predicted(one: Problem) -> Dense:
    return fastest(one, H200, True)


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
    assert every[0] == predicted(PROBLEM)
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
    tuned.keep(PROBLEM, predicted(PROBLEM))
    tuned.keep(other, predicted(other))
    tuned._loaded.clear()
    assert tuned.stored(PROBLEM) == predicted(PROBLEM)
    assert tuned.stored(other) == predicted(other)
    assert sorted(p.name for p in folder.iterdir()) == ["tuned-some-card.json"]


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"x": 1}', "entry"])
def test_a_damaged_file_is_as_good_as_none(folder: Path, damage: str) -> None:
    path = tuned.keep(PROBLEM, predicted(PROBLEM))
    if damage == "entry":
        entries = json.loads(path.read_text())
        entries[tuned.signature(PROBLEM)]["tile_n"] = 77
        damage = json.dumps(entries)
    path.write_text(damage)
    tuned._loaded.clear()
    assert tuned.stored(PROBLEM) is None
    tuned.keep(PROBLEM, predicted(PROBLEM))
    assert tuned.stored(PROBLEM) == predicted(PROBLEM)


def test_only_asks_for_one_kernel_and_says_so_where_it_cannot() -> None:
    with force_kernel("GemmSm80"):
        assert isinstance(choose(PROBLEM, H200), GemmSm80)
        with pytest.raises(ValueError, match="GemmSm80 cannot multiply this"):
            choose(replace(PROBLEM, R=7, K=7, b_order=""), H200, False)
    assert choose(PROBLEM, H200) == predicted(PROBLEM)


def test_tune_wants_a_matrix_on_the_gpu() -> None:
    with pytest.raises(TypeError, match="A: wanted a bsr_array or bsr_matrix, got ndarray"):
        bg.tune(np.ones((2, 2)), 4)
    with pytest.raises(TypeError, match="A: wanted a BSR matrix on the GPU, got one on 'cpu'"):
        bg.tune(bg.bsr_array(np.eye(4)), 4)


def test_tune_names_what_is_wrong(device: Device) -> None:
    A = bg.bsr_array(device.asarray(np.eye(32, dtype=np.float32)), blocksize=(16, 16))
    for N in (0, -1, 2.5, True, "8"):
        with pytest.raises(ValueError, match="N: wanted a positive integer"):
            bg.tune(A, N)
    with pytest.raises(ValueError, match="precision: wanted 'float32' or 'tf32', got 'half'"):
        bg.tune(A, 16, precision="half")
    with pytest.raises(TypeError, match="does not support dtype"):
        bg.tune(A, 1, dtype="U3")


def test_a_choice_that_cannot_be_written_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache.os, "replace", lambda *args: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        tuned.keep(PROBLEM, predicted(PROBLEM))
    assert not list(folder.iterdir())


# ------------------------------------------------------------------------------------------------ on a card
def matrix_on(device: Device, dtype: str, block: tuple[int, int]) -> Any:
    host = bg.bsr_array(np.kron(np.ones((3, 4)), np.ones(block)).astype(dtype), blocksize=block)
    return bg.bsr_array(tuple(map(device.asarray, host._blocks)), shape=host.shape)


@pytest.mark.emulated
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("dtype", "block"), [("f4", (64, 32)), ("f2", (64, 64)), ("f8", (3, 3)), ("F", (32, 32))], ids=str
)
def test_tune_keeps_the_fastest_which_products_use_at_once(
    arch: str, dtype: str, block: tuple[int, int], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are not run: the last one is said to be the fastest."""
    device.needs(arch)
    A = matrix_on(device, dtype, block)
    B = device.asarray(np.ones((A.shape[1], 96), dtype))
    with device.kernels() as usual:
        A @ B
    seconds = iter(range(100, 0, -1))
    monkeypatch.setattr(tune_module, "time_gpu", lambda call, repeats: float(next(seconds)))
    found = bg.tune(A, 96)
    names = [name.split(":")[1].split()[0] for name, _ in found]
    assert [s for _, s in found] == sorted(s for _, s in found) and len(set(found)) == len(found) > 1
    with device.kernels() as after:
        A @ B
    assert names[-1] in usual and names[0] in after and names[0] != names[-1]
    assert after.count(names[0]) == 1, "what was known of calls is forgotten"


@pytest.mark.emulated
@pytest.mark.parametrize("copies_win", [True, False])
def test_tune_measures_copies_by_columns_too(copies_win: bool, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they win, nothing is stored, and they are chosen again."""
    device.needs("sm_90a")
    every = prepared._ways

    def by_copies(problem: Problem) -> Iterator[Any]:
        return (way for way in every(problem) if any(getattr(holder, "parts", 0) for holder, _ in way[0]))

    monkeypatch.setattr(prepared, "_ways", by_copies)
    prepared.fastest.cache_clear()
    A = matrix_on(device, "f4", (64, 32))
    measured: list[Any] = []

    def timed(call: Any, repeats: int) -> float:
        measured.append(call.func.__self__)
        return float((len(measured) == 1) != copies_win)

    monkeypatch.setattr(tune_module, "time_gpu", timed)
    found = bg.tune(A, 96)
    assert isinstance(measured[0], Chain) and not any(isinstance(x, Chain) for x in measured[1:])
    assert ("with copies" in found[0][0]) == copies_win and sum("-DPARTS=2" in name for name, _ in found) == 1
    with device.kernels() as after:
        A @ device.asarray(np.ones((A.shape[1], 96), "f4"))
    assert ("rearrange" in after) == copies_win
    prepared.fastest.cache_clear()
