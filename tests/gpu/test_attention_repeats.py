"""The attention kernels on the card: the same bits each time, with delays, on several streams, in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    kernel,
    operands,
    plans,
    random_mask,
    served_by,
    shape,
)

pytestmark = pytest.mark.gpu


def differing(call: Callable[[], Any], first: Any, times: int) -> int:
    """In how many elements the results of so many calls differ from the first one, bit by bit."""
    import cupy

    count = cupy.zeros((), np.int64)
    for _ in range(times):
        count += (call().view(np.uint16) != first.view(np.uint16)).sum()
    return int(count)


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("how", ["full", "causal", "mask", "sequences"])
def test_results_repeat_bit_by_bit(how, D, rng) -> None:
    import cupy

    q, k, v = operands(rng, 1000, 1000, D, B=2, heads=(8, 4))
    options: dict[str, Any] = {"causal": how == "causal"}
    if how == "mask":
        options["mask"] = random_mask(rng, (1, 8), (1000, 1000), (64, 64))
    if how == "sequences":
        q, k, v = (cupy.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {name: cupy.asarray([0, 100, 100, 515, 1000]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    first = attention(q, k, v, **options)
    assert served_by(SM90)
    assert differing(lambda: attention(q, k, v, **options), first, 1000 if how != "sequences" else 200) == 0


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
def test_results_repeat_bit_by_bit_beside_rows_that_are_done_again(D, rng) -> None:
    q, k, v = operands(rng, 1000, 1000, D, B=2, heads=(8, 8))
    v[:, ::3, 500] = np.inf  # some tiles of some heads, by chance before this tile or that
    k[:, 1::3, 700] = np.nan
    first = attention(q, k, v, causal=True)
    assert differing(lambda: attention(q, k, v, causal=True), first, 300) == 0


@kernel(SIMT)
def test_plain_results_repeat_bit_by_bit(rng) -> None:
    q, k, v = operands(rng, 200, 200, 33, dtype=F32)
    first = attention(q, k, v, causal=True)
    assert differing(lambda: attention(q, k, v, causal=True), first, 100) == 0


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("how", ["full", "causal", "climbing", "mask", "nan", "sequences"])
def test_pipeline_survives_delays(how, D, rng, monkeypatch) -> None:
    import cupy

    from bsrgemm._attention import heuristics as attention_heuristics
    from bsrgemm._attention import launch as attention_launch
    from bsrgemm._kernels import jit

    q, k, v = operands(rng, 700, 700, D, B=2, heads=(40, 8))
    options: dict[str, Any] = {"causal": how in ("causal", "nan")}
    if how == "climbing":
        k *= cupy.linspace(0, 20, 700).astype(F16)[:, None]
    if how == "mask":
        options["mask"] = random_mask(rng, (1, 40), (700, 700), (64, 64))
    if how == "nan":
        v[:, ::3, 333] = np.nan
    if how == "sequences":
        q, k, v = (cupy.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {name: cupy.asarray([0, 100, 100, 515, 700]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    calm = attention(q, k, v, **options)
    plain = attention_heuristics.AttentionSm90.spec

    def stressed(config: Any) -> Any:
        spec = plain(config)
        return jit.KernelSpec(spec.source, spec.entry, (*spec.defines, ("STRESS", 1)))

    monkeypatch.setattr(attention_heuristics.AttentionSm90, "spec", stressed)
    monkeypatch.setattr(attention_launch, "_plans", {})
    assert differing(lambda: attention(q, k, v, **options), calm, 10) == 0


@kernel(SM90)
@by_rule
def test_several_streams_share_a_mask(rng) -> None:
    import cupy

    q, k, v = operands(rng, 1000, 1000, heads=(8, 8))
    mask = random_mask(rng, (1, 8), (1000, 1000), (64, 64))
    alone = BlockMask(
        mask._backend, mask.shape, mask.block, mask.heads, mask.indptr, mask.indices, mask.kinds, mask.bits
    )
    want = [attention(q, k, v, causal=True), attention(q, k, v, mask=alone)]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    results: list[Any] = []
    for _ in range(40):
        for stream in streams:
            with stream:
                results.append((attention(q, k, v, causal=True), attention(q, k, v, mask=mask)))
    cupy.cuda.Device().synchronize()
    assert all(bool((x == y).all()) for pair in results for x, y in zip(pair, want, strict=True))


@kernel(SM90, SIMT)
@by_rule
@pytest.mark.parametrize("how", ["causal", "mask", "sequences", "plain cores"])
def test_a_call_can_be_captured_in_a_graph_and_runs_on_the_current_stream(how, rng) -> None:
    import cupy

    q, k, v = operands(rng, 500, 500, heads=(4, 2), dtype=F32 if how == "plain cores" else F16)
    options: dict[str, Any] = {"causal": True}
    if how == "mask":
        options["mask"] = random_mask(rng, (1, 4), (500, 500), (64, 64))
    if how == "sequences":
        q, k, v = (cupy.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {name: cupy.asarray([0, 100, 100, 500], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    want = attention(q, k, v, **options)
    out = cupy.empty_like(want)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attention(q, k, v, out=out, **options)
        stream.synchronize()
        stream.begin_capture()
        attention(q, k, v, out=out, **options)
        graph = stream.end_capture()
        # What the call took and gave back during the capture now belongs to others, and the graph must not write there.
        others = [cupy.full(n, 7, np.int8) for n in (64, 600, 1100, 5000) for _ in range(40)]
        for _ in range(3):
            out.fill(np.nan)
            graph.launch()
        stream.synchronize()
        assert bool((out == want).all())
        assert all(bool((x == 7).all()) for x in others)
