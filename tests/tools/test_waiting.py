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


@pytest.mark.parametrize("workers", ["0", "1"])
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
