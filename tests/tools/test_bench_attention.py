"""The parts of bench/attention.py and bench/llama.py that need no GPU: what is counted, checked and compared."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._benchmark import attention_peers


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    monkeypatch.setattr(importlib.import_module("harness"), "has_gpu", lambda: False)
    return importlib.import_module("attention_cases")


CASES = [{}, {"causal": True}, {"window": 20}, {"blocks": (16, 2, True)}, {"blocks": (32, 1, False)}]


@pytest.mark.parametrize("options", CASES)
def test_pairs_and_sampled_rows_are_those_of_the_dense_mask(bench: Any, options: dict[str, Any]) -> None:
    case = bench.Case((2, 4, 96, 64), **options)
    mask = case.mask()
    place = np.arange(96)
    dense = np.ones((96, 96), bool)
    if case.causal or case.window:
        dense &= place <= place[:, None]
    if case.window:
        dense &= place[:, None] - place < case.window
    every = np.broadcast_to(dense if mask is None else mask.to_dense(), (2, 4, 96, 96))
    assert case.pairs(mask) == every.sum()
    np.testing.assert_array_equal(case.seen(mask).rows(96, 1, 2, place), every[1, 2])


@pytest.mark.parametrize("options", CASES)
def test_a_wrong_result_is_seen_in_any_of_the_checked_tiles(bench: Any, options: dict[str, Any]) -> None:
    case = bench.Case((2, 4, 256, 64), **options)
    q, k, v = bench.case_operands(case)
    mask = case.mask()
    reference = case.reference(q, k, v, mask)
    out = bg.attention(q, k, v, mask=mask, **case.options)
    assert reference.error(out) <= bench.TOLERANCE["float16"]
    for place in (0, 128, 255):
        wrong = out.copy()
        wrong[1, 3, place, 5] += 0.1
        assert not reference.error(wrong) <= bench.TOLERANCE["float16"]
    out[0, 0, 0, 0] = np.nan
    assert not reference.error(out) <= bench.TOLERANCE["float16"]


def test_peers_in_numpy_agree(bench: Any) -> None:
    for options in CASES:
        case = bench.Case((1, 4, 128, 64), **options)
        q, k, v = bench.case_operands(case)
        mask = case.mask()
        got = attention_peers.plain(q, k, v, mask=mask, **case.options)()
        assert case.reference(q, k, v, mask).error(got) <= bench.TOLERANCE["float16"]


def test_targets_are_judged_against_what_was_measured(bench: Any) -> None:
    others = {"cuDNN": 600.0, "FA4": None, "cF": 900.0}
    assert bench.Target(1.1, "cuDNN").reached(700, others)
    assert bench.Target(1.1, "best").reached(700, others)
    assert not bench.Target(1.0, "cF").reached(700, others)
    assert bench.Target(1.0, "FA4").reached(700, others) is None
    assert bench.Target(560, "TFLOP/s").reached(561, {})


def test_a_fit_finds_its_line(bench: Any) -> None:
    studies = importlib.import_module("attention_studies")
    assert np.allclose(studies.line_fit([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]), (2, 1))


@pytest.mark.parametrize("section", ["table", "small", "decode", "long", "density", "accuracy", "host"])
def test_every_section_runs_and_has_a_table(
    bench: Any, section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, rows = importlib.import_module("attention"), importlib.import_module("table_rows")
    assert section in script.SECTIONS

    def seconds(call: Callable[[], Any], *_: Any) -> float:
        assert call() is not None
        return 1e-3

    monkeypatch.setattr(importlib.import_module("attention_bench"), "time_cpu", seconds)
    script.main([section, "--quick", "--json", str(tmp_path / "measured.json")])
    assert "WRONG" not in capsys.readouterr().out
    found = json.loads((tmp_path / "measured.json").read_text())[section]
    assert found and not [row for row in found if row.get("failed") or row.get("wrong")]
    render = {"table": rows.attention}.get(section) or getattr(rows, section)
    assert render(found).count("\n") > len(found) / 2


def test_what_is_not_installed_is_said_once(bench: Any) -> None:
    report = importlib.import_module("report")
    run, said = report.Bench(), []

    class Lines:
        note = said.append

    def absent() -> None:
        raise ModuleNotFoundError("No module named 'x'")

    for _ in range(2):
        assert run.attempt("X", "here", absent) is None
        assert run.attempt("Y", "there", lambda: 1 / 0) is None
        run.explain(Lines)
    assert [line.split(":")[0].strip(" -") for line in said] == ["X", "Y", "Y"]


def test_the_tiny_llama_has_the_logits_of_plain_attention(bench: Any) -> None:
    llama = importlib.import_module("llama")
    worst, mean, same = llama.compared(llama.Model(llama.TINY, np))
    assert worst <= llama.TOLERANCE["float32"] and mean <= worst and same
