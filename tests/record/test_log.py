"""The log of launches: free of addresses, and no part of a launch is missing from it. The record: whole or refused."""

from __future__ import annotations

import copy
import ctypes
import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels.jit import KernelSpec

from . import log
from . import record as records
from .run import run_tests

SPEC = KernelSpec("expand.cu", "expand", (("INDEX", "i32"),))


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> log.Allocations:
    """Allocations of this test alone, and a stream."""
    found = log.Allocations()
    monkeypatch.setattr(log, "ALLOCATIONS", found)
    monkeypatch.setattr(log, "_maps", {})
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
    monkeypatch.setattr(log, "_current_stream", lambda: stream)
    return found


def packed(*words: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(struct.pack(f"={len(words)}Q", *words), f"V{8 * len(words)}")[0]


def launches(*calls: tuple[Any, ...], spec: KernelSpec = SPEC, arch: str = "sm_90a") -> log.TestLog:
    """The log of a test that launches a kernel with (grid, block, arguments, shared memory)."""
    kernel = log.Kernel(lambda *_, **__: None, spec, arch, None)
    found = log.begin()
    for grid, block, args, shared in calls:
        kernel(grid, block, args, shared_mem=shared)
    log.end()
    return found


# ------------------------------------------------------------------------------------------------ the log
def test_addresses_become_operands_and_offsets(memory: log.Allocations) -> None:
    digests = set()
    for base in (1 << 40, 3 << 41):
        memory.note(base, 1024)
        memory.note(base + 4096, 512)
        call = ((1,), (32,), (packed(base + 4096, 7, base + 16, base + 4100), np.int64(5)), 0)
        found = launches(call, call)
        digests.add((found.digest(), found.sharing()))
        (about,) = found.table.values()
        assert about["args"] == "32: @0+0 7 @1+16 @0+4 ; 8: 5"
    assert len(digests) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"grid": (2,)},
        {"block": (64,)},
        {"shared": 16},
        {"shared": 1 << 17},
        {"word": 8},
        {"offset": 8},
        {"scalar": np.int64(6)},
        {"scalar": np.int32(5)},
        {"spec": KernelSpec("expand.cu", "expand", (("INDEX", "i64"),))},
        {"spec": KernelSpec("segment.cu", "expand", (("INDEX", "i32"),))},
        {"spec": KernelSpec("expand.cu", "other", (("INDEX", "i32"),))},
        {"arch": "sm_80"},
    ],
    ids=str,
)
def test_every_part_of_a_launch_counts(memory: log.Allocations, change: dict[str, Any]) -> None:
    memory.note(1 << 40, 1024)
    usual = {"grid": (1,), "block": (32,), "shared": 0, "word": 7, "offset": 0, "scalar": np.int64(5), "arch": "sm_90a"}

    def digest(spec: KernelSpec = SPEC, **x: Any) -> str:
        args = (packed((1 << 40) + x["offset"], x["word"]), x["scalar"])
        return launches((x["grid"], x["block"], args, x["shared"]), spec=spec, arch=x["arch"]).digest()

    assert digest(**usual) == digest(**usual) != digest(**usual | change)


