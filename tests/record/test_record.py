"""No launch changes unseen: the tests make the launches on a stand-in that a card has made, and the record is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..conftest import LONG
from . import record as records
from . import run
from .kernels import ENTRIES, KERNELS, uses_shared_memory
from .log import source_digest
from .run import RACES_EXPLAINED, TOOLS, WAITING, run_tests

RECORD = records.load()
AGAIN = "run `python -m tests.record.run` on a machine with a card"


def test_the_record_is_of_a_whole_run_on_a_card() -> None:
    assert not records.problems(RECORD), AGAIN
    assert RECORD["card"] != "stand-in" and RECORD["nvrtc"] and RECORD["driver"]


def _tests_of(entry: str) -> list[dict[str, Any]]:
    """Tests that passed and launched this function as it is now."""
    digest = source_digest(ENTRIES[entry], None)
    kernels = {n for n, (name, source, _) in enumerate(RECORD["kernels"]) if (name, source) == (entry, digest)}
    launches = {n for n, (kernel, *_) in enumerate(RECORD["launches"]) if kernel in kernels}
    return [
        test
        for test in RECORD["tests"].values()
        if test["outcome"] == "passed"
        and any((item[0] if isinstance(item, list) else item) in launches for item in test.get("launches", ()))
    ]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_kernel_as_it_is_now_was_launched_by_tests_that_passed(entry: str) -> None:
    assert _tests_of(entry), f"{entry} as it is now has not been on a card: {AGAIN}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_of_the_kernel_have_checksums(kernel: str) -> None:
    assert any("checksum" in test for entry in KERNELS[kernel][1] for test in _tests_of(entry))


@pytest.mark.parametrize("tool", TOOLS)
def test_kernels_were_clean_under_the_sanitizer(tool: str) -> None:
    found = RECORD["sanitizer"].get(tool)
    assert found, f"no whole run of {tool} is recorded: {AGAIN}"
    seen = set[tuple[str, str]]()
    for part in (found, *found.get("earlier", ())):
        assert part["errors"] == 0 and part["failed"] == 0 and not part["dirty"] and part["passed"] > 0
        assert part["collected"] == sum(part[outcome] for outcome in records.OUTCOMES)
        assert all(count <= RACES_EXPLAINED.get(kernel, 0) for kernel, count in part["explained"].items())
        seen |= {(entry, source) for entry, source in part["kernels"]}
    wanted = {
        (entry, source_digest(source, None))
        for entry, source in ENTRIES.items()
        if tool == "memcheck" or (tool != "initcheck" and uses_shared_memory(source))
    }
    missing = {entry for entry, source in wanted - seen}
    waiting = WAITING.get(tool, set())
    assert missing <= waiting, f"not seen by {tool} as they are now: {sorted(missing - waiting)}. {AGAIN}"
    assert waiting <= missing, f"seen by {tool}: take {sorted(waiting - missing)} out of WAITING in tests/record/run.py"
    assert waiting <= {entry for entry, _ in seen}, "an earlier version was seen"


def test_logs_of_a_sanitizer_are_judged_by_what_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"names": ["k*2"]}
    tests = [{"name": "a", "outcome": "passed", "launches": launched}, {"name": "b", "outcome": "skipped"}]
    (tmp_path / "racecheck.json").write_text(json.dumps({"collected": 2, "tests": tests}))
    (tmp_path / "racecheck.table-main.json").write_text(json.dumps({"k": {"entry": "mine", "source": "0123"}}))
    race = "========= Error: Race reported between Write access at mine+0x10\n"
    said = 2 * race + "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n"
    (tmp_path / "racecheck.log").write_text(said)
    before = {"commit": "c0", "dirty": False, "errors": 7}
    monkeypatch.setattr(run, "RACES_EXPLAINED", {})
    found = run.judged_again("racecheck", tmp_path, before)
    assert found["errors"] == 2 and found["explained"] == {} and found["commit"] == "c0" and not found["dirty"]
    assert found["kernels"] == [["mine", "0123"]] and (found["passed"], found["skipped"]) == (1, 1)
    told = records.problems(RECORD | {"sanitizer": {"racecheck": found}})
    assert "racecheck has 2 reports that are not explained" in told
    monkeypatch.setattr(run, "RACES_EXPLAINED", {"mine": 2})
    found = run.judged_again("racecheck", tmp_path, before)
    assert found["errors"] == 0 and found["explained"] == {"mine": 2}


def test_what_a_tool_has_found_before_stays_beside_what_some_tests_find_now() -> None:
    first, second = {"errors": 1, "kernels": [["a", "0"]]}, {"errors": 0, "kernels": [["a", "1"]]}
    once = run.joined(second, first)
    assert once == second | {"earlier": [first]}
    assert run.joined(first, once) == first | {"earlier": [first, second]}


def test_what_a_tool_has_found_before_stays_when_its_logs_are_judged_again(tmp_path: Path) -> None:
    (tmp_path / "memcheck.json").write_text(json.dumps({"collected": 0, "tests": []}))
    (tmp_path / "memcheck.log").write_text("ERROR SUMMARY: 0 errors\n")
    earlier = [{"commit": "c0", "errors": 0}]
    found = run.judged_again("memcheck", tmp_path, {"commit": "c1", "dirty": False, "earlier": earlier})
    assert found["earlier"] == earlier and found["commit"] == "c1"


@pytest.mark.parametrize("part", ["sample", pytest.param("everything", marks=pytest.mark.long)])
def test_launches_on_the_stand_in_are_those_of_the_record(part: str, tmp_path: Path) -> None:
    names = RECORD["sample"] if part == "sample" else sorted(RECORD["tests"])
    compare(RECORD, names, tmp_path, workers="auto" if LONG and part == "everything" else "0")


def compare(record: dict[str, Any], names: list[str], folder: Path, workers: str = "0") -> None:
    """Run these tests on the stand-in; AssertionError with the first launch that differs, of every test."""
    assert names
    paths = names if len(names) < 1000 else ["tests"]
    report, table, said = run_tests("-n", workers, "-m", "gpu", *paths, report=folder / "report.json", stand_in=True)
    assert report["tests"], said[-3000:]
    now = records.build(report, table, partial=True)
    wrong = list(differences(record, now, names))
    assert not wrong, f"{len(wrong)} of {len(names)} tests:\n" + "\n".join(wrong[:20]) + f"\n{AGAIN}"


def differences(record: dict[str, Any], now: dict[str, Any], names: list[str]) -> Any:
    """What differs, test by test, except for what the stand-in cannot do according to the record."""
    for name in names:
        excuse = record["stand_in"].get(name)
        if excuse is not None and excuse != records.SHARING:
            continue
        if record["tests"][name].get("drawn") and record["hypothesis"] != now["hypothesis"]:
            continue
        test = now["tests"].get(name)
        if test is None:
            yield f"{name}: not run"
        elif test["outcome"] != record["tests"][name]["outcome"]:
            yield f"{name}: {test['outcome']} on the stand-in: {test.get('why', '')}"
        else:
            text = records.difference(record, now, name)
            if text is not None and not (excuse and text.endswith(records.SHARING)):
                yield text


def test_tests_that_are_gone_leave_the_record_with_their_outcome() -> None:
    gone, kept = "tests/gone.py::test_gone", "tests/record/test_record.py::test_kept"
    tests = {gone: {"outcome": "failed", "why": "no MPI"}, kept: {"outcome": "passed", "launches": [1]}}
    record = {"tests": tests, "test_files": {"tests/gone.py": "1", "tests/record/test_record.py": "2"}}
    records.retire(record, [gone])
    assert record["tests"] == {kept: {"outcome": "passed", "launches": [1]}}
    assert record["retired"] == {gone: {"outcome": "failed", "why": "no MPI"}}
    assert record["suite"] == {"collected": 1, "passed": 1, "failed": 0, "skipped": 0, "xfailed": 0}
    assert record["test_files"] == {"tests/record/test_record.py": "2"}
