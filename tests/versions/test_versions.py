"""The versions that were tried: what the scripts keep, how they judge, and that the pages claim no more."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bsrgemm._kernels import jit

from . import nvrtc, python

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return found


# ------------------------------------------------------------------------------------ what is declared
def test_the_classifiers_name_only_pythons_that_were_tried() -> None:
    tried = {row["python"].rpartition(".")[0] for row in rows(python.RESULTS)}
    named = {text for c in PROJECT["classifiers"] for text in re.findall(r"Python :: (3\.\d+)$", c)}
    assert named and named <= tried


def test_the_oldest_versions_that_are_declared_were_tried() -> None:
    def normal(version: str) -> str:
        return re.sub(r"(\.0)+$", "", version)

    declared = {name: normal(bound) for name, bound in (python.oldest(r).split("==") for r in python.required())}
    tried = [row["versions"] for row in rows(python.RESULTS) if row["which"] == "oldest"]
    assert any({name: normal(found[name]) for name in declared} == declared for found in tried)


def test_the_oldest_nvrtc_that_messages_name_compiles_the_default_set() -> None:
    assert nvrtc.OLDEST == jit.OLDEST_NVRTC
    found = [row for row in rows(nvrtc.RESULTS) if nvrtc.number(row["nvrtc"])[:2] == nvrtc.OLDEST]
    assert found and all(row["compiled"] == row["kernels"] for row in found)


# ----------------------------------------------------------------------------------------- the scripts
def _row(version: str, arch: str = "sm_90a", **more: Any) -> dict[str, Any]:
    return {"nvrtc": version, "set": "default", "arch": arch, **more}


def test_a_new_row_takes_the_place_of_the_old_one_and_versions_are_in_order() -> None:
    old = {"sources": nvrtc.digest(), "rows": [_row("12.9.86", compiled=1), _row("13.0.88")]}
    found = nvrtc.merged(old, [_row("12.9.86", compiled=2), _row("12.10.1")])["rows"]
    assert [row["nvrtc"] for row in found] == ["12.9.86", "12.10.1", "13.0.88"]
    assert found[0]["compiled"] == 2


def test_rows_of_other_sources_are_dropped() -> None:
    found = nvrtc.merged({"sources": "others", "rows": [_row("12.9.86")]}, [_row("13.0.88")])["rows"]
    assert [row["nvrtc"] for row in found] == ["13.0.88"]


def test_only_the_newest_version_of_a_cuda_compiles_more_than_the_default_set() -> None:
    versions = ["12.8.93", "12.9.86", "13.0.88"]
    assert nvrtc.jobs_of("12.8.93", versions) == ["default:sm_90a"]
    for version in versions[1:]:
        assert {"default:sm_90a", "default:sm_120", "span:sm_75", "span:sm_90a"} <= set(
            nvrtc.jobs_of(version, versions)
        )


@pytest.mark.parametrize(
    ("log", "spilled", "warned"),
    [
        ("ptxas info : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", 0, 0),
        ("0 bytes spill stores, 12 bytes spill loads\n4 bytes spill stores", 12, 0),
        ("x.cu(3): warning #177-D: never used", 0, 1),
        ("ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized", 0, 1),
    ],
)
def test_spills_warnings_and_serialized_instructions_are_found_in_a_log(log: str, spilled: int, warned: int) -> None:
    found, lines = nvrtc.judged(log)
    assert (found, len(lines)) == (spilled, warned)


def test_the_counts_of_a_report_are_those_of_its_suites(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>')
    assert python.counted(report) == {"passed": 3, "failed": 3, "skipped": 3}


def test_one_row_is_kept_for_each_python_and_kind_of_dependencies() -> None:
    old = {"rows": [{"python": "3.13.0", "which": "oldest"}, {"python": "3.11.7", "which": "newest"}]}
    found = python.merged(old, {"python": "3.11.9", "which": "newest"})["rows"]
    assert [(row["python"], row["which"]) for row in found] == [("3.11.9", "newest"), ("3.13.0", "oldest")]
