"""The soak itself: short runs find nothing wrong, an error is found and reproduced, and the whole surface is called."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import bsrgemm as bg
from bsrgemm._attention.mask_combine import Combinations

from ..strategies import Place
from . import memory, memory_calls, run, surface
from .__main__ import main
from .case import KINDS, Case, kind_of, run_case


@pytest.fixture(autouse=True)
def one_thread_of_blas() -> Iterator[None]:
    """The problems are small: threads of BLAS would wait for each other."""
    with threadpool_limits(1):
        yield


def silent(*_: Any) -> None:
    pass


# ------------------------------------------------------------------------------------------------ running
def test_a_short_run_finds_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "soak.json"
    assert main(["--backend", "numpy", "--cases", "120", "--seed", "1", "--threads", "2", "--json", str(file)]) == 0
    assert "none wrong" in capsys.readouterr().out
    text = file.read_text()
    assert '"cases": 120' in text and '"wrong": 0' in text and '"commit"' in text


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_longer_run_finds_nothing_wrong(seed: int) -> None:
    outcome = run.run_here(run.Plan(seed, "cpu", until=time.time() + 30), silent)
    assert not outcome.wrong and outcome.total > 100
    kinds = {name for name, kind in KINDS.items() if not kind.card}
    assert outcome.total < 2000 or set(outcome.cases) == kinds


def test_a_case_depends_on_its_seed_and_number_alone() -> None:
    place = Place("cpu")
    first = [(run_case(case), case.checks, case.rng.random()) for case in (Case(5, n, place) for n in range(20, 30))]
    again = [
        (run_case(case), case.checks, case.rng.random()) for case in (Case(5, n, place) for n in range(29, 19, -1))
    ]
    assert first == again[::-1]
    assert first != [
        (run_case(case), case.checks, case.rng.random()) for case in (Case(6, n, place) for n in range(20, 30))
    ]


def test_every_kind_is_drawn_somewhere() -> None:
    found = {kind_of(Case(1, number, Place("cpu"))) for number in range(2000)}
    assert found == {name for name, kind in KINDS.items() if not kind.card}


def test_an_error_is_found_and_the_line_reproduces_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Combinations, "__or__", Combinations.__and__)
        assert main(["--backend", "numpy", "--cases", "500", "--seed", "3"]) == 1
        said = capsys.readouterr().out
        line = said.strip().splitlines()[-1].strip()
        assert "differs" in said and line.startswith("python -m tests.soak --backend numpy --seed 3 --case ")
        words = line.split()[3:]
        assert main(words) == 1
        again = capsys.readouterr().out
        assert again.strip().splitlines()[-1].strip() == line
    assert main(words) == 0


def test_a_run_that_keeps_going_collects_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Combinations, "__or__", Combinations.__and__)
    outcome = run.run_here(run.Plan(3, "cpu", cases=150, threads=2, most=20), silent)
    assert len(outcome.wrong) > 1 and outcome.total + len(outcome.wrong) == 150
    assert {wrong["kind"].partition(".")[0] for wrong in outcome.wrong} <= {"mask", "attention", "sequence"}


@pytest.mark.parametrize(
    ("where", "name"), [(bg.bsr_array, "transpose"), (bg.bsr_array, "select_blocks"), (bg.KVCache, "reset")]
)
def test_an_operation_that_does_nothing_is_found(where: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transpose that turns nothing, a selection of everything, a cache that keeps its tokens."""
    monkeypatch.setattr(where, name, lambda self, *_, **__: self)
    chosen = {"transpose": "array.transpose", "select_blocks": "array.select", "reset": "decode.cache"}[name]
    for number in range(60):
        case = Case(1, number, Place("cpu"))
        try:
            KINDS[chosen].run(case)
        except (AssertionError, ValueError):
            return
    raise AssertionError("not found")


@pytest.mark.long
def test_processes_share_the_cases_and_report_one_that_breaks_down() -> None:
    outcome = run.run_processes(run.Plan(1, "cpu", threads=2, cases=11), 2, silent)
    assert not outcome.wrong and outcome.total == 11
    outcome = run.run_processes(run.Plan(7, "no such backend", cases=5), 2, silent)
    lines = [wrong["line"] for wrong in outcome.wrong]  # the first process to end may be either of the two
    assert any("--seed 7 --case 0" in line or "--seed 8 --case 0" in line for line in lines), lines
    assert "no such backend" in outcome.wrong[0]["trace"]


# -------------------------------------------------------------------------------------------- the surface
def test_cases_call_the_whole_public_surface() -> None:
    assert surface.uncalled(Place("cpu"), seed=3, rounds=30) == []


def test_what_is_explained_exists_and_is_not_called_by_a_case() -> None:
    assert set(surface.EXPLAINED) <= set(surface.public())
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py") if path.name != "surface.py")
    for name in surface.EXPLAINED:
        assert f".{name.rpartition('.')[2]}(" not in source.replace("__", ""), name


class Counted(memory.Allocator):
    """An allocator for calls that ask it themselves."""

    used = 0

    def live(self) -> int:
        return self.used


@pytest.mark.parametrize("fault", ["none", "harms", "leaks", "forgets", "swallows"])
def test_every_harm_of_a_failed_allocation_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, poisoned = Counted(), []

    def setup(_: Any) -> memory_calls.Setup:
        x = np.arange(4.0)

        def call() -> Any:
            if fault == "harms":
                x[0] += 1
            try:
                for _ in range(3):
                    allocator.request()
            except MemoryError:
                allocator.used += fault == "leaks"
                poisoned.append(fault == "forgets")
                if fault != "swallows":
                    raise
                return x
            return x * (1 if any(poisoned) else 2)

        return [x], call

    monkeypatch.setitem(memory_calls.CALLS, "call", setup)
    wanted = {"harms": "has changed", "leaks": "leaked", "forgets": "next call is wrong", "swallows": "result is wrong"}
    if fault == "none":
        assert memory.exhaust(Place("cpu"), allocator, "call") == 3
    else:
        with pytest.raises(AssertionError, match=wanted[fault]):
            memory.exhaust(Place("cpu"), allocator, "call")
