"""`attention` of fp8 on the host, and on a fake card, against that of the numbers its bytes stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import BFLOAT16, FLOAT8

from .. import fake_cupy
from ..kernels.attentions import by_columns
from .dense_softmax import F16, F32, F64, Array, Problem, assert_near, problems, strided, tiles


def fp8_bytes(x: Array) -> Array:
    return x.astype(FLOAT8).view(np.uint8)


def per_head(scale: Any) -> Any:
    """A scale as a factor of operands in "bhsd"."""
    return scale[..., None, None] if np.ndim(scale) else np.float32(scale)


@st.composite
def fp8_problems(draw: st.DrawFn) -> tuple[Problem, list[Array], dict[str, Any]]:
    """A problem of the numbers that bytes and scales stand for, the bytes, and the scales."""
    problem = draw(problems(dtypes=(F32,)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if problem.options["out_dtype"] == F64:
        problem.options["out_dtype"] = None
    scales: dict[str, Any] = {}
    operands = []
    for name in "qkv":
        x = getattr(problem, name)
        coded = strided(fp8_bytes(x), draw(st.sampled_from(("plain", "turned", "columns", "every second", "reversed"))))
        sizes = draw(st.sampled_from((None, (), x.shape[1:2], x.shape[:2])))
        if sizes is None and name == "v" and not scales:
            sizes = ()
        wide = coded.view(FLOAT8).astype(np.float32)
        if sizes is not None:
            scale = rng.uniform(0.2, 3, sizes).astype(np.float32)
            scales[f"{name}_scale"] = scale if sizes else float(scale)
            wide = wide * per_head(scale)
        setattr(problem, name, wide)
        operands.append(coded.view(FLOAT8) if draw(st.booleans()) else coded)
    return problem, operands, scales


@given(drawn=fp8_problems(), how=st.sampled_from(("plain", "turned", "columns", "every second", "reversed")))
def test_fp8_is_the_attention_of_the_numbers_it_stands_for(
    drawn: tuple[Problem, list[Array], dict[str, Any]], how: str
) -> None:
    problem, operands, scales = drawn
    turn = problem.options["layout"] == "bshd"
    q, k, v = (x.swapaxes(1, 2) if turn else x for x in operands)
    with tiles(problem.tile):
        out, lse = attention(q, k, v, return_lse=True, **scales, **problem.options)
        into = strided(np.full(out.shape, np.nan, out.dtype), how)
        assert attention(q, k, v, out=into, **scales, **problem.options) is into
    assert (out.dtype, lse.dtype) == problem.dtypes()
    np.testing.assert_array_equal(into, out)
    expected = problem.expected()
    assert_near(out.swapaxes(1, 2) if turn else out, expected.out, expected.out_bound)
    assert_near(lse, expected.lse, expected.lse_bound)


@pytest.mark.parametrize("sizes", ["number", "heads", "batch and heads"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 2), "softcap": 2.0}], ids=str)
def test_fp8_sequences_of_different_lengths(sizes: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    coded = [fp8_bytes(rng.standard_normal(shape)) for shape in ((40, 4, 8), (50, 2, 8), (50, 2, 6))]
    scales = {
        f"{name}_scale": rng.uniform(0.5, 2, {"number": (), "heads": x.shape[1:2]}.get(sizes, (1, x.shape[1]))).astype(
            F32
        )
        for name, x in zip("qkv", coded, strict=True)
    }
    wide = [
        x.view(FLOAT8).astype(np.float32) * scale.reshape(-1, 1)
        for x, scale in zip(coded, scales.values(), strict=True)
    ]
    bounds: dict[str, Any] = {"cu_seqlens_q": [0, 9, 9, 40], "cu_seqlens_k": [0, 0, 20, 50]}
    found = attention(*coded, return_lse=True, **bounds, **scales, **options)
    expected = attention(*wide, return_lse=True, **bounds, **options)
    for x, want in zip(found, expected, strict=True):
        assert x.dtype == F32
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)


def test_fp8_nan_reaches_the_queries_that_see_it_and_no_others() -> None:
    rng = np.random.default_rng(9)
    q, k, v = (fp8_bytes(rng.standard_normal((1, 2, 90, 8))) for _ in range(3))
    clean, clean_lse = attention(q, k, v, causal=True, return_lse=True, q_scale=1.0)
    k[:, :, 50:, 3] = 0x7F
    v[:, :, 60:] = 0xFF
    out, lse = attention(q, k, v, causal=True, return_lse=True, q_scale=1.0)
    np.testing.assert_array_equal(out[:, :, :50], clean[:, :, :50])
    np.testing.assert_array_equal(lse[:, :, :50], clean_lse[:, :, :50])
    assert np.isnan(out[:, :, 50:]).all() and np.isnan(lse[:, :, 50:]).all()
    nobody = ~BlockMask.full(90, 90, device="cpu")
    out, lse = attention(q, k, v, mask=nobody, return_lse=True, q_scale=1.0)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_fp8_scales_from_tiny_to_huge() -> None:
    rng = np.random.default_rng(10)
    q, k, v = (fp8_bytes(rng.standard_normal((2, 3, 20, 16))) for _ in range(3))
    q_scale, k_scale, v_scale = (np.array(x, np.float32) for x in ([1e-6, 1e4, 1], [1e6, 1e-4, 1], [1e4, 1e-6, 1e-30]))
    found = attention(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    expected = attention(q, k, v, q_scale=1.0)
    np.testing.assert_allclose(found / v_scale[:, None, None], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("out_dtype", [None, F16, BFLOAT16, F32], ids=str)
@pytest.mark.fake
def test_fp8_on_a_device_stays_there(out_dtype: Any) -> None:
    fake = fake_cupy.backend()
    rng = np.random.default_rng(11)
    operands = [fp8_bytes(rng.standard_normal((2, h, 30, 8))) for h in (4, 2, 2)]
    scales = {"q_scale": rng.uniform(1, 2, 4).astype(F32), "v_scale": rng.uniform(1, 2, (2, 2)).astype(F32)}
    expected = attention(*operands, k_scale=0.5, out_dtype=out_dtype, return_lse=True, **scales)
    there_ = {name: fake.from_host(x) for name, x in scales.items()}
    found = attention(*map(fake.from_host, operands), k_scale=0.5, out_dtype=out_dtype, return_lse=True, **there_)
    for x, want in zip(found, expected, strict=True):
        assert fake.is_dense(x) and x.dtype == want.dtype
        off = 8e-3 if x.dtype.itemsize == 2 else 1e-5  # a card multiplies in another order
        np.testing.assert_allclose(fake.to_host(x).astype(F32), want.astype(F32), rtol=off, atol=off)


def test_fp8_weights_meet_their_own_keys_in_the_tensor_cores() -> None:
    """The registers of a step of 32 keys, as attention_sm90 packs them, times values as attention_values lays them."""
    rng = np.random.default_rng(12)
    weights, v = rng.integers(0, 9, (16, 32)), rng.integers(0, 9, (1, 1, 32, 5), dtype=np.uint8)
    a = np.zeros((16, 32), int)  # as the instruction has it: register r of thread 4 row + t, byte i
    for row, t, r, i in np.ndindex(8, 4, 4, 4):
        line = row + r % 2 * 8
        score = 16 * (r // 2) + 2 * t + (i if i < 2 else i + 6)  # the scores 8 j + 2 t and + 1 of even and odd j
        a[line, 16 * (r // 2) + 4 * t + i] = weights[line, score]
    np.testing.assert_array_equal(a @ by_columns(v)[0, 0].T.astype(int), weights @ v[0, 0].astype(int))
    assert by_columns(v[:, :, :17]).shape == (1, 1, 5, 32) and not by_columns(v[:, :, :17])[..., 17:].all()
