"""Tests that need what a run lacks are not selected, and one line says how many wait for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .. import conftest
from ..emulator import races

ROOT = Path(__file__).resolve().parents[2]


class Item:
    """As much of a test as the question needs: its marks."""

    def __init__(self, *marks: str) -> None:
        self.marks = marks

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None


@pytest.mark.parametrize(
    ("marks", "cuda", "profile", "reason"),
    [
        ((), False, "", None),
        (("gpu",), False, "all", "a CUDA device"),
        (("gpu",), True, "", None),
        (("gpu", "long"), False, "", "a CUDA device"),
        (("gpu", "long"), True, "", "BSRGEMM_LONG=1"),
        (("long",), False, "1", None),
        (("long",), False, "all", None),
        (("every_variant",), False, "1", "BSRGEMM_LONG=all"),
        (("every_variant",), False, "all", None),
    ],
)
def test_a_test_waits_for_what_the_run_lacks(
    marks: tuple[str, ...], cuda: bool, profile: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "has_cuda", lambda: cuda)
    monkeypatch.setattr(conftest, "PROFILE", profile)
    monkeypatch.setattr(conftest, "LONG", profile in ("1", "all"))
    assert conftest.waits_for(Item(*marks)) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_one_line_says_how_many_tests_wait_for_a_device(workers: str) -> None:
    paths = ["tests/kernels/test_workspace.py", "tests/gpu/test_solver.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", workers, *paths],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^\d+ tests wait for a CUDA device$", done.stdout, re.MULTILINE)) == 1
    assert "SKIPPED" not in done.stdout


class Case(Item):
    """A case of a test, with its name."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        super().__init__(*marks)
        self.nodeid = nodeid


@pytest.mark.parametrize(
    ("room", "cases", "kept"),
    [
        ("", 1, 1),
        ("", 5, 5),
        ("", 6, 2),
        ("", 7, 3),
        ("", 600, 200),
        ("emulator/", 2, 2),
        ("emulator/", 3, 1),
        ("emulator/", 4, 2),
    ],
)
def test_a_third_of_many_cases_is_the_sample(room: str, cases: int, kept: int) -> None:
    some = [Case(f"tests/{room}x.py::test_some[{n}]") for n in range(cases)]
    others = [Case(f"tests/x.py::test_other[{n}]") for n in range(5)]
    on_a_card = [Case(f"tests/x.py::test_card[{n}]", "gpu") for n in range(9)]
    items: list[Any] = [*some, *others, *on_a_card]
    left = conftest.beyond_the_sample(items)
    assert left == conftest.beyond_the_sample(items[::-1]) and left <= set(some)
    assert cases - len(left) == kept


def test_only_a_run_of_everything_is_sampled() -> None:
    def selected(*arguments: str, **environment: str) -> int:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-n",
            "0",
            "--collect-only",
            "-vv",
            *arguments,
        ]
        options = ["-o", "testpaths=tests/kernels/test_structs.py"]
        done = subprocess.run(
            command + options,
            cwd=ROOT,
            env=os.environ | {"BSRGEMM_LONG": ""} | environment,
            capture_output=True,
            text=True,
        )
        return int(re.findall(r"(\d+)(?:/\d+)? tests collected", done.stdout)[-1])

    everything = selected("tests/kernels/test_structs.py")
    assert 0 < selected() < everything
    if conftest.LONG:  # a third collection takes seconds
        assert selected(BSRGEMM_LONG="1") == everything


def test_a_run_of_everything_takes_one_half_of_a_test_that_runs_twice() -> None:
    names = [f"tests/emulator/x.py::test_{n}" for n in range(300)]
    watched = [name for name in names if not races.left_out(name, True)]
    assert [name for name in names if races.left_out(name, False)] == watched
    assert 60 < len(watched) < 140
