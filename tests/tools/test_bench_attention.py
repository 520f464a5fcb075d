"""The parts of bench/run/attention.py and llama.py that need no GPU: what is counted, checked and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._benchmark import machine, runner, timing
from bsrgemm._benchmark.cases import llama as model
from bsrgemm._benchmark.checks.attention import TOLERANCE, Reference
from bsrgemm._benchmark.measure import attention as script
from bsrgemm._benchmark.measure import attention_studies as studies
from bsrgemm._benchmark.measure import llama
from bsrgemm._benchmark.measure.attention_cases import Target, attention, operands_of
from bsrgemm._benchmark.peers import attention as attention_peers
from bsrgemm._benchmark.show import attention_rows as table_rows

ON_CPU = runner.Bench(device="cpu")


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)


CASES = [{}, {"causal": True}, {"window": 20}, {"blocks": (16, 2), "per_head": True}, {"blocks": (32, 1)}]


@pytest.mark.parametrize("options", CASES)
def test_pairs_and_sampled_rows_are_those_of_the_dense_mask(options: dict[str, Any]) -> None:
    problem = attention((2, 4, 96, 64), **options)
    mask = problem.mask("cpu")
    place = np.arange(96)
    dense = np.ones((96, 96), bool)
    if problem.causal or problem.window:
        dense &= place <= place[:, None]
    if problem.window:
        dense &= place[:, None] - place < problem.window
    every = np.broadcast_to(dense if mask is None else mask.to_dense(), (2, 4, 96, 96))
    assert problem.pairs * 2 * 4 == every.sum() and problem.flops == 4 * 64 * every.sum()
    np.testing.assert_array_equal(problem.seen(mask).rows(96, 1, 2, place), every[1, 2])


@pytest.mark.parametrize("options", CASES)
def test_a_wrong_result_is_seen_in_any_of_the_checked_tiles(options: dict[str, Any]) -> None:
    problem = attention((2, 4, 256, 64), **options)
    q, k, v = operands_of(ON_CPU, problem)
    mask = problem.mask("cpu")
    reference = Reference.of(problem.seen(mask), q, k, v)
    out = bg.attention(q, k, v, mask=mask, **problem.options)
    assert reference.error(out) <= TOLERANCE["float16"]
    for place in (0, 128, 255):
        wrong = out.copy()
        wrong[1, 3, place, 5] += 0.1
        assert not reference.error(wrong) <= TOLERANCE["float16"]
    out[0, 0, 0, 0] = np.nan
    assert not reference.error(out) <= TOLERANCE["float16"]


@pytest.mark.parametrize("options", CASES)
def test_peers_in_numpy_agree(options: dict[str, Any]) -> None:
    problem = attention((1, 4, 128, 64), **options)
    q, k, v = operands_of(ON_CPU, problem)
    mask = problem.mask("cpu")
    got = attention_peers.plain(q, k, v, mask=mask, **problem.options)()
    assert Reference.of(problem.seen(mask), q, k, v).error(got) <= TOLERANCE["float16"]


def test_targets_are_judged_against_what_was_measured() -> None:
    others = {"cuDNN": 600.0, "FA4": None, "cF": 900.0}
    assert Target(1.1, "cuDNN").reached(700, others)
    assert Target(1.1, "best").reached(700, others)
    assert not Target(1.0, "cF").reached(700, others)
    assert Target(1.0, "FA4").reached(700, others) is None
    assert Target(560, "TFLOP/s").reached(561, {})


def test_a_fit_finds_its_line() -> None:
    assert np.allclose(studies.line_fit([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]), (2, 1))


@pytest.mark.parametrize("section", script.SECTIONS)
def test_every_section_runs_and_has_a_table(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def samples(clock: timing.Clock, call: timing.Call) -> list[float]:
        assert call() is not None
        return [1e-3]

    monkeypatch.setattr(timing.Clock, "samples", samples)
    monkeypatch.setattr(timing, "ROUNDS", {"cpu": (1, 1)})
    script.main([section, "--quick", "--json", str(tmp_path / "measured.json")])
    assert "WRONG" not in capsys.readouterr().out
    found = json.loads((tmp_path / "measured.json").read_text())[section]
    assert found and not [row for row in found if row.get("failed") or row.get("wrong")]
    render = {"table": table_rows.attention}.get(section) or getattr(table_rows, section)
    assert render(found).count("\n") > len(found) / 2


def test_what_is_not_installed_is_said_once() -> None:
    run, said = runner.Bench(), []

    class Lines:
        note = said.append

    def absent() -> None:
        raise ModuleNotFoundError("No module named 'x'")

    for _ in range(2):
        assert run.attempt("X", "here", absent) is None
        assert run.attempt("Y", "there", lambda: 1 / 0) is None
        run.explain(Lines)
    assert [line.split(":")[0].strip(" -") for line in said] == ["X", "Y", "Y"]


def test_the_tiny_llama_has_the_logits_of_plain_attention() -> None:
    worst, mean, same = llama.compared(model.Model(model.TINY, np))
    assert worst <= model.TOLERANCE["float32"] and mean <= worst and same
