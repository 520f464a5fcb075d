"""Device code cannot change without a run of its own tests on a card behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .kernels import KERNELS, RACES_EXPLAINED, SHARED_MEMORY, digest

RECORD = json.loads((Path(__file__).parent / "gpu_record.json").read_text())


def _expect_a_record(kernel: str) -> None:
    """Of a kernel whose tests are due the record says so, and what has been seen of it; of this digest and no other."""
    due = RECORD.get("due", {}).get(kernel)
    if due is not None and due["digest"] == digest(kernel):
        pytest.xfail(due["why"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_was_tested_on_a_card_as_it_is_now(kernel: str) -> None:
    _expect_a_record(kernel)
    entry = RECORD["kernels"][kernel]
    assert entry["digest"] == digest(kernel), (
        f"{kernel} or its launch code has changed since its last run on a card: "
        "run `python -m tests.record.run` on a machine with one"
    )
    assert entry["passed"] > 0
    assert entry["failed"] == 0


def _expect_a_run(tool: str, kernel: str) -> dict[str, Any]:
    """What a tool of compute-sanitizer found; an expected failure where the kernel has changed since."""
    found: dict[str, Any] = RECORD["sanitizer"][tool]
    if found["kernels"].get(kernel) != digest(kernel):
        pytest.xfail(f"{kernel} has not been under {tool} as it is now")
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_was_clean_under_memcheck(kernel: str) -> None:
    memcheck = _expect_a_run("memcheck", kernel)
    assert memcheck["errors"] == 0
    assert memcheck["passed"] > 0


@pytest.mark.parametrize("kernel", SHARED_MEMORY)
def test_kernel_with_shared_memory_was_clean_under_racecheck(kernel: str) -> None:
    racecheck = _expect_a_run("racecheck", kernel)
    assert racecheck["errors"] == 0
    assert set(racecheck.get("explained", {})) <= set(RACES_EXPLAINED)


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_of_the_kernel_are_recorded(kernel: str) -> None:
    _expect_a_record(kernel)
    assert RECORD["kernels"][kernel]["checksums"]


def test_record_names_the_card_and_the_compiler() -> None:
    assert RECORD["card"] and RECORD["nvrtc"] and RECORD["driver"]
    suite = RECORD["suite"]
    assert suite["failed"] == 0 and suite["passed"] > 1000
