"""What attention_sm90 promises where maxima climb, and of a call that is made again on a card."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import attention_sm90, choose
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device
from ..gpu.repeats import delay, differing, on_streams
from .attentions import (
    BF16,
    CLIMBS,
    E4M3,
    F16,
    F32,
    SEQUENCES,
    Case,
    attend,
    check,
    check_one_weight_is_one,
    climbing,
    eps,
    exact,
    forbidden,
    mixed,
    operands,
    run,
    seen_keys,
    steps,
)

KERNEL = "AttentionSm90"
CAUSAL = {"causal": True}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    device.needs("sm_90a")


@pytest.mark.emulated
def test_ordinary_queries_are_not_computed_twice(device: Device, rng: np.random.Generator) -> None:
    """A wrong sum that is not finite, or 0, would be mended by the care that is taken of infinity and NaN."""
    with forbidden(device, "repair(x, rows, lower);"):
        for case in (
            Case((70, 150), options=CAUSAL),
            Case((64, 200), options={"softcap": 3.0}, dtype=BF16),
            Case((64, 200), options=CAUSAL, dtype=E4M3, heads=(1, 1)),
        ):
            check(device, KERNEL, case, operands(rng, case))
        case = Case((64, 400))
        q, k, v = operands(rng, case)
        for some in climbing(q, k):
            check(device, KERNEL, case, [some, k, v])
        for key in (38, 97, 120, 383):  # one key that outweighs all others, at an even place or at an odd one
            q[...], k[...] = 1, 0
            k[:, :, key] = 3.5
            check(device, KERNEL, case, [q, k, v])


def test_maxima_that_climb_are_repaired(device: Device, rng: np.random.Generator) -> None:
    case = Case((64, 400))
    q, k, v = operands(rng, case)
    k[...] = steps(q, 400, np.linspace(24, 0, 400))  # the walk begins with the last keys
    q[...] = q[:, :1, :1]
    check(device, KERNEL, case, [q, k, v])


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_maxima_that_rise_within_bounds_only_scale_weights(
    dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    """Scores that rise by 20 to 60 make weights of up to 2^87: large, but finite. Rows rise together or alone."""
    case = Case((64, 400), dtype=dtype)
    q, k, v = operands(rng, case)
    k[...] = steps(q, 400, [110, 60, 85, 25, 0])
    with forbidden(device, "repeat_scores(left);", "repair(x, rows, lower);"):
        for rows in (slice(None), slice(3, None, 16), slice(12, None, 16)):
            some = (q.astype(F32) * 0.01).astype(q.dtype)
            some[:, :, rows] = q[:, :, rows]
            check(device, KERNEL, case, [some, k, v])


@pytest.mark.emulated
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=str)
def test_infinite_weights_are_computed_again(heads: Any, device: Device, rng: np.random.Generator) -> None:
    """One warpgroup reads the keys from memory, since their slot may have others, three read them from their slot.

    Other batches, heads and sequences have other keys.
    """
    plain = Case((70, 333), heads=heads, batch=2)
    q, k, v = operands(rng, plain)
    k[...] = steps(q[:1, :1], 333, [400, 0, 150, -60, -200])
    k[1] *= np.linspace(0.6, 1, 333)[:, None].astype(q.dtype)
    q[...] = q[:1, :1, :1]
    q[:, :, ::3] *= F16.type(-0.5)
    with forbidden(device, "repair(x, rows, lower);"):
        for options in ({}, CAUSAL, {"window": (90, 0)}, {"softcap": 300.0}):
            check(device, KERNEL, replace(plain, options=options), [q, k, v])
        mask = bg.BlockMask.from_dense(rng.random((70, 333)) < 0.5, block=64).to_device("cuda")
        check(device, KERNEL, plain, [q, k, v], mask=mask)
        flat = [x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3]) for x in (q, k, v)]
        with patch.dict(SEQUENCES, {"of these": ([60, 0, 80], [300, 10, 356])}):
            check(device, KERNEL, replace(plain, lengths="of these", batch=1, options=CAUSAL), flat)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("factor", "calls"),
    [(16, ["repair(x, rows, lower);"]), (1, ["repair(x, rows, lower);", "repeat_scores(left);"])],
    ids=["infinite", "finite"],
)
def test_maxima_of_fp8_rise_by_scaling_or_from_the_keys_in_memory(
    factor: float, calls: list[str], device: Device, rng: np.random.Generator
) -> None:
    case = Case((70, 300), dtype=E4M3, heads=(1, 1), options={"scale": factor / 16})
    q, k, v = operands(rng, replace(case, dtype=F16))
    k[...] = steps(q, 300, [30, 12, 20, 0])
    with forbidden(device, *calls):
        check(device, KERNEL, case, [x.astype(E4M3) for x in (q, k, v)], independent=False)


def test_infinite_weights_of_heads_that_are_not_whole_words(device: Device, rng: np.random.Generator) -> None:
    """Lines of keys are read by words of four bytes; heads of 71 columns of 16 bits end within one."""
    case = Case((20, 200), (71, 71), lie=(*("pitch 72",) * 3, "rows"))
    q, k, v = operands(rng, replace(case, dims=(72, 72)))
    k[...] = steps(q, 200, [300, 0])
    check(device, KERNEL, case, [q[..., :71], k[..., :71], v[..., :71]])


@pytest.mark.emulated
def test_queries_that_see_nothing_of_their_first_tile_are_not_computed_again(
    device: Device, rng: np.random.Generator
) -> None:
    with forbidden(device, "repeat_scores(left);", "repair(x, rows, lower);"):
        for case in (Case((64, 184), options=CAUSAL), Case((130, 300), options={"window": (100, 0)})):
            check(device, KERNEL, case, operands(rng, case))  # the upper rows of each warp begin with the second tile


def test_scores_beyond_what_weights_can_say(device: Device, rng: np.random.Generator) -> None:
    case = Case((40, 200))
    q, k, v = operands(rng, case)
    q, k = 100 * q, 100 * k
    out, _ = run(device, KERNEL, case, [q, k, v])
    want = exact(q, k, v, seen_keys(40, 200)).out
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-2 * np.abs(v).max())


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_weight_that_outweighs_all_others_is_one_however_large_its_score(
    dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    check_one_weight_is_one(device, KERNEL, dtype, rng, halves=True, out=F32)


@pytest.mark.parametrize("climbs", [0, 1, -1])
def test_sums_of_fp8_that_are_kept_apart_every_1024_keys(climbs: int, device: Device, rng: np.random.Generator) -> None:
    """Those of more than 2048 keys, also where keys that are met later weigh more and what was kept fades."""
    case = Case((64, 2500), dtype=E4M3, heads=(1, 1))
    q, k, v = operands(rng, replace(case, dtype=F16))
    if climbs:
        q = np.broadcast_to(np.sign(q[:, :, :1]), q.shape)
        k = np.sign(q[:, :, :1]) * np.linspace(0.1, 2, 2500)[::climbs, None]
    v = v + np.linspace(0, 2, 2500)[None, None, :, None]  # so that early keys and late ones give different results
    narrow = [np.ascontiguousarray(x).astype(E4M3) for x in (q, k, v)]
    check(device, KERNEL, case, narrow, independent=False, varied=False)


def rounded_weights_error(q: Any, k: Any, v: Any, seen: Any, scale: float, want: Any) -> float:
    """The largest error of a softmax in float32 whose weights are rounded to the dtype before they meet the values."""
    some = [x.astype(F32) for x in (q, *(np.repeat(x.astype(F32), q.shape[1] // k.shape[1], axis=1) for x in (k, v)))]
    scores = np.where(seen, (some[0] @ some[1].swapaxes(2, 3)) * F32.type(scale), -np.inf)
    weights = np.where(seen, np.exp(scores - scores.max(axis=3, keepdims=True)), F32.type(0))
    out = weights.astype(q.dtype).astype(F32) @ some[2] / weights.sum(axis=3, keepdims=True)
    return float(np.abs(out.astype(q.dtype).astype(float) - want).max())


@pytest.mark.large
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("dtype", "D"), [(F16, 64), (F16, 128), (F16, 256), (BF16, 128)], ids=str)
@pytest.mark.parametrize("climb", CLIMBS)
def test_maxima_that_climb_are_as_exact_as_any(
    climb: str, D: int, dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    case = Case((300, 1500), (D, D), dtype=dtype, heads=(2, 2))
    q, k, v = operands(rng, case)
    k[...] = k * (1 / np.sqrt(D))
    q[..., 0], k[..., 0] = 1, CLIMBS[climb](rng).astype(dtype)
    for rows in ("alike", "different"):
        if rows == "different":  # every third query goes down where the others go up, and some do nothing
            q[:, :, ::3, 0] = -1
            q[:, :, ::7, 0] = 0
        for band, scale in itertools.product(({}, CAUSAL, {"window": (400, 0)}), (0.5, 1.0)):
            out, _ = run(device, KERNEL, replace(case, options={**band, "scale": scale}), [q, k, v])
            seen = seen_keys(300, 1500, **band)
            want = exact(q, k, v, seen, scale).out
            simple = rounded_weights_error(q, k, v, seen, scale, want)
            assert np.abs(out - want).max() <= 2.05 * eps(dtype) + 1.5 * simple, (band, scale)


@pytest.mark.large
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("D", [64, 128, 256])
def test_large_inputs_and_constant_rows(D: int, device: Device, rng: np.random.Generator) -> None:
    case = Case((600, 1000), (D, D), heads=(2, 2))
    q, k, v = operands(rng, case)
    seen = seen_keys(600, 1000)
    for x, y in ((16 * q, k), (q, 16 * k), (np.full_like(q, 3), np.full_like(k, 1))):
        out, _ = run(device, KERNEL, case, [x, y, v])
        want = exact(x, y, v, seen).out
        assert np.abs(out - want).max() <= 2e-3 + 1.5 * rounded_weights_error(x, y, v, seen, D**-0.5, want)


@pytest.mark.large
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("climb", CLIMBS)
def test_maxima_of_fp8_that_climb(climb: str, D: int, device: Device, rng: np.random.Generator) -> None:
    """One column of keys alone is not 0: scores are exact, and what is left is how weights follow the maximum."""
    case = Case((300, 1500), (D, D), dtype=E4M3, heads=(2, 2))
    q, k, v = (x.astype(F32) for x in operands(rng, case))
    climbs = CLIMBS[climb](rng)
    k[...] = 0
    k[..., 0] = climbs * min(1, 448 / max(1, np.abs(climbs).max()))
    q[..., 0] = 1
    for rows in ("alike", "different"):
        if rows == "different":
            q[:, :, ::3, 0], q[:, :, ::7, 0] = -1, 0
        for band, scale in itertools.product(({}, CAUSAL, {"window": (400, 0)}), (0.05, 0.5, 2.0)):
            one = replace(case, options={**band, "scale": scale})
            check(device, KERNEL, one, [x.astype(E4M3) for x in (q, k, v)], varied=False)


def test_values_that_fill_float16_do_not_overflow_on_the_way(device: Device, rng: np.random.Generator) -> None:
    case = Case((70, 1000), heads=(1, 1))
    q, k, v = (np.zeros_like(x) for x in operands(rng, case))
    assert (attend(device, KERNEL, case, [q, k, v + F16.type(65504)])[0] == 65504).all()


# ------------------------------------------------------------------------------------------------- on a card alone
def call_of(device: Device, how: str, case: Case, rng: np.random.Generator) -> Any:
    """A call that can be made again, in which there is what `how` says."""
    some = operands(rng, case)
    q, k, v = some
    options: dict[str, Any] = {"causal": how in ("causal", "nan")}
    if how == "climbing":
        k[...] = (k.astype(F32) * np.linspace(0, 20, k.shape[2])[:, None]).astype(k.dtype)
    if how == "nan":  # rows that are done again, by chance before this tile or that
        v[:, ::3, 333], k[:, 1::3, 500] = np.nan, np.nan
    if how == "mask":
        options["mask"] = mixed((1, k.shape[1]), (q.shape[2], k.shape[2]), 64)
    if case.dtype == E4M3:
        scales = rng.uniform(0.3, 3, (case.batch, case.heads[0])).astype(F32)
        options |= {"q_scale": device.asarray(scales), "out_dtype": F16}
    put = [device.asarray(x.view(np.uint8) if x.dtype == E4M3 else x) for x in some]
    if how == "sequences":
        put = [device.cupy.ascontiguousarray(x[0].swapaxes(0, 1)) for x in put]
        ends = np.array([0, 100, 100, 515, q.shape[2]])
        options |= {"cu_seqlens_q": device.asarray(ends), "cu_seqlens_k": device.asarray(ends)}

    def call() -> Any:
        with force_kernel(KERNEL):
            return bg.attention(*put, **options)

    return call


HOW = ("full", "causal", "climbing", "mask", "nan", "sequences")


def calls_that_repeat() -> Any:
    dtypes = [(how, D, F16) for how in HOW for D in (64, 128, 256)]
    dtypes += [(how, D, E4M3) for how in HOW if how != "sequences" for D in (64, 128, 256)]
    return pytest.mark.parametrize(("how", "D", "dtype"), dtypes, ids=str)


@pytest.mark.large
@pytest.mark.usefixtures("tiles")
@calls_that_repeat()
def test_results_repeat_bit_by_bit(how: str, D: int, dtype: Any, device: Device, rng: np.random.Generator) -> None:
    heads, batch = ((8, 4), 2) if how != "sequences" else ((8, 4), 1)
    call = call_of(device, how, Case((1000, 1000), (D, D), dtype=dtype, heads=heads, batch=batch), rng)
    assert differing(call, call(), 1000 if dtype == F16 and how != "sequences" else 200) == 0


@pytest.mark.large
@pytest.mark.usefixtures("tiles")
@calls_that_repeat()
def test_the_pipeline_survives_delays(
    how: str, D: int, dtype: Any, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = 1 if how == "sequences" else 2
    call = call_of(device, how, Case((700, 700), (D, D), dtype=dtype, heads=(40, 8), batch=batch), rng)
    calm = call()
    delay(attention_sm90.AttentionSm90, monkeypatch)
    monkeypatch.setattr(choose, "calls_of", lambda mask: choose.Calls())  # nothing is remembered
    assert differing(call, calm, 10) == 0


@pytest.mark.large
@pytest.mark.parametrize(("how", "dtype"), [("causal", F16), ("mask", F16), ("causal", E4M3)], ids=str)
def test_several_streams_share_a_mask(how: str, dtype: Any, device: Device, rng: np.random.Generator) -> None:
    """The lists of the mask are made by the first of them."""
    case = Case((1000, 1000), (128, 128), dtype=dtype, heads=(8, 8))
    want = call_of(device, how, case, np.random.default_rng(5))()
    call = call_of(device, how, case, np.random.default_rng(5))
    assert all(bool((x == want).all()) for x in on_streams(call, 40))
