"""The kernels for the gradients of attention against float64 on the card."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm._attention import backward_config
from bsrgemm._kernels.forced_kernel import force_kernel
from bsrgemm.dtypes import BFLOAT16

from .attention_cases import F16, F32, F64
from .backward_cases import NAMES, check, operands
from .repeats import captured, new_stream

pytestmark = pytest.mark.gpu

BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (100, 30)},
    {"window": (60, 0), "align": "top-left"},
)


@pytest.fixture(params=["by rule", "BackwardSm80"], autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernel that the rules choose, and the portable one."""
    if request.param == "by rule":
        yield request.param
        return
    with force_kernel(request.param):
        yield request.param


@pytest.mark.parametrize("D", [64, 128, 192, 256])
@pytest.mark.parametrize("S", [1, 63, pytest.param(129, marks=pytest.mark.sanitizer), 300, 515])
def test_bands_at_odd_lengths(S: int, D: int, rng: Any) -> None:
    some = operands(rng, S, S, D)
    for band in BANDS:
        check(some, **band)


@pytest.mark.parametrize("lengths", [(300, 777), (777, 300), (1, 1000), (1000, 1)], ids=str)
def test_queries_and_keys_of_different_lengths(lengths: tuple[int, int], rng: Any) -> None:
    some = operands(rng, *lengths, 128, B=2, heads=(6, 2))
    for band in BANDS:
        check(some, **band)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (192, 192), (256, 256), (72, 40), (192, 128), (136, 200)], ids=str
)
def test_head_dims(dims: tuple[int, int], dtype: Any, rng: Any) -> None:
    check(operands(rng, 200, 333, *dims, heads=(4, 1), dtype=dtype), causal=True)


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (7, 1), (14, 2), (8, 8), (16, 2)], ids=str)
@pytest.mark.parametrize("D", [128, 256])
def test_groups_of_heads(D: int, heads: tuple[int, int], rng: Any) -> None:
    check(operands(rng, 150, 260, D, B=2, heads=heads), causal=True)


@pytest.mark.parametrize(
    "options", [{"softcap": 7.0}, {"scale": -0.3}, {"scale": 0.0}, {"softcap": 2.0, "scale": 0.5}], ids=str
)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_softcap_and_any_scale(D: int, options: dict[str, Any], rng: Any) -> None:
    check(operands(rng, 140, 300, D), causal=True, **options)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("D", [40, 64, 80, 128, 192, 256])
def test_softcap_with_bands_and_masks(D: int, dtype: Any, rng: Any) -> None:
    some = operands(rng, 333, 515, D, heads=(4, 2), dtype=dtype)
    for softcap, band in itertools.product((0.6, 30.0), ({}, {"window": (150, 60)})):
        check(some, softcap=softcap, **band)
    for block, deterministic in itertools.product((32, 64, 128), (True, False)):
        mask = BlockMask.random(333, 515, per_row=2, block=block, heads=(1, 4), seed=block, device="cpu")
        check(some, mask=mask, softcap=3.0, deterministic=deterministic)


@pytest.mark.sanitizer
@pytest.mark.parametrize("D", [64, 128, 256])
def test_weights_that_are_zero_have_no_slope_under_a_softcap(D: int, rng: Any) -> None:
    q, k, v, dout = operands(rng, 129, 200, D)
    q *= 20  # the scores of a query are up to 150 apart
    check([q, k, v, dout], softcap=400.0)
    for softcap in (0.5, 1e-3):
        check([q, k, v, dout], softcap=softcap)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_softcap_in_sequences_of_different_lengths(D: int, rng: Any) -> None:
    some = [rng.standard_normal((n, h, D)).astype(F16) for n, h in ((500, 4), (640, 2), (640, 2), (500, 4))]
    bounds = {"cu_seqlens_q": [0, 130, 130, 300, 500], "cu_seqlens_k": [0, 270, 290, 640, 640]}
    check(some, causal=True, softcap=4.0, **bounds)


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("D", [64, 128, 192])
def test_random_blocks(block: int, D: int, rng: Any) -> None:
    some = operands(rng, 700, 900, D, B=2, heads=(4, 2))
    for heads, band in itertools.product(((1, 1), (2, 2), (1, 4)), ({}, {"causal": True}, {"window": (150, 60)})):
        mask = BlockMask.random(700, 900, per_row=2, block=block, heads=heads, seed=block, device="cpu")
        check(some, mask=mask, **band)


@pytest.mark.sanitizer
@pytest.mark.parametrize("D", [64, 256])
def test_masks_of_elements(D: int, rng: Any) -> None:
    some = operands(rng, 150, 200, D)
    dense = rng.random((150, 200)) < 0.3
    dense[7], dense[:, 9], dense[60:130] = False, False, False  # queries that see nothing, a key that nobody sees
    for block in (16, 64, 128):
        check(some, mask=BlockMask.from_dense(dense, block=block))


