"""The versions that were tried: what the scripts keep, how they judge, and that the pages claim no more."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bsrgemm._kernels import jit, sources

from ..record import record as records
from . import cubins, nvrtc, python

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


# --------------------------------------------------------------------------------- cubins for a card
EXPAND = cubins.recorded_spec("expand", "-DINDEX=i32")
#: Tests without a card that ask for two kernels, one of which the folder has.
TWO_KERNELS = """
from bsrgemm._kernels import jit
from tests.versions import cubins


def test_one():
    jit.build(cubins.recorded_spec("expand", "-DINDEX=i32"), "sm_90a")


def test_two():
    jit.build(cubins.recorded_spec("expand", "-DINDEX=i64"), "sm_90a")
    raise AssertionError


def test_that_is_not_in_the_folder():
    raise AssertionError
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one kernel, made for two tests."""
    found = tmp_path_factory.mktemp("cubins")
    cubins.make(found, [EXPAND], ["test_it.py::test_one", "test_it.py::test_two"])
    return found


def test_the_record_names_kernels_by_options_that_give_the_same_options_again() -> None:
    record = records.load()
    tests = cubins.kernels_of(record)
    for number in {number for kernels in tests.values() for number in kernels}:
        entry, _, options = record["kernels"][number]
        spec = cubins.recorded_spec(entry, options)
        assert " ".join([*jit.options(spec, "sm_90a"), *(["overlapping"] if spec.overlaps else [])]) == options


def test_tests_are_chosen_only_if_all_of_their_kernels_are() -> None:
    options = [f"-DINDEX={index}" for index in ("i32", "i64", "u8")]
    launches = [[kernel, [1], [1], 0, True, False, "4: 0"] for kernel in range(3)]
    passed = {"a": [0], "b": [[0, 5], 1], "c": [0, 1, 2]}
    tests: dict[str, Any] = {name: {"outcome": "passed", "launches": found} for name, found in passed.items()}
    tests |= {"drawn": tests["a"] | {"drawn": True}, "failed": tests["a"] | {"outcome": "failed"}}
    record = {"tests": tests, "launches": launches, "kernels": [["expand", "", text] for text in options]}
    assert cubins.chosen(record, 2) == ({0, 1}, ["a", "b"])
    assert cubins.chosen(record, 3) == ({0, 1, 2}, ["a", "b", "c"])


def test_a_kernel_of_other_options_or_another_source_has_another_name() -> None:
    texts = sources.gather(EXPAND.source)
    name = cubins.cubin_name(EXPAND, "sm_90a", texts)
    assert cubins.cubin_name(EXPAND, "sm_90a", texts | {EXPAND.source: f"{texts[EXPAND.source]} // a remark"}) == name
    assert cubins.cubin_name(EXPAND, "sm_90a", texts | {EXPAND.source: f"{texts[EXPAND.source]} int x;"}) != name
    assert cubins.cubin_name(cubins.recorded_spec("expand", "-DINDEX=i64"), "sm_90a", texts) != name


def test_kernels_of_a_folder_are_taken_and_the_others_compiled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_it.py").write_text(TWO_KERNELS)
    monkeypatch.setattr(cubins, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "report.json"
    assert cubins.run(folder, out, ["-q", "-p", "no:xdist"]) == 1
    report = json.loads(out.read_text())
    counts = ("kernels_in_folder", "kernels_from_folder", "kernels_compiled", "passed", "failed", "skipped")
    assert [report[name] for name in counts] == [1, 1, 1, 1, 1, 0]
    assert report["nvrtc"].startswith(jit.nvrtc_version()) and report["failures"] == ["test_it.py::test_two"]


def test_a_kernel_that_several_processes_took_counts_once(folder: Path, pytestconfig: pytest.Config) -> None:
    lookup = cubins.Lookup(folder, jit._compile)
    runner = cubins.Runner(pytestconfig, folder, lookup)
    for output in ({"found": ["a", "b"], "compiled": ["c"]}, {"found": ["b"], "compiled": []}):
        runner.pytest_testnodedown(SimpleNamespace(workeroutput=output))
    runner.pytest_testnodedown(SimpleNamespace())  # a process that has crashed says nothing
    assert (lookup.found, lookup.compiled) == ({"a", "b"}, {"c"})


def test_a_rehearsal_names_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSRGEMM_STAND_IN", "1")
    assert cubins.card() == {"card": "stand-in"}


@pytest.mark.parametrize(("taken", "status"), [(None, 1), (0, 1), (1, 0)])
def test_a_run_that_takes_no_cubin_is_not_a_success(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int | None, status: int
) -> None:
    out = tmp_path / "report.json"
    out.write_text(json.dumps({"kernels_from_folder": 7}))  # of an earlier run

    def passed(*_: Any, **__: Any) -> SimpleNamespace:
        if taken is not None:
            out.write_text(json.dumps({"kernels_from_folder": taken}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(cubins.subprocess, "run", passed)
    assert cubins.run(folder, out, []) == status


def test_a_folder_that_holds_something_is_not_written_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cubins.main(["--make", str(folder)])
    assert "not empty" in capsys.readouterr().err
