"""tests/card.json says what a card has run, and the kernels are those that it has run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bsrgemm._kernels.jit import KernelSpec

from . import card
from .kernels.variants import kernels

FILE: dict[str, Any] = json.loads(card.PATH.read_text(encoding="utf-8"))


def test_a_card_has_run_every_kernel_as_it_is_now() -> None:
    now, ran = card.digests(), {name: digest for name, (digest, *_) in FILE["kernels"].items()}
    assert {name.partition(":")[::2] for name in now} == {(source, entry) for entry, source in kernels().items()}
    moved = sorted(name for name in now.keys() | ran.keys() if now.get(name) != ran.get(name))
    told = "\n".join(moved)
    assert not moved, f"no card has run these kernels as they are now; on a card run python -m tests.card\n{told}"


def test_the_run_had_no_error() -> None:
    assert FILE["tests"] and not any(counts["failed"] for counts in FILE["tests"].values())
    assert set(FILE["sanitizers"]) == set(card.TOOLS)
    for found in FILE["sanitizers"].values():
        assert found["passed"] and not found["failed"] and not found["errors"] and "unmatched" not in found
        assert all(count <= card.RACES_EXPLAINED[kernel] for kernel, count in found.get("explained", {}).items())


@pytest.mark.parametrize(
    ("text", "same"),
    [("// k\n\nextern int  x; ", True), ('#include "b.cuh"\nextern int x;', False), ("extern int y;", False)],
)
def test_a_digest_moves_with_the_code_alone(text: str, same: bool, tmp_path: Path) -> None:
    for name, source in {"k.cu": "extern int x;", "b.cuh": "int b;", "changed.cu": text}.items():
        (tmp_path / name).write_text(source)
    first, again = KernelSpec("k.cu", "k", (("A", 1), ("B", 2))), KernelSpec("k.cu", "k", (("B", 2), ("A", 1)))
    other = KernelSpec("k.cu", "k", (("A", 1), ("B", 3)))
    want = card.digests([first], tmp_path)
    assert want == card.digests([again, first], tmp_path) != card.digests([first, other], tmp_path)
    (tmp_path / "k.cu").write_text(text)
    assert (card.digests([first], tmp_path) == want) is same


def test_modules_are_told_apart() -> None:
    names = ("tests.gpu.test_a.test_x[1.5-test_y]", "tests.gpu.test_a.test_z", "tests.gpu.test_b.TestC.test_x")
    found = card.by_module(dict(zip(names, ("passed", "failed", "skipped"), strict=True)))
    assert found == {
        "tests.gpu.test_a": {"passed": 1, "skipped": 0, "failed": 1},
        "tests.gpu.test_b": {"passed": 0, "skipped": 1, "failed": 0},
    }


def test_a_sanitizer_counts_for_kernels_that_are_as_the_tests_ran_them() -> None:
    file = card.with_suite({}, {"a": "1", "b": "2", "c": "3"}, {"a", "b"}, {"commit": "x"})
    file = card.with_tool(file, {"a": "1", "b": "other"}, "memcheck", {"errors": 0, "failed": 0})
    assert file["kernels"] == {"a": ["1", "memcheck"], "b": ["2"]}
    assert card.with_suite(file, {"a": "1", "b": "2"}, {"a", "b"}, {})["kernels"] == file["kernels"]
    assert card.with_suite(file, {"a": "4"}, {"a"}, {})["kernels"] == {"a": ["4"]}
    assert card.with_suite(file, {"a": "1", "b": "5"}, set(), {})["kernels"] == {"a": ["1", "memcheck"]}
    assert card.with_tool(file, {"a": "1"}, "memcheck", {"errors": 1, "failed": 0})["kernels"]["a"] == ["1"]
    assert json.loads(card.written(file)) == file