def test_compile_options_count(memory: log.Allocations, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ((1,), (32,), (), 0)
    before = launches(call).digest()
    monkeypatch.setattr(log.jit, "options", lambda spec, arch: ("--use_fast_math",))
    assert launches(call).digest() != before


def test_memory_that_is_given_away_again_is_another_operand(memory: log.Allocations) -> None:
    def run(again: bool) -> log.TestLog:
        kernel = log.Kernel(lambda *_, **__: None, SPEC, "sm_90a", None)
        found = log.begin()
        memory.note(1 << 40, 1024)
        kernel((1,), (32,), (packed(1 << 40),))
        if again:
            memory.note(1 << 40, 512)
        kernel((1,), (32,), (packed(1 << 40),))
        log.end()
        return found

    kept, reused = run(False), run(True)
    assert kept.digest() == reused.digest() and kept.sharing() != reused.sharing()


def test_allocations_replace_those_at_their_place(memory: log.Allocations) -> None:
    first, second, third = (memory.note(start, 100) for start in (1000, 1100, 1200))
    assert [memory.find(x) for x in (999, 1000, 1199, 1299, 1300)] == [
        None,
        (first, 0),
        (second, 99),
        (third, 99),
        None,
    ]
    whole = memory.note(1050, 200)
    assert memory.find(1249) == (whole, 199) and memory.find(1010) is None and memory.find(1260) is None
    memory.forget(1050, first)
    assert memory.find(1050) == (whole, 0)
    memory.forget(1050, whole)
    assert memory.find(1050) is None


def test_the_order_of_threads_does_not_count(memory: log.Allocations) -> None:
    kernel = log.Kernel(lambda *_, **__: None, SPEC, "sm_90a", None)

    def digest(order: tuple[int, ...]) -> str:
        found = log.begin()
        for grid in order:
            thread = threading.Thread(target=kernel, args=((grid,), (32,), ()))
            thread.start()
            thread.join()
        log.end()
        return found.digest()

    assert digest((1, 2, 3)) == digest((3, 1, 2)) != digest((1, 2, 4))


def test_tensor_maps_are_what_the_driver_was_given(memory: log.Allocations) -> None:
    def driver(result: int, *given: Any) -> int:
        ctypes.memmove(
            result, repr([list(x) if isinstance(x, ctypes.Array) else x for x in given]).ljust(128).encode(), 128
        )
        return 0

    def text(pointer: int, dims: tuple[int, int] = (64, 8), swizzle: int = 3) -> str:
        result = ctypes.create_string_buffer(128)
        arrays = [(ctypes.c_uint64 * 2)(*dims), (ctypes.c_uint64 * 2)(128, 0), *[(ctypes.c_uint32 * 2)(8, 8)] * 2]
        assert log.noting(driver)(ctypes.addressof(result), 6, 2, pointer, *arrays, 0, swizzle, 2, 0) == 0
        call = ((1,), (32,), (np.frombuffer(result.raw + bytes(8), "V136")[0],), 0)
        (about,) = launches(call).table.values()
        return about["args"]

    memory.note(1 << 40, 1024)
    memory.note(1 << 41, 1024)
    usual = text(1 << 40)
    assert "map(@0+0 6 64,8 128 8,8" in usual and usual == text(1 << 41)
    assert len({usual, text((1 << 40) + 16), text(1 << 40, (64, 9)), text(1 << 40, swizzle=2)}) == 4


# --------------------------------------------------------------------------------------------- the record
@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A whole one of two tests."""
    monkeypatch.setattr(records, "commit", lambda: ("0" * 40, False))
    description = {
        "entry": "expand", "source": "00", "options": "-a -b", "grid": (1,), "block": (32,), "shared": 0,
        "shared_allowed": True, "captured": False, "args": "16: @0+0 0*2",
    }  # fmt: skip
    found = {"digest": "d", "sharing": "s", "entries": ["expand"], "names": ["x*2"], "drawn": False}
    tests = [
        {"name": "tests/gpu/test_products.py::a", "outcome": "passed", "launches": found, "checksum": "12"},
        {"name": "tests/gpu/test_products.py::b", "outcome": "skipped", "why": "no"},
    ]
    report = {"card": "H", "nvrtc": "12.9", "hypothesis": "6", "collected": 2, "tests": tests}
    return records.build(report, {"x": description}, partial=False)


def _spoil(record: dict[str, Any], *keys: str, value: Any) -> dict[str, Any]:
    spoiled = place = copy.deepcopy(record)
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return spoiled


SPOILED: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    (lambda r: _spoil(r, "partial", value=True), "partial"),
    (lambda r: _spoil(r, "dirty", value=True), "not of a commit"),
    (lambda r: _spoil(r, "suite", "failed", value=1), "1 tests failed"),
    (lambda r: _spoil(r, "suite", "collected", value=3), "3 tests were collected"),
    (lambda r: _spoil(r, "suite", "passed", value=2), "have an outcome"),
    (
        lambda r: _spoil(r, "tests", "tests/gpu/test_products.py::b", "outcome", value="passed"),
        "not those that were counted",
    ),
    (lambda r: _spoil(r, "test_files", "tests/strategies.py", value="0"), "tests/strategies.py has changed"),
    (lambda r: _spoil(r, "stand_in", value={"tests/gpu/test_products.py::a": "why"}), "leaves out 1 of 2"),
]


@pytest.mark.parametrize(("spoil", "text"), SPOILED, ids=[text for _, text in SPOILED])
def test_a_record_that_is_not_whole_is_refused(record: dict[str, Any], spoil: Any, text: str) -> None:
    assert records.problems(record) == []
    assert any(text in problem for problem in records.problems(spoil(record)))


def test_a_run_that_was_cut_off_is_partial(record: dict[str, Any]) -> None:
    report = {"collected": 3, "tests": [{"name": "tests/gpu/test_products.py::a", "outcome": "passed"}]}
    assert records.build(report, {}, partial=False)["partial"]
    assert records.build({"collected": None, "tests": []}, {}, partial=False)["partial"]


def test_a_record_is_read_as_it_was_written_and_belongs_to_its_launches(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    records.write(path, record)
    assert records.load(path) == json.loads(json.dumps(record))
    beside = records._beside(path)
    beside.write_bytes(beside.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="does not belong"):
        records.load(path)


def test_other_bits_are_told_for_the_same_card_and_compiler(record: dict[str, Any]) -> None:
    name = "tests/gpu/test_products.py::a"
    now = _spoil(record, "tests", name, "checksum", value="13")
    assert records.changed_checksums(record, now) == {name: ("12", "13")}
    assert not records.changed_checksums(record, record)
    assert not records.changed_checksums(_spoil(record, "nvrtc", value="13.0"), now)


def test_the_first_launch_that_differs_is_told_field_by_field(record: dict[str, Any]) -> None:
    name = "tests/gpu/test_products.py::a"
    now = _spoil(record, "tests", name, "digest", value="e")
    now["launches"].append([0, [4], [32], 0, True, False, "16: @0+8 0 1"])
    now["kernels"].append(["expand", "00", "-a -c"])
    now["launches"].append([1, [1], [32], 0, True, False, "16: @0+0 0*2"])
    now["tests"][name]["launches"] = [0, 1]
    text = records.difference(record, now, name)
    assert text is not None and "launch 1 of expand" in text
    assert "grid: [1] in the record, [4] now" in text
    assert "args: word 1: @0+0 -> @0+8, word 3: 0 -> 1" in text
    now["tests"][name]["launches"] = [2, 0]
    assert "options: -b in the record, -c now" in str(records.difference(record, now, name))
    now["tests"][name]["launches"] = [0]
    assert "2 launches in the record, 1 now" in str(records.difference(record, now, name))


def test_the_digest_of_a_file_follows_its_code_alone(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        path = tmp_path / "x.py"
        path.write_text(text)
        return records.file_digest(path)

    usual = digest('def f():\n    """Text."""\n    assert x < 1e-3  # close\n')
    assert usual == digest('def f():\n    """Other text."""\n\n    assert x < 1e-3\n')
    assert usual != digest('def f():\n    """Text."""\n    assert x < 1e-2  # close\n')


def test_the_sample_meets_as_much_as_it_can_in_its_time(record: dict[str, Any]) -> None:
    name = "tests/gpu/test_products.py::a"
    many = _spoil(record, "stand_in", value={})
    many["tests"]["same"] = dict(many["tests"][name])
    assert records.chosen(many, {name: 1.0, "same": 0.1}, 10) == ["same"]
    assert records.chosen(_spoil(many, "stand_in", value={"same": "why"}), {name: 1.0, "same": 0.1}, 10) == [name]
    assert records.chosen(many, {name: 1.0, "same": 0.1}, 0) == []


# ------------------------------------------------------------------------------------------- the stand-in
@pytest.mark.long
def test_the_same_tests_leave_the_same_log_in_any_order(tmp_path: Path) -> None:
    names = [
        "tests/gpu/test_memory.py::test_two_captures_on_one_stream_run_in_any_order[64-float16-40]",
        "tests/gpu/test_memory.py::test_two_captures_on_one_stream_run_in_any_order[3-float64-1]",
        "tests/gpu/test_decode.py::test_each_sequence_is_seen_to_its_own_length[float16-16]",
        "tests/gpu/test_memory.py::test_blocks_may_begin_at_any_address[16-float32-64]",
    ]
    found = []
    for number, order in enumerate((names, names[::-1])):
        report, table, said = run_tests("-n", "0", *order, report=tmp_path / f"{number}.json", stand_in=True)
        assert [test["outcome"] for test in report["tests"]] == ["passed"] * len(names), said[-2000:]
        assert report["card"] == "stand-in" and report["collected"] == len(names)
        tests = {test["name"]: test["launches"] for test in report["tests"]}
        assert all(test["names"] and test["digest"] for test in tests.values())
        found.append((tests, table))
    assert found[0] == found[1]
    assert {"gemm_sm90", "spmv_small", "decode"} <= {x["entry"] for x in found[0][1].values()}
