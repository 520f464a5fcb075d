"""All that is promised of attention_sm90 and attention_values: Hopper's tensor cores, in 16 bits and fp8."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import attention_sm90, mask_tiles
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device
from .attentions import (
    BADLY,
    BANDS,
    BF16,
    E4M3,
    F16,
    F32,
    MASKS,
    NAN,
    SEQUENCES,
    Case,
    attend,
    bad_numbers,
    by_columns,
    cases,
    check,
    check_garbage_behind_the_diagonal,
    check_kinds_beyond_2_to_31,
    check_nan_reaches_those_who_see_it,
    check_rows_that_see_nothing,
    check_scores_of_minus_infinity,
    check_spoiled_bounds,
    check_spoiled_masks,
    exact,
    operands,
    run,
    seen_keys,
    wide,
)

KERNEL = "AttentionSm90"
CAUSAL = {"causal": True}
ROWS = ("rows",) * 3


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    device.needs("sm_90a")


def spread(how: str) -> tuple[str, str, str, str]:
    return how, how, how, how


def bands(lengths: Any, widths: Any, **more: Any) -> list[Case]:
    """Every band at these lengths, for heads of these columns."""
    return [Case(x, (D, D), band, **more) for x in lengths for D in widths for band in BANDS]


SCORES = [{"softcap": 20.0}, {"softcap": 0.5}, {"softcap": 5.0, "scale": -1.0}]
SCORES += [{"scale": x} for x in (-0.2, 0.0, 0.69, 0.7, 1.5, 1e-30, 2e-38)]
LENGTHS = ((300, 777), (777, 300), (1, 1000), (515, 64), (129, 128), (64, 515))


@pytest.mark.usefixtures("tiles")
@cases(
    Case((20, 30)),
    Case((70, 150), options=CAUSAL),
    Case((130, 70), options=CAUSAL),  # the first rows see nothing
    Case((64, 300), options={"window": (40, 3)}),
    Case((130, 140), (256, 256)),
    Case((70, 150), (192, 128), {"window": (-1, 20), "align": "top-left"}),
    Case((70, 150), (128, 128), {"softcap": 3.0, "scale": -0.2}),
    Case((70, 150), (96, 80), {"scale": -0.2, "causal": True}, BF16),
    Case((70, 90), options=CAUSAL, dtype=BF16, heads=(4, 2)),
    Case((70, 90), dtype=BF16, out=F32, heads=(4, 2)),
    Case((70, 90), (72, 40), out=BF16, heads=(4, 2), layout="bshd"),
    Case((150, 200), mask="random", block=32),
    Case((150, 200), mask="elements", options=CAUSAL),
    Case((100, 130), mask="random heads", block=32, heads=(4, 2), batch=2),  # two heads share a pattern
    Case((200, 300), (128, 128), CAUSAL, mask="random", block=64),
    Case((100, 130), (128, 128), mask="mixed", block=(128, 128)),
    Case((200, 400), (128, 128), mask="mixed", block=192),
    Case((130, 100), mask="none", block=32),
    Case((500, 70), options=CAUSAL, lse=False),  # tiles that see nothing, without logarithms
    Case((40, 70), options=CAUSAL, heads=(4, 2), batch=2, lse=False, lie=spread("heads between rows")),
    Case((40, 70), options=CAUSAL, heads=(4, 2), batch=2, lse=False, lie=(*spread("fused")[:3], "pitch 65")),
    Case((40, 70), options=CAUSAL, heads=(4, 2), batch=2, lse=False, lie=(*spread("part")[:3], "pitch 72")),
    Case((40, 70), out=F32, heads=(4, 2), batch=2, lie=(*spread("heads before batches")[:3], "pitch 65")),
    Case((70, 90), lie=(*ROWS, "backwards")),
    Case((70, 90), lie=(*ROWS, "part")),
    Case((70, 90), lie=(*ROWS, "columns")),
    Case("three", options=CAUSAL),
    Case("many", (128, 128), heads=(2, 2)),
    large=(
        *bands(((S, S) for S in (1, 63, 64, 127, 128, 129, 300, 515, 1000)), (64, 128)),
        *bands(LENGTHS, (64, 128, 256)),
        *(
            Case((200, 200), (D, D), band, heads=heads, batch=B)
            for heads in ((32, 8), (28, 4), (96, 96), (8, 1), (3, 3))
            for D, B in ((64, 1), (128, 3))
            for band in (CAUSAL, {"window": (30, 40)})
        ),
        *(
            Case((300, 300), (D, D), band, dtype)
            for D in (64, 80, 96, 128, 192, 256, 72, 40, 8, 136, 248)
            for dtype in (F16, BF16)
            for band in ({}, CAUSAL)
        ),
        *(
            Case((260, 333), dims, band)
            for dims in ((192, 128), (64, 128), (128, 64), (72, 56), (128, 256), (256, 64), (8, 200))
            for band in ({}, CAUSAL)
        ),
        *(Case((150, 210), options=CAUSAL, dtype=dtype, out=out) for dtype in (F16, BF16) for out in (F16, BF16, F32)),
        *(
            Case((300, 400), (D, D), {**how, **band})
            for D in (64, 96, 128, 256)
            for how in SCORES
            for band in ({}, CAUSAL, {"window": (90, 5)})
        ),
        *(
            Case((200, 200), (D, D), CAUSAL, heads=(4, 4), batch=2, lie=spread(how), layout=layout)
            for how in ("heads between rows", "fused", "part", "heads before batches")
            for D in (64, 80, 128)
            for layout in ("bhsd", "bshd")
        ),
        *(
            Case((S_q, S_k), (D, D), options, heads=(4, 2), batch=2, mask=name, block=block)
            for S_q, S_k, D in ((333, 401, 128), (260, 130, 256))
            for name in MASKS
            if name not in ("each head", "mixed")
            for block in (16, 32, (48, 80), 64, 128, (256, 64), 256)
            for options in ({}, CAUSAL, {"window": (100, 30), "align": "top-left"})
        ),
        *(
            Case((515, 700), (128, 128), options, mask=mask, block=block)
            for mask in ("elements", "few elements")
            for block in (16, 64, 128, 256)
            for options in ({}, CAUSAL, {"scale": -0.1}, {"softcap": 5.0})
        ),
        *(
            Case(name, dims, band, dtype, heads=(4, 2))
            for name in SEQUENCES
            for dims, dtype in (((64, 64), F16), ((64, 64), BF16), ((128, 128), F16), ((192, 128), F16))
            for band in ({}, CAUSAL, {"window": (30, 9)}, {"causal": True, "align": "top-left"})
        ),
    ),
)
def test_attention_is_right(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.usefixtures("tiles")
@cases(
    Case((70, 150), options=CAUSAL, dtype=E4M3, heads=(2, 2)),
    Case((70, 150), options={"causal": True, "scale": -0.1}, dtype=E4M3, heads=(2, 2)),  # large scores are small ones
    Case((70, 150), options={"softcap": 3.0}, dtype=E4M3, heads=(2, 2), scales=((2,), (1, 2), (2,))),
    Case((70, 150), (96, 80), dtype=E4M3, out=F16, heads=(4, 2), batch=2, scales=((2, 4), (), (2, 2))),
    Case((70, 150), (256, 128), CAUSAL, E4M3, BF16, heads=(4, 2), layout="bshd", scales=((4,), (2,), ())),
    Case("three", options=CAUSAL, dtype=E4M3, scales=((2,), (), (1, 1))),
    Case("many", dtype=E4M3),
    Case((150, 200), mask="elements", dtype=E4M3),
    Case((150, 200), (128, 128), CAUSAL, E4M3, mask="mixed", block=(48, 80)),
    Case((70, 90), dtype=E4M3, heads=(4, 4), batch=2, lie=(*spread("fused")[:3], "pitch 65")),
    Case((70, 90), (48, 32), dtype=E4M3, out=F16, lie=spread("part")),
    *(Case((70, 90), (48, 32), CAUSAL, E4M3, lie=(how, how, how, "rows"), scales=((2,), (), (1, 1))) for how in BADLY),
    Case((30, 170), (67, 3), dtype=E4M3, heads=(4, 2), batch=2),  # rows that are copied to multiples of 16 bytes
    large=(
        *bands(((S, S) for S in (1, 15, 17, 127, 129, 300, 1000)), (64, 128), dtype=E4M3),
        *bands(((300, 777), (777, 300), (1, 1000), (515, 15), (129, 128), (17, 515)), (64, 128, 256), dtype=E4M3),
        *(
            Case((200, 200), (D, D), band, E4M3, heads=heads, batch=B)
            for heads in ((32, 8), (28, 4), (8, 1), (3, 3))
            for D, B in ((64, 1), (128, 3))
            for band in (CAUSAL, {"window": (30, 40)})
        ),
        Case((1, 5), dtype=E4M3, heads=(70_000, 70_000)),  # more heads than a grid has places beside each other
        *(
            Case((300, 300), (D, D), band, E4M3, out)
            for D in (16, 48, 64, 80, 96, 112, 128, 144, 192, 208, 256)
            for band, out in (({}, None), (CAUSAL, F16))
        ),
        *(
            Case((260, 333), dims, band, E4M3, out)
            for dims in (
                *((64, 80), (96, 80), (128, 80), (128, 64), (64, 128), (96, 128), (192, 128), (128, 192)),
                *((128, 256), (256, 64), (192, 256), (16, 208), (256, 16), (20, 24), (1, 1), (33, 20)),
            )
            for band, out in (({}, None), (CAUSAL, BF16))
        ),
        *(Case((150, 210), options=CAUSAL, dtype=E4M3, out=out) for out in (F16, BF16, F32)),
        *(
            Case((140, 200), (D, D), options, E4M3, heads=(6, 2), batch=3, scales=scales)
            for D in (64, 128, 256)
            for scales in (
                *(((6,), (), ()), ((), (2,), ()), ((), (), (2,)), ((3, 6), (), (2,)), ((3, 6), (3, 2), ())),
                *(((), (), (3, 2)),),
            )
            for options in ({}, CAUSAL, {"softcap": 3.0}, {"scale": -0.1})
        ),
        *(
            Case((300, 400), (D, D), {**how, **band}, E4M3)
            for D in (64, 128)
            for how in SCORES
            if how.get("scale") not in (0.69, 2e-38)
            for band in ({}, CAUSAL, {"window": (90, 5)})
        ),
        *(
            Case((S_q, S_k), (D, D), options, E4M3, out, heads=(4, 2), batch=2, mask=name, block=block)
            for S_q, S_k, D in ((333, 401, 128), (260, 130, 256), (200, 270, 64))
            for name in MASKS
            if name not in ("each head", "mixed")
            for block in (16, 32, (48, 80), 64, 128)
            for options, out in (({}, None), ({"window": (100, 30), "align": "top-left"}, F16))
        ),
        *(
            Case((515, 700), (128, 128), options, E4M3, mask=mask, block=block)
            for mask in ("elements", "few elements")
            for block in (32, 64, 128)
            for options in ({}, CAUSAL, {"scale": -0.1}, {"softcap": 5.0})
        ),
        *(
            Case(name, dims, band, E4M3, heads=(4, 2), scales=((4,), (), (1, 2)))
            for name in SEQUENCES
            for dims in ((64, 64), (192, 128))
            for band in ({}, CAUSAL, {"window": (30, 9)})
        ),
    ),
)
def test_attention_of_fp8_is_right(case: Case, device: Device, rng: np.random.Generator) -> None:
    varied = not isinstance(case.lengths, str)
    check(device, KERNEL, case, operands(rng, case), varied=varied)


@pytest.mark.races
@pytest.mark.parametrize("case", [Case("three", options=CAUSAL), Case((70, 90), (128, 128), CAUSAL, E4M3)], ids=str)
def test_threads_of_a_cta_do_not_race(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.large
@pytest.mark.parametrize("dtype", [F16, E4M3], ids=str)
def test_more_tiles_than_multiprocessors_are_all_done(dtype: Any, device: Device, rng: np.random.Generator) -> None:
    """Eight tiles of 48 heads."""
    for options in ({}, CAUSAL):
        case = Case((1000, 1000), options=options, dtype=dtype, heads=(12, 4), batch=4)
        check(device, KERNEL, case, operands(rng, case))


@pytest.mark.parametrize("out_dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("dtype", [F16, E4M3], ids=str)
def test_the_result_is_the_same_bits_with_and_without_lse_and_out(
    dtype: Any, out_dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    case = Case((70, 150), (128, 128), CAUSAL, dtype, out_dtype)
    some = operands(rng, case)
    want, _ = attend(device, KERNEL, case, some)
    np.testing.assert_array_equal(attend(device, KERNEL, replace(case, lse=False), some)[0], want)
    scales = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0} if dtype == E4M3 else {}
    q, k, v = (device.asarray(x.view(np.uint8) if dtype == E4M3 else x) for x in some)
    with force_kernel(KERNEL):
        got = bg.attention(q, k, v, causal=True, out_dtype=out_dtype, **scales)
    assert got.dtype == out_dtype
    np.testing.assert_array_equal(device.asnumpy(got), want)


def test_one_head_of_keys_spread_over_many_without_a_copy(device: Device, rng: np.random.Generator) -> None:
    """A stride of 0 is none that TMA takes: another kernel serves."""
    case = Case((130, 150), heads=(4, 1))
    some = operands(rng, case)
    want, _ = attend(device, KERNEL, case, some)
    q, k, v = map(device.asarray, some)
    got = bg.attention(q, *(device.cupy.broadcast_to(x, (1, 4, *x.shape[2:])) for x in (k, v)))
    np.testing.assert_allclose(device.asnumpy(got).astype(float), want.astype(float), rtol=0, atol=4e-3)


@pytest.mark.large
@pytest.mark.parametrize(("dtype", "kernel"), [(F16, KERNEL), (E4M3, KERNEL), (F16, "AttentionSimt")], ids=str)
def test_more_than_2_to_31_elements_between_heads(
    dtype: Any, kernel: str, device: Device, rng: np.random.Generator
) -> None:
    case = Case((130, 200), (128, 128), CAUSAL, dtype, heads=(4, 2))
    q, k, v = operands(rng, case)
    room = device.cupy.empty((2, (1 << 24) + 8, 128), np.uint8 if dtype == E4M3 else dtype)
    far = room[None, :, -200:], room[None, :, :200]
    for x, y in zip(far, (k, v), strict=True):
        x[...] = device.asarray(y.view(np.uint8) if dtype == E4M3 else y)
    with force_kernel(kernel):
        scales = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0} if dtype == E4M3 else {}
        got = bg.attention(device.asarray(q.view(np.uint8) if dtype == E4M3 else q), *far, causal=True, **scales)
    want, _ = attend(device, kernel, case, [q, k, v])
    np.testing.assert_array_equal(device.asnumpy(got), want)


@pytest.mark.parametrize("how", ["one mask", "new masks"])
def test_whole_blocks_have_one_kind_in_memory_and_no_other_is_read(
    how: str, device: Device, rng: np.random.Generator
) -> None:
    """A mask is taken apart once for each shape of tiles. Reading a second kind ends the process."""
    made, make = [], mask_tiles.tiles

    def guarded(*args: Any) -> Any:
        found = make(*args)
        made.append((args[2:], len(found.kinds)))
        same = args[2:] == (64, 64)
        return found._replace(kinds=device.asarray(device.asnumpy(found.kinds[:1]))) if same else found

    case = Case((200, 300), (128, 128), CAUSAL)
    masks = [MASKS["random"](200, 300, 64) for _ in range(1 if how == "one mask" else 2)]
    with patch.object(mask_tiles, "tiles", guarded):
        for mask, D in itertools.product(masks, (128, 128, 96, 64)):
            one = replace(case, dims=(D, D))
            check(device, KERNEL, one, operands(rng, one), mask=mask)
    assert all(mask.kinds.strides == (0,) for mask in masks)
    assert made[0] == ((64, 64), len(masks[0].kinds))  # a block is a tile
    assert [shape for shape, _ in made] == [(64, 64), (64, 128)] * len(masks)


# ------------------------------------------------------------------------------------------------- fp8
@pytest.mark.parametrize("D", [64, 128, 256])
def test_constant_rows_of_fp8_are_exact(D: int, device: Device, rng: np.random.Generator) -> None:
    """Weights that are all the same are powers of two, and so are the values: sums of up to 2**13 of them are exact."""
    case = Case((70, 500), (D, D), dtype=E4M3, heads=(1, 1))
    q, k, v = (np.ones_like(x) for x in operands(rng, case))
    for value in (1.0, -0.5, 256.0):
        out, lse = run(device, KERNEL, case, [q, k, np.full_like(v, value)])
        np.testing.assert_allclose(out, 3 * value, 1e-6)
        np.testing.assert_allclose(lse, np.sqrt(D) + np.log(500), 1e-5)


@pytest.mark.large
@pytest.mark.parametrize("S", [300, 1000, 4000, 16384])
def test_sums_of_many_values_of_one_sign_of_fp8_lose_little(S: int, device: Device, rng: np.random.Generator) -> None:
    """The tensor cores keep 13 bits of sums: added up there to the end, a quarter of those of 16384 keys is lost."""
    case = Case((128, S), dtype=E4M3, heads=(2, 2))
    q, k, v = operands(rng, case)
    v = (np.abs(v.astype(F32)) + 0.5).astype(E4M3)
    got, _ = run(device, KERNEL, case, [q, k, v])
    want = exact(*wide(case, [q, k, v]), seen_keys(128, S)).out
    assert abs(1 - (got * want).sum() / (want * want).sum()) <= 0.025
    assert np.abs(got / want - 1).max() <= 0.06


@pytest.mark.parametrize("D", [64, 128])
def test_huge_scores_of_fp8_choose_one_key(D: int, device: Device, rng: np.random.Generator) -> None:
    case = Case((130, 260), (D, D), dtype=E4M3, heads=(2, 2))
    q, k, v = operands(rng, case)
    rising = rng.permuted(np.broadcast_to(np.arange(260) % 120, (1, 2, 260)), axis=2).astype(np.uint8)
    q[...] = k[...] = 0
    q[..., 0], k[..., 0] = 1, rising.view(E4M3)  # bytes in rising order
    highest = (rising == 119)[..., None]
    for arrays in (False, True):
        one = device.cupy.full(2, 1e4, np.float32) if arrays else 1e4
        bytes_ = (device.asarray(x.view(np.uint8)) for x in (q, k, v))
        with force_kernel(KERNEL):
            out, lse = bg.attention(*bytes_, q_scale=one, k_scale=one, v_scale=3.0, return_lse=True)
        picked = (highest * v.astype(float)).sum(axis=2) / highest.sum(axis=2)
        np.testing.assert_allclose(device.asnumpy(out), 3 * np.broadcast_to(picked[:, :, None], out.shape), 1e-6, 1e-6)
        top = 1e8 / np.sqrt(D) * float(np.uint8(119).view(E4M3))
        np.testing.assert_allclose(device.asnumpy(lse), np.full(lse.shape, top), 1e-5)


def scaled(device: Device, some: list[Any], **more: Any) -> Any:
    with force_kernel(KERNEL):
        return device.asnumpy(bg.attention(*(device.asarray(x.view(np.uint8)) for x in some), **more))


def test_tiny_and_huge_scales_of_fp8(device: Device, rng: np.random.Generator) -> None:
    case = Case((70, 150), dtype=E4M3, heads=(4, 4))
    some = operands(rng, case)
    three = [[1e-6, 1e4, 1.0, 1e4], [1e6, 1e-4, 1.0, 1e-4], [1e4, 1e-6, 1e4, 1e-30]]
    arrays = {f"{n}_scale": device.asarray(np.array(x, F32)) for n, x in zip("qkv", three, strict=True)}
    plain = scaled(device, some, q_scale=1.0)
    got = scaled(device, some, **arrays)
    np.testing.assert_allclose(got, plain * np.array(three[2])[:, None, None], rtol=1e-4, atol=0)
    # Scores that differ by hardly anything: the mean of what is seen.
    mean = np.broadcast_to(some[2].astype(float).mean(axis=2, keepdims=True), plain.shape)
    for scales in ({"q_scale": device.cupy.full(4, 1e-6, np.float32), "k_scale": 1e-6}, {"q_scale": 1e-30}):
        np.testing.assert_allclose(scaled(device, some, **scales), mean, rtol=2**-9, atol=1e-4)


def test_scales_of_fp8_as_numbers_and_as_arrays_are_the_same(device: Device, rng: np.random.Generator) -> None:
    some = operands(rng, Case((70, 150), (128, 128), dtype=E4M3, heads=(4, 2)))
    numbers = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 4.0}
    want = scaled(device, some, **numbers)
    for heads in ((4, 2, 2), ((1, 4), (1, 2), (1, 2))):
        arrays = {name: device.cupy.full(n, x, np.float32) for (name, x), n in zip(numbers.items(), heads, strict=True)}
        assert np.abs(scaled(device, some, **arrays) - want).max() <= 1e-5
    gaps = {"v_scale": device.asarray(np.array([4, 9, 4, 9], F32))[::2]}
    assert np.abs(scaled(device, some, **{**numbers, **gaps}) - want).max() <= 1e-5


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, -np.inf])
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_scales_of_fp8_that_are_not_above_0_spoil_their_head_alone(
    name: str, bad: float, device: Device, rng: np.random.Generator
) -> None:
    B, H, H_kv, G = 2, 4, 2, 2
    some = operands(rng, Case((100, 50), dtype=E4M3, heads=(H, H_kv), batch=B))
    scale = np.ones((B, H if name == "q_scale" else H_kv), F32)
    good = scaled(device, some, causal=True, **{name: device.asarray(scale)})
    scale[1, 1] = bad
    spoiled = np.zeros((B, H), bool)
    spoiled[1, slice(1, 2) if name == "q_scale" else slice(G, 2 * G)] = True
    for out_dtype in (F32, F16):
        out = scaled(device, some, causal=True, out_dtype=out_dtype, **{name: device.asarray(scale)}).astype(F32)
        assert np.isnan(out[spoiled][:, 50:]).all() and (out[:, :, :50] == 0).all()  # the first ones see no keys
        assert not np.isnan(out[~spoiled]).any()
        if out_dtype == F32:
            np.testing.assert_array_equal(out[~spoiled], good[~spoiled])


# --------------------------------------------------------------------------------------- values of fp8 by columns
@pytest.mark.parametrize("D", [16, 64, 80, 120, 256])
@pytest.mark.parametrize("S", [1, 17, 128, 300])
def test_values_lie_with_their_keys_side_by_side(S: int, D: int, device: Device, rng: np.random.Generator) -> None:
    wide = rng.integers(0, 256, (2, 6, S + 3, 272), dtype=np.uint8)
    on_device = device.asarray(wide)
    whole, part = wide[:, :, :S, :D], on_device[:, ::2, 1 : S + 1, 16 : 16 + D]
    np.testing.assert_array_equal(
        device.asnumpy(attention_sm90.by_columns(part, None)), by_columns(wide[:, ::2, 1 : S + 1, 16 : 16 + D], [0, S])
    )
    if D % 16 == 0:  # rows begin at multiples of 16 bytes
        got = attention_sm90.by_columns(device.asarray(whole), None)
        np.testing.assert_array_equal(device.asnumpy(got), by_columns(whole, [0, S]))


@pytest.mark.races
@pytest.mark.parametrize(
    "ends", [[0, 7, 40], [0, -9, 40], [0, 2**31 - 1, 40], [30, 7, 2**31 - 1], [-(2**31), 20, -1]], ids=str
)
def test_values_between_bounds_that_were_spoiled_touch_nothing_outside(
    ends: list[int], device: Device, rng: np.random.Generator
) -> None:
    v = rng.integers(1, 250, (1, 2, 40, 64)).astype(np.uint8)
    got = attention_sm90.by_columns(device.asarray(v), device.asarray(np.array(ends, np.int32)))
    np.testing.assert_array_equal(device.asnumpy(got), by_columns(v, ends))


# ------------------------------------------------------------------------------------------------- NaN, spoiled lists
@pytest.mark.races
def test_queries_beside_a_nan_that_they_do_not_see_are_computed_again(device: Device, rng: np.random.Generator) -> None:
    case = Case((20, 150), options=CAUSAL)
    q, k, v = operands(rng, case)
    v[:, :, 142, 3] = np.nan
    spoiled = np.zeros(q.shape, bool)
    spoiled[:, :, 12:, 3] = True
    np.testing.assert_array_equal(np.isnan(run(device, KERNEL, case, [q, k, v])[0]), spoiled)


def test_nan_that_all_in_the_upper_half_of_a_warp_see(device: Device, rng: np.random.Generator) -> None:
    case = Case((5, 150), options=CAUSAL)
    q, k, v = operands(rng, case)
    v[:, :, 148, 3] = np.nan
    np.testing.assert_array_equal(np.isnan(run(device, KERNEL, case, [q, k, v])[0][0, 0, :, 3]), np.arange(5) >= 3)


@pytest.mark.parametrize(
    "case",
    [
        Case((100, 150), options=CAUSAL),
        Case((70, 90), (80, 72), dtype=BF16, mask="elements"),
        Case((70, 90), heads=(4, 2), batch=2, options={"window": (20, 30)}),
        Case((70, 90), (80, 72), {"window": (20, 30)}, E4M3),
        Case((70, 90), (128, 128), dtype=E4M3, mask="random", block=32),
    ],
    ids=str,
)
def test_nan_and_infinity_reach_those_who_see_them(case: Case, device: Device, rng: np.random.Generator) -> None:
    check_nan_reaches_those_who_see_it(device, KERNEL, case, rng)


def test_scores_that_are_all_minus_infinity_give_nan(device: Device, rng: np.random.Generator) -> None:
    check_scores_of_minus_infinity(device, KERNEL, rng)


@pytest.mark.usefixtures("tiles")
def test_keys_that_score_minus_infinity_weigh_nothing(device: Device, rng: np.random.Generator) -> None:
    case = Case((140, 300), heads=(2, 2))
    q, k, v = (np.abs(x) + F16.type(0.1) for x in operands(rng, case))
    k[:, :, :290] = -np.inf
    out, lse = run(device, KERNEL, case, [q, k, v])
    want = exact(q, k[:, :, 290:], v[:, :, 290:], np.ones((140, 10), bool))
    assert np.abs(out - want.out).max() < 4e-3 and np.abs(lse - want.lse).max() < 1e-3
    k[...] = -np.inf
    out, lse = run(device, KERNEL, case, [q, k, v])
    assert np.isnan(out).all() and np.isnan(lse).all()  # -inf would say that there are no keys


@pytest.mark.sanitizer
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_garbage_behind_the_diagonal_changes_nothing_before_it(
    bad: float, device: Device, rng: np.random.Generator
) -> None:
    check_garbage_behind_the_diagonal(device, KERNEL, bad, rng)


@pytest.mark.sanitizer
def test_garbage_of_fp8_behind_the_diagonal_changes_nothing_before_it(device: Device, rng: np.random.Generator) -> None:
    case = Case((300, 300), options=CAUSAL, dtype=E4M3)
    q, k, v = operands(rng, case)
    clean, clean_lse = run(device, KERNEL, case, [q, k, v])
    k.view(np.uint8)[:, :, 257:] = v.view(np.uint8)[:, :, 257:] = NAN
    out, lse = run(device, KERNEL, case, [q, k, v])
    assert (out[:, :, :64] == clean[:, :, :64]).all()  # tiles of keys that have none of it
    np.testing.assert_allclose(out[:, :, :257], clean[:, :, :257], rtol=0, atol=2e-2 * 12)
    assert np.abs(lse - clean_lse)[:, :, :257].max() < 1e-2
    assert np.isnan(out[:, :, 257:]).all()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [F16, E4M3], ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": -1.0}, {"softcap": 2.0}], ids=str)
def test_rows_that_see_nothing_are_0_whatever_the_operands_hold(options: Any, dtype: Any, device: Device) -> None:
    check_rows_that_see_nothing(device, KERNEL, dtype, **options)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [F16, E4M3], ids=str)
@bad_numbers
def test_masks_and_bounds_that_were_spoiled_touch_nothing_outside(
    bad: int, dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    check_spoiled_masks(device, KERNEL, dtype, 64, bad, rng)
    check_spoiled_bounds(device, KERNEL, dtype, bad, rng)


@pytest.mark.emulated
@pytest.mark.parametrize("D", [64, 128])
def test_a_mask_of_so_many_blocks_that_their_kinds_need_64_bits(D: int, device: Any, rng: np.random.Generator) -> None:
    check_kinds_beyond_2_to_31(device, KERNEL, F16, D, rng)
