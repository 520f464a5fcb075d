"""Device code cannot change without a run of its own tests on a card behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .kernels import KERNELS, RACES_EXPLAINED, SHARED_MEMORY, digest

RECORD = json.loads((Path(__file__).parent / "gpu_record.json").read_text())


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_was_tested_on_a_card_as_it_is_now(kernel: str) -> None:
    entry = RECORD["kernels"][kernel]
    assert entry["digest"] == digest(kernel), (
        f"{kernel} or its launch code has changed since its last run on a card: "
        "run `python -m tests.record_gpu` on a machine with one"
    )
    assert entry["passed"] > 0
    assert entry["failed"] == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_was_clean_under_memcheck(kernel: str) -> None:
    memcheck = RECORD["sanitizer"]["memcheck"]
    if kernel in memcheck.get("due", []):
        pytest.xfail("changed since its last run under memcheck")
    assert memcheck["errors"] == 0
    assert memcheck["passed"] > 0
    assert kernel in memcheck["kernels"]


@pytest.mark.parametrize("kernel", SHARED_MEMORY)
def test_kernel_with_shared_memory_was_clean_under_racecheck(kernel: str) -> None:
    racecheck = RECORD["sanitizer"]["racecheck"]
    if kernel in racecheck.get("due", []):
        pytest.xfail("its last run under racecheck left reports that were not all looked at")
    assert racecheck["errors"] == 0
    assert set(racecheck.get("explained", {})) <= set(RACES_EXPLAINED)
    assert kernel in racecheck["kernels"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_of_the_kernel_are_recorded(kernel: str) -> None:
    if kernel in RECORD.get("lost_checksums", []):
        pytest.xfail("the checksums of its last run were lost")
    assert RECORD["kernels"][kernel]["checksums"]


def test_record_names_the_card_and_the_compiler() -> None:
    assert RECORD["card"] and RECORD["nvrtc"] and RECORD["driver"]
    suite = RECORD["suite"]
    assert suite["failed"] == 0 and suite["passed"] > 1000