@pytest.mark.parametrize("cut", [(0, 2), (3, 3), (0, 8)], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_tiles_of_keys_that_are_cut(D: int, cut: tuple[int, int], rng: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(backward_config, "cut", lambda *given: cut)
    some = operands(rng, 500, 700, D, heads=(4, 1))
    mask = BlockMask.random(500, 700, per_row=3, block=64, heads=(1, 4), seed=1, device="cpu")
    for deterministic, options in itertools.product((True, False), ({}, {"causal": True}, {"mask": mask})):
        check(some, deterministic=deterministic, **options)


@pytest.mark.parametrize(
    ("heads", "options"), [((8, 1), {"causal": True}), ((2, 2), {}), ((4, 2), {"window": (600, 0)})]
)
def test_few_tiles_are_cut_by_rule(heads: tuple[int, int], options: Any, rng: Any) -> None:
    check(operands(rng, 2000, 1700, 128, heads=heads), **options)
    check(operands(rng, 2000, 1700, 64, heads=heads), deterministic=False, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("D", [128, 256])
def test_sequences_of_different_lengths(D: int, causal: bool, align: str, rng: Any) -> None:
    some = [rng.standard_normal((n, h, D)).astype(F16) for n, h in ((500, 4), (640, 2), (640, 2), (500, 4))]
    bounds = {"cu_seqlens_q": [0, 130, 130, 300, 500], "cu_seqlens_k": [0, 270, 290, 640, 640]}
    check(some, causal=causal, align=align, **bounds)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_plain_cores(dtype: Any, kernel: str, rng: Any) -> None:
    if kernel != "by rule":
        pytest.skip("one kernel serves these dtypes")
    for D, D_v in ((64, 64), (40, 24)):
        some = operands(rng, 130, 170, D, D_v, heads=(4, 2), dtype=dtype)
        for band in BANDS:
            check(some, **band)
        check(some, mask=BlockMask.random(130, 170, per_row=2, block=32, seed=1, device="cpu"))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("D", [128, 256])
def test_results_repeat_bit_by_bit(D: int, deterministic: bool, rng: Any) -> None:
    import cupy

    q, k, v, dout = (cupy.asarray(x) for x in operands(rng, 1500, 1500, D, heads=(8, 4)))
    for options in ({"causal": True}, {}, {"window": (300, 0)}):
        out, lse = bg.attention(q, k, v, return_lse=True, **options)
        first = bg.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
        for _ in range(20):
            again = bg.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
            for x, y in zip(first, again, strict=True):
                if deterministic:
                    assert (x.view(np.uint16) == y.view(np.uint16)).all()
                else:
                    assert float(abs(x.astype(F32) - y.astype(F32)).max()) <= 3e-3 * float(abs(x.astype(F32)).max())


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("D", [128, 256])
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(D: int, name: str, softcap: Any, rng: Any) -> None:
    import cupy

    some = dict(zip(("q", "k", "v", "dout"), operands(rng, 200, 300, D), strict=True))
    some[name][:, :, 133, 5] = np.nan
    wide = {key: x.astype(np.float64) for key, x in some.items()}
    options: dict[str, Any] = {"causal": True, "softcap": softcap}
    out, lse = bg.attention(wide["q"], wide["k"], wide["v"], return_lse=True, **options)
    want = bg.attention_backward(wide["dout"], wide["q"], wide["k"], wide["v"], out, lse, **options)
    q, k, v, dout = (cupy.asarray(x) for x in some.values())
    o, e = bg.attention(q, k, v, return_lse=True, **options)
    for x, y in zip(bg.attention_backward(dout, q, k, v, o, e, **options), want, strict=True):
        got = x.get().astype(np.float64)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(y))
        np.testing.assert_allclose(got, y, rtol=0, atol=3e-3 * max(1.0, np.nanmax(np.abs(y), initial=0)))


def test_strides_parts_and_given_sums(kernel: str, rng: Any) -> None:
    """Rows between heads, rows that are not a multiple of 16 bytes, results with gaps, delta, and dout in float32."""
    import cupy

    some = operands(rng, 200, 300, 100, heads=(4, 2), B=2)
    check(some, causal=True)
    wide = [x.astype(np.float64) for x in some]
    out, lse = bg.attention(*wide[:3], return_lse=True)
    dlse = rng.standard_normal(lse.shape)
    want = bg.attention_backward(wide[3], *wide[:3], out, lse, dlse=dlse)
    q, k, v, dout = (cupy.asarray(np.swapaxes(x, 1, 2)) for x in some)
    e, d = cupy.asarray(lse.astype(F32)), cupy.asarray(dlse.astype(F32))
    delta = cupy.asarray((wide[3] * out).sum(axis=-1).astype(F32))
    room = cupy.full((2, 200, 4, 130), 77, F16)
    for grad in (dout, dout.astype(F32)) if kernel == "by rule" else (dout,):
        got = bg.attention_backward(grad, q, k, v, None, e, delta=delta, dlse=d, layout="bshd", dq=room[..., :100])
        for x, y in zip(got, want, strict=True):
            bound = 3e-3 * np.abs(y).max()
            np.testing.assert_allclose(np.swapaxes(x.get(), 1, 2).astype(np.float64), y, rtol=0, atol=bound)
        assert (room[..., 100:] == 77).all()


@pytest.mark.parametrize("cut", [None, (0, 3)])
def test_a_captured_backward_can_be_replayed(cut: Any, rng: Any, monkeypatch: Any) -> None:
    import cupy

    if cut is not None:
        monkeypatch.setattr(backward_config, "cut", lambda *given: cut)
    q, k, v, dout = (cupy.asarray(x) for x in operands(rng, 300, 300, 128, heads=(4, 2)))
    out, lse = bg.attention(q, k, v, causal=True, return_lse=True)
    results = {name: cupy.empty_like(x) for name, x in zip(NAMES, (q, k, v), strict=True)}
    want = [x.copy() for x in bg.attention_backward(dout, q, k, v, out, lse, causal=True)]
    stream = new_stream()
    with stream:
        graph = captured(stream, lambda: bg.attention_backward(dout, q, k, v, out, lse, causal=True, **results))
        for x in results.values():
            x.fill(7)
        graph.launch(stream)
        graph.launch(stream)
    stream.synchronize()
    for x, y in zip(results.values(), want, strict=True):
        assert (x.view(np.uint16) == y.view(np.uint16)).all()
