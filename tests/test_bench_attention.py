"""The parts of bench/attention.py and bench/llama.py that need no GPU: what is counted, checked and compared."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "bench"), *sys.path])
    module = importlib.import_module("attention")
    monkeypatch.setattr(module, "on_gpu", lambda: False)
    return module


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
    np.testing.assert_array_equal(bench.seen_by(case, mask, 1, 2, place), every[1, 2])


@pytest.mark.parametrize("options", CASES)
def test_a_wrong_result_is_seen_in_any_of_the_checked_tiles(bench: Any, options: dict[str, Any]) -> None:
    case = bench.Case((2, 4, 256, 64), **options)
    q, k, v = bench.case_operands(case)
    mask = case.mask()
    reference = bench.Reference.of(case, q, k, v, mask)
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
        got = bench.peers.plain(q, k, v, mask=mask, **case.options)()
        assert bench.Reference.of(case, q, k, v, mask).error(got) <= bench.TOLERANCE["float16"]


def test_targets_are_judged_against_what_was_measured(bench: Any) -> None:
    others = {"cuDNN": 600.0, "FA4": None, "cF": 900.0}
    assert bench.Target(1.1, "cuDNN").reached(700, others)
    assert bench.Target(1.1, "best").reached(700, others)
    assert not bench.Target(1.0, "cF").reached(700, others)
    assert bench.Target(1.0, "FA4").reached(700, others) is None
    assert bench.Target(560, "TFLOP/s").reached(561, {})


def test_a_fit_finds_its_line(bench: Any) -> None:
    assert np.allclose(bench.line_fit([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]), (2, 1))


def test_the_tiny_llama_has_the_logits_of_plain_attention(bench: Any) -> None:
    llama = importlib.import_module("llama")
    worst, mean, same = llama.compared(llama.Model(llama.TINY, np))
    assert worst <= llama.TOLERANCE["float32"] and mean <= worst and same
