"""The attention kernels on the card: the same bits each time, with delays, on several streams, in graphs."""

from __future__ import annotations

import numpy as np
import pytest

from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention

from .attention_cases import (  # noqa: F401  (fixtures)
    F16,
    F32,
    SIMT,
    SM90,
    both_shapes,
    by_rule,
    operands,
    plans,
    random_mask,
    seen_in_part,
    served_by,
    shape,
)
from .repeats import bystanders, captured, delay, differing, intact, new_stream, on_streams

pytestmark = pytest.mark.gpu


@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("how", ["full", "causal", "mask", "sequences"])
def test_results_repeat_bit_by_bit(how, D, rng) -> None:
    some = operands(rng, 1000, 1000, D, B=2, heads=(8, 4))
    (q, k, v), options = seen_in_part(how, rng, some, [100, 100, 515, 1000])
    options["causal"] = how == "causal"
    first = attention(q, k, v, **options)
    assert served_by(SM90)
    assert differing(lambda: attention(q, k, v, **options), first, 1000 if how != "sequences" else 200) == 0


@both_shapes
@pytest.mark.parametrize("D", [64, 128])
def test_results_repeat_bit_by_bit_beside_rows_that_are_done_again(D, rng) -> None:
    q, k, v = operands(rng, 1000, 1000, D, B=2, heads=(8, 8))
    v[:, ::3, 500] = np.inf  # some tiles of some heads, by chance before this tile or that
    k[:, 1::3, 700] = np.nan
    first = attention(q, k, v, causal=True)
    assert differing(lambda: attention(q, k, v, causal=True), first, 300) == 0


def test_plain_results_repeat_bit_by_bit(rng) -> None:
    q, k, v = operands(rng, 200, 200, 33, dtype=F32)
    first = attention(q, k, v, causal=True)
    assert differing(lambda: attention(q, k, v, causal=True), first, 100) == 0


@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("how", ["full", "causal", "climbing", "mask", "nan", "sequences"])
def test_pipeline_survives_delays(how, D, rng, monkeypatch) -> None:
    import cupy

    from bsrgemm._attention import heuristics as attention_heuristics
    from bsrgemm._attention import launch as attention_launch

    q, k, v = operands(rng, 700, 700, D, B=2, heads=(40, 8))
    if how == "climbing":
        k *= cupy.linspace(0, 20, 700).astype(F16)[:, None]
    if how == "nan":
        v[:, ::3, 333] = np.nan
    (q, k, v), options = seen_in_part(how, rng, [q, k, v], [100, 100, 515, 700])
    options["causal"] = how in ("causal", "nan")
    calm = attention(q, k, v, **options)
    delay(attention_heuristics.AttentionSm90, monkeypatch)
    monkeypatch.setattr(attention_launch, "_plans", {})
    assert differing(lambda: attention(q, k, v, **options), calm, 10) == 0


@by_rule
def test_several_streams_share_a_mask(rng) -> None:
    q, k, v = operands(rng, 1000, 1000, heads=(8, 8))
    mask = random_mask(rng, (1, 8), (1000, 1000), (64, 64))
    alone = BlockMask(
        mask._backend, mask.shape, mask.block, mask.heads, mask.indptr, mask.indices, mask.kinds, mask.bits
    )
    want = [attention(q, k, v, causal=True), attention(q, k, v, mask=alone)]
    results = on_streams(lambda: (attention(q, k, v, causal=True), attention(q, k, v, mask=mask)), 40)
    assert all(bool((x == y).all()) for pair in results for x, y in zip(pair, want, strict=True))


@by_rule
@pytest.mark.parametrize("how", ["causal", "mask", "sequences", "plain cores"])
def test_a_call_can_be_captured_in_a_graph_and_runs_on_the_current_stream(how, rng) -> None:
    import cupy

    some = operands(rng, 500, 500, heads=(4, 2), dtype=F32 if how == "plain cores" else F16)
    (q, k, v), options = seen_in_part(how, rng, some, [100, 100, 500], np.int32)
    options["causal"] = True
    want = attention(q, k, v, **options)
    out = cupy.empty_like(want)
    stream = new_stream()
    with stream:
        attention(q, k, v, out=out, **options)
        graph = captured(stream, lambda: attention(q, k, v, out=out, **options))
        others = bystanders(n for n in (64, 600, 1100, 5000) for _ in range(40))
        for _ in range(3):
            out.fill(np.nan)
            graph.launch()
        stream.synchronize()
        assert bool((out == want).all())
        assert intact(others)
