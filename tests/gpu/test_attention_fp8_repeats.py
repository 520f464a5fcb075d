"""Attention of fp8 on the card: the same bits each time, with delays, on several streams, in graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bsrgemm._attention.attention import attention

from .attention_cases import (  # noqa: F401  (fixtures)
    F16,
    NAN,
    SM90,
    both_shapes,
    by_rule,
    plans,
    seen_in_part,
    shape,
)
from .attention_fp8_cases import fp8, normal, operands, scale_array, served_by
from .repeats import bystanders, captured, delay, differing, intact, new_stream, on_streams

pytestmark = pytest.mark.gpu


@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("how", ["full", "causal", "mask", "nan"])
@pytest.mark.parametrize("out_dtype", [F16], ids=str)
def test_fp8_results_repeat_bit_by_bit(out_dtype, how, D, rng) -> None:
    q, k, v = operands(rng, 1000, 1000, D, B=2, heads=(8, 4))
    options: dict[str, Any] = {"causal": how in ("causal", "nan"), "out_dtype": out_dtype}
    options |= {"q_scale": scale_array(rng, (2, 8)), "k_scale": 0.5, "v_scale": scale_array(rng, (4,))}
    options |= seen_in_part(how, rng, [q, k, v], [])[1]
    if how == "nan":  # rows that are done again, by chance before this tile or that
        v[:, ::3, 900] = NAN
        k[:, 1::3, 950] = NAN
    first = attention(q, k, v, **options)
    assert served_by(SM90)
    assert differing(lambda: attention(q, k, v, **options), first, 200) == 0


def test_fp8_the_result_is_the_same_with_and_without_lse(rng) -> None:
    q, k, v = operands(rng, 300, 400)
    out, _ = attention(q, k, v, causal=True, return_lse=True, v_scale=0.5)
    assert bool((out == attention(q, k, v, causal=True, v_scale=0.5)).all())


@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("how", ["full", "causal", "climbing", "mask", "nan"])
def test_fp8_pipeline_survives_delays(how, D, rng, monkeypatch) -> None:
    from bsrgemm._attention import heuristics as attention_heuristics
    from bsrgemm._attention import launch as attention_launch

    q, k, v = operands(rng, 700, 700, D, B=2, heads=(40, 8))
    options: dict[str, Any] = {"causal": how in ("causal", "nan"), "q_scale": scale_array(rng, (2, 40))}
    if how == "climbing":
        climbs = rng.standard_normal(k.shape, np.float32) * np.linspace(0, 20, 700, dtype=np.float32)[:, None]
        k = fp8(climbs)
    options |= seen_in_part(how, rng, [q, k, v], [])[1]
    if how == "nan":
        v[:, ::3, 333] = NAN
    calm = attention(q, k, v, **options)
    delay(attention_heuristics.AttentionSm90, monkeypatch)
    monkeypatch.setattr(attention_launch, "_plans", {})
    assert differing(lambda: attention(q, k, v, **options), calm, 10) == 0


@by_rule
def test_fp8_several_streams_at_once(rng) -> None:
    both = [operands(rng, 1000, 1000, heads=(8, 8)) for _ in range(2)]
    scales = {"q_scale": scale_array(rng, (8,)), "v_scale": 2.0}
    want = [attention(*x, causal=True, **scales) for x in both]
    results = on_streams(lambda: [attention(*x, causal=True, **scales) for x in both], 40)
    assert all(bool((x == y).all()) for pair in results for x, y in zip(pair, want, strict=True))


@by_rule
@pytest.mark.parametrize("how", ["causal", "mask", "sequences"])
def test_fp8_a_call_can_be_captured_in_a_graph_with_other_work_in_between(how, rng) -> None:
    import cupy

    some = operands(rng, 500, 500, heads=(4, 2))
    options: dict[str, Any] = {"causal": True, "q_scale": scale_array(rng, (4,)), "v_scale": scale_array(rng, (2,))}
    (q, k, v), part = seen_in_part(how, rng, some, [100, 100, 500], np.int32)
    options |= part
    want = attention(q, k, v, **options)
    out = cupy.empty_like(want)
    again = [normal(rng, x.shape) for x in (q, k, v)]
    want_again = attention(*again, **options)
    stream = new_stream()
    with stream:
        attention(q, k, v, out=out, **options)
        graph = captured(stream, lambda: attention(q, k, v, out=out, **options))
        others = bystanders(n for n in (64, 600, 1100, 5000, 128 * 512, 2 * 128 * 512) for _ in range(40))
        for _ in range(3):
            out.fill(np.nan)
            graph.launch()
            attention(*again, **options)
        stream.synchronize()
        assert bool((out == want).all())
        for x, y in zip((q, k, v), again, strict=True):  # the graph reads what is there when it runs
            x[...] = y
        graph.launch()
        stream.synchronize()
        assert bool((out == want_again).all())
        assert intact(others)
