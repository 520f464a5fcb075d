"""All that is promised of attention_simt: attention on the CUDA cores of any card, for any dtype and strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device, Emulated
from ..gpu.repeats import differing
from .attentions import (
    BADLY,
    BANDS,
    BF16,
    E4M3,
    F16,
    F32,
    F64,
    SEQUENCES,
    Case,
    attend,
    bad_numbers,
    cases,
    check,
    check_kinds_beyond_2_to_31,
    check_nan_reaches_those_who_see_it,
    check_rows_that_see_nothing,
    check_spoiled_bounds,
    check_spoiled_masks,
    exact,
    operands,
    seen_keys,
    wide,
)

KERNEL = "AttentionSimt"
CAUSAL = {"causal": True}
EIGHT = (8, 8)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.fixture(autouse=True)
def any_card(device: Device) -> None:
    device.needs("sm_75")


@cases(
    *(Case(lengths, EIGHT, band, F64) for lengths in ((1, 1), (5, 9), (9, 5)) for band in ({}, CAUSAL)),
    *(Case((9, 5), EIGHT, {"window": (2, 1), "align": align}, F64) for align in ("top-left", "bottom-right")),
    Case((4, 7), (5, 33), {"softcap": 2.0}, F64),
    Case((4, 7), (5, 33), {"scale": -0.7}, F32),
    Case((4, 7), (5, 33), {"scale": 0.0, "causal": True}, F16),
    Case((7, 9), (20, 24), CAUSAL, BF16, F32),
    Case((4, 7), (300, 64), CAUSAL, F16, F64),
    Case((7, 9), (64, 264), {}, BF16),
    Case((37, 37), EIGHT, {}, F64, heads=(1, 1), mask="elements", block=16),  # the last blocks are cut
    Case((37, 37), EIGHT, {}, F32, heads=(4, 2), mask="random heads", block=16, batch=2),  # two heads share a pattern
    Case((20, 20), EIGHT, {"window": (6, 2)}, F64, heads=(2, 2), mask="each head", block=16),
    Case((37, 37), EIGHT, {}, F16, mask="none", block=16),
    Case(
        (7, 9), (8, 8), CAUSAL, F64, heads=(4, 2), batch=2, layout="bshd", lse=False, lie=("pitch 9",) * 3 + ("part",)
    ),
    *(
        Case((7, 9), (8, 24), CAUSAL, dtype, lie=(how,) * 4)
        for how, dtype in zip(BADLY, (F16, BF16, F32, F64, F16), strict=True)
    ),
    Case((5, 9), EIGHT, {}, E4M3),
    Case((5, 9), (300, 20), {"causal": True, "softcap": 3.0}, E4M3, heads=(4, 2), batch=2, scales=((), (), (2, 2))),
    Case("none of them long", EIGHT, CAUSAL, F64),
    Case("none of them long", EIGHT, {}, E4M3, scales=((2,), (), (1,))),
    large=(
        *(
            Case((130, 170), dims, band, dtype, heads=(4, 2), batch=2)
            for dims in ((1, 1), (8, 8), (33, 20), (64, 64), (128, 300), (270, 5))
            for dtype in (F32, F64)
            for band in BANDS
        ),
        *(
            Case((130, 170), dims, CAUSAL, dtype, out)
            for dims in ((20, 24), (300, 64), (64, 264), (1, 1), (67, 3))
            for dtype in (F16, BF16)
            for out in (None, F32, F64)
        ),
        *(
            Case((60, 80), (24, 24), {"causal": True, **how}, dtype)
            for dtype in (F32, F64)
            for how in (
                {"softcap": 20.0},
                {"softcap": 0.5, "scale": 3.0},
                {"scale": -0.7},
                {"scale": 0.0},
                {"scale": 5.0},
            )
        ),
        *(
            Case((201, 230), (24, 24), options, F32, heads=(4, 2), batch=2, mask=name, block=block)
            for name in ("causal", "global", "dilated", "random heads", "mixed batches", "none")
            for block in (16, (48, 80), 128, 256)
            for options in ({}, {"causal": True, "window": (50, -1)})
        ),
        *(
            Case((70, 90), (40, 24), CAUSAL, dtype, lie=tuple(how if n == i else "rows" for i in range(4)))  # type: ignore[arg-type]
            for how in BADLY
            for dtype in (F16, BF16, F32, F64)
            for n in range(4)
        ),
        *(
            Case((130, 170), dims, options, E4M3, heads=(4, 2), batch=2, scales=((), (), (2, 2)))
            for dims in ((300, 64), (64, 264))
            for options in ({}, CAUSAL, {"softcap": 5.0}, {"scale": -0.3})
        ),
        *(
            Case(name, dtype=F32, options=band, heads=(4, 2))
            for name in SEQUENCES
            for band in ({}, CAUSAL, {"window": (30, 9)})
        ),
    ),
)
def test_attention_is_right(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_dtypes_strides_and_columns_that_tensor_cores_do_not_take_are_served(
    arch: str, device: Device, rng: np.random.Generator
) -> None:
    device.needs(arch)
    loaded: set[str] = set()
    for case in (
        Case((7, 9), EIGHT, dtype=F32),
        Case((7, 9), EIGHT, dtype=F64),
        Case((7, 9), EIGHT, out=F64),
        Case((7, 9), (264, 8)),
        Case((7, 9), (20, 8)),
        Case((7, 9), EIGHT, lie=("shifted", "rows", "rows", "rows")),
        Case((7, 9), EIGHT, lie=("rows", "columns", "rows", "rows")),
        Case((7, 9), EIGHT, lie=("rows", "rows", "backwards", "rows")),
        Case((7, 9), (264, 8), dtype=E4M3),
    ):
        with device.kernels() as kernels:
            some = operands(rng, case)
            out, _ = attend(device, None, case, some)
        want = exact(*wide(case, some), seen_keys(7, 9)).out
        assert set(kernels) <= {"attention_simt"}, case  # of two like cases, the first alone has it loaded
        loaded |= set(kernels)
        np.testing.assert_allclose(out.astype(float), want, rtol=0, atol=2e-3 * 9)
    assert loaded or not isinstance(device, Emulated)  # a card knows them from the tests before


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize(
    ("options", "mask"),
    [(CAUSAL, None), ({"window": (2, 3)}, None), ({}, "elements")],
    ids=["causal", "window", "mask"],
)
def test_nan_and_infinity_reach_those_who_see_them(
    options: Any, mask: Any, dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    check_nan_reaches_those_who_see_it(device, KERNEL, Case((20, 26), EIGHT, options, dtype, mask=mask, block=16), rng)


@pytest.mark.large
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_rows_that_see_nothing_are_0_whatever_the_operands_hold(dtype: Any, device: Device) -> None:
    check_rows_that_see_nothing(device, KERNEL, dtype)


@pytest.mark.parametrize("dtype", [F16, F32, E4M3], ids=str)
@pytest.mark.parametrize("zero", ["B", "H", "S_q", "S_k", "D", "D_v"])
def test_sizes_of_zero(zero: str, dtype: Any, device: Device) -> None:
    """Without keys the result is 0 and its logarithms are minus infinity; without a result nothing is launched."""
    n = {"B": 2, "H": 2, "S_q": 5, "S_k": 7, "D": 8, "D_v": 8} | {zero: 0}
    shapes = ((2 * n["H"], n["S_q"], n["D"]), (n["H"], n["S_k"], n["D"]), (n["H"], n["S_k"], n["D_v"]))
    some = (np.ones((n["B"], *shape), dtype) for shape in shapes)
    q, k, v = (device.asarray(x.view(np.uint8) if dtype == E4M3 else x) for x in some)
    scales = {"v_scale": 1.0} if dtype == E4M3 else {}
    with device.kernels() as kernels:
        out, lse = bg.attention(q, k, v, return_lse=True, **scales)
    assert out.shape == (*q.shape[:3], n["D_v"]) and lse.shape == q.shape[:3]
    np.testing.assert_allclose(device.asnumpy(out).astype(float), zero != "S_k", rtol=1e-6)
    want = -np.inf if zero == "S_k" else np.log(7) + np.sqrt(n["D"])
    np.testing.assert_allclose(device.asnumpy(lse), np.full(q.shape[:3], want), rtol=1e-5)
    assert bool(kernels) == (zero in ("D", "D_v"))
    with device.kernels() as kernels:
        bg.attention(q, k, v, **scales)
    assert bool(kernels) == (zero == "D")


@pytest.mark.before
@pytest.mark.sanitizer
@bad_numbers
def test_masks_and_bounds_that_were_spoiled_touch_nothing_outside(
    bad: int, device: Device, rng: np.random.Generator
) -> None:
    check_spoiled_masks(device, KERNEL, F32, 8, bad, rng)
    check_spoiled_bounds(device, KERNEL, F32, bad, rng)


@pytest.mark.emulated
def test_a_mask_of_so_many_blocks_that_their_kinds_need_64_bits(device: Any, rng: np.random.Generator) -> None:
    check_kinds_beyond_2_to_31(device, KERNEL, F64, 8, rng)


@pytest.mark.large
def test_results_are_the_same_bits_every_time(device: Device, rng: np.random.Generator) -> None:
    q, k, v = map(device.asarray, operands(rng, Case((200, 200), (33, 33), dtype=F32)))
    with force_kernel(KERNEL):
        first = bg.attention(q, k, v, causal=True)
        assert differing(lambda: bg.attention(q, k, v, causal=True), first, 100) == 0
