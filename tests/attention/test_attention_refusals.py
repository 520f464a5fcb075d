"""Bad input of `attention` ends in an error that names the argument, what came and what was wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import FLOAT8

from .. import fake_cupy
from .dense_softmax import F16, F32, F64, Array, there, zeros

pytestmark = pytest.mark.fake

U8 = np.dtype(np.uint8)


def attempt(**changes: Any) -> Any:
    """A good call with some of its arguments replaced."""
    good = {"q": zeros(2, 4, 5, 8), "k": zeros(2, 2, 7, 8), "v": zeros(2, 2, 7, 3)}
    arguments = good | changes
    return attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def packed(**changes: Any) -> Any:
    """A good call with sequences of different lengths, with some of its arguments replaced."""
    bounds = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 3, 7]}
    return attempt(**{"q": zeros(5, 4, 8), "k": zeros(7, 2, 8), "v": zeros(7, 2, 3), **bounds, **changes})


def read_only() -> Array:
    out = zeros(2, 4, 5, 3)
    out.flags.writeable = False
    return out


def overlapping(name: str) -> Any:
    x = {"q": zeros(2, 4, 5, 8), "k": zeros(2, 2, 7, 8), "v": zeros(2, 2, 7, 3)}
    longer = zeros(2 * 4 * 5 * 3 + x[name].size)
    x[name] = longer[: x[name].size].reshape(x[name].shape)
    at = x[name].size - 1
    return attempt(**x, out=longer[at : at + 120].reshape(2, 4, 5, 3))


def on_device(**changes: Any) -> Any:
    """A good call on a fake card with some of its arguments replaced."""
    return attempt(**{"q": there(2, 4, 5, 8), "k": there(2, 2, 7, 8), "v": there(2, 2, 7, 3), **changes})


def packed_on_device(**changes: Any) -> Any:
    return packed(**{"q": there(5, 4, 8), "k": there(7, 2, 8), "v": there(7, 2, 3), **changes})


def fp8(**changes: Any) -> Any:
    """A good call of fp8 with some of its arguments replaced."""
    good = {"q": zeros(2, 4, 5, 8, dtype=U8), "k": zeros(2, 2, 7, 8, dtype=U8), "v": zeros(2, 2, 7, 3, dtype=U8)}
    return attempt(**{**good, "q_scale": 1.0, **changes})


def fp8_on_device(**changes: Any) -> Any:
    good = {"q": there(2, 4, 5, 8, dtype=U8), "k": there(2, 2, 7, 8, dtype=U8), "v": there(2, 2, 7, 3, dtype=U8)}
    return fp8(**{**good, **changes})


def four(*values: float, dtype: Any = F32) -> Array:
    return np.array(values, dtype)


class OnTheGPU:
    """Looks as the array of a library without CuPy does."""

    def __dlpack__(self) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


class Foreign:
    """An array of another library, in the memory of the host."""

    def __init__(self, x: Any) -> None:
        self.x = np.asarray(x)

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def mask(q: int = 5, k: int = 7, heads: tuple[int, int] = (1, 1)) -> BlockMask:
    return BlockMask.random(q, k, per_row=1, heads=heads, block=16, device="cpu")


WINDOW = "window: wanted two integers (left, right) from -1 on, got"
BYTES, ABOVE_0 = "wanted fp8 numbers as uint8, since a scale is given, got", "wanted a finite number above 0"
SIZES = "wanted a number or float32 of shape"
REFUSED: list[tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    # operands
    (lambda: attempt(q=zeros(4, 5, 8)), ValueError, ("q: wanted 4 dimensions", "bhsd", "(4, 5, 8)")),
    (lambda: attempt(v=zeros(2, 2, 7, 3, 1)), ValueError, ("v: wanted 4 dimensions", "(2, 2, 7, 3, 1)")),
    (lambda: attempt(q=[[[[1.0]]]]), TypeError, ("q: wanted a NumPy or CuPy array, got a list",)),
    (lambda: attempt(q=None), TypeError, ("q: wanted a NumPy or CuPy array, got None",)),
    (lambda: attempt(k=None), TypeError, ("k: wanted a dense array on 'cpu', where q is, got None",)),
    (lambda: attempt(v=[[[[1.0]]]]), TypeError, ("v: wanted a dense array on 'cpu'", "got a list")),
    (lambda: attempt(k=zeros(3, 2, 7, 8)), ValueError, ("k: wanted a batch of 2", "got 3")),
    (lambda: attempt(v=zeros(1, 2, 7, 3)), ValueError, ("v: wanted a batch of 2", "got 1")),
    (lambda: attempt(k=zeros(2, 3, 7, 8), v=zeros(2, 3, 7, 3)), ValueError, ("k: wanted a number of heads", "4", "3")),
    (lambda: attempt(k=zeros(2, 0, 7, 8), v=zeros(2, 0, 7, 3)), ValueError, ("k: wanted a number of heads", "got 0")),
    (lambda: attempt(k=zeros(2, 8, 7, 8), v=zeros(2, 8, 7, 3)), ValueError, ("k: wanted a number of heads", "got 8")),
    (lambda: attempt(v=zeros(2, 4, 7, 3)), ValueError, ("v: wanted 2 heads as k has, got 4",)),
    (lambda: attempt(v=zeros(2, 2, 6, 3)), ValueError, ("v: wanted length 7 as k has, got 6",)),
    (lambda: attempt(k=zeros(2, 2, 7, 9)), ValueError, ("k: wanted head dim 8 as q has, got 9",)),
    (lambda: attempt(layout="bshd"), ValueError, ("k: wanted a number of heads", "5", "7")),
    (lambda: attempt(k=zeros(2, 2, 7, 8, dtype=F16)), TypeError, ("k: wanted float32 as q has, got float16",)),
    (lambda: attempt(v=zeros(2, 2, 7, 3, dtype=F64)), TypeError, ("v: wanted float32 as q has, got float64",)),
    (lambda: attempt(q=zeros(2, 4, 5, 8, dtype=int)), TypeError, ("q: does not support dtype int64", "float16")),
    (lambda: attempt(q=zeros(2, 4, 5, 8, dtype=complex)), TypeError, ("q: does not support dtype complex128",)),
    # places
    (
        lambda: attempt(q=there(2, 4, 5, 8)),
        TypeError,
        ("k: wanted a dense array on 'cuda'", "got numpy ndarray", "moved"),
    ),
    (
        lambda: attempt(k=there(2, 2, 7, 8)),
        TypeError,
        ("k: wanted a dense array on 'cpu'", "ndarray", "moved silently"),
    ),
    (lambda: attempt(v=OnTheGPU()), TypeError, ("v: wanted a dense array on 'cpu', where q is, got tests OnTheGPU",)),
    (lambda: attempt(out=OnTheGPU()), TypeError, ("out: wanted a dense array on 'cpu', where q is", "OnTheGPU")),
    (
        lambda: attempt(out=there(2, 4, 5, 3)),
        TypeError,
        ("out: wanted a dense array on 'cpu', where q is, got cupy ndarray",),
    ),
    (lambda: on_device(out=zeros(2, 4, 5, 3)), TypeError, ("out: wanted a dense array on 'cuda'", "got numpy ndarray")),
    (lambda: on_device(k=zeros(2, 2, 7, 8)), TypeError, ("k: wanted a dense array on 'cuda'", "got numpy ndarray")),
    (lambda: on_device(v=OnTheGPU()), TypeError, ("v: a tests OnTheGPU cannot be read through DLPack",)),
    (
        lambda: attempt(mask=mask().to_device(fake_cupy.backend().name)),
        TypeError,
        ("mask: wanted a mask on 'cpu', where q is, got one on 'cuda'", "mask.to_device('cpu') brings it there"),
    ),
    (
        lambda: on_device(mask=mask()),
        TypeError,
        ("mask: wanted a mask on 'cuda', where q is, got one on 'cpu'", "mask.to_device('cuda') brings it there"),
    ),
    (
        lambda: packed(cu_seqlens_q=fake_cupy.backend().from_host(np.array([0, 2, 5]))),
        TypeError,
        ("cu_seqlens_q: wanted a dense array on 'cpu', where q is",),
    ),
    # masks
    (lambda: attempt(mask=np.ones((5, 7), bool)), TypeError, ("mask: wanted a BlockMask, got ndarray", "from_dense")),
    (lambda: attempt(mask=mask(7, 5)), ValueError, ("mask: wanted shape (5, 7)", "got (7, 5)")),
    (lambda: attempt(mask=mask(heads=(3, 1))), ValueError, ("mask: wanted one pattern or 2 along the batch, got 3",)),
    (lambda: attempt(mask=mask(heads=(1, 3))), ValueError, ("mask: wanted 1 or 2 or 4 patterns", "heads, got 3")),
    (lambda: packed(mask=mask()), ValueError, ("mask: got one together with cu_seqlens_q",)),
    # options
    (lambda: attempt(layout="sbhd"), ValueError, ("layout: wanted 'bhsd' or 'bshd', got 'sbhd'",)),
    (lambda: attempt(layout=["bhsd"]), ValueError, ("layout: wanted 'bhsd' or 'bshd', got ['bhsd']",)),
    (lambda: attempt(align="center"), ValueError, ("align: wanted 'bottom-right' or 'top-left', got 'center'",)),
    (lambda: attempt(causal=1), TypeError, ("causal: wanted True or False, got 1",)),
    (lambda: attempt(return_lse="yes"), TypeError, ("return_lse: wanted True or False, got 'yes'",)),
    (lambda: attempt(window=(3,)), ValueError, (WINDOW, "(3,)")),
    (lambda: attempt(window=(1, 2, 3)), ValueError, (WINDOW, "(1, 2, 3)")),
    (lambda: attempt(window=(-2, 3)), ValueError, (WINDOW, "(-2, 3)")),
    (lambda: attempt(window=(3, -2)), ValueError, (WINDOW, "(3, -2)")),
    (lambda: attempt(window=()), ValueError, (WINDOW, "()")),
    (lambda: attempt(window=5), TypeError, (WINDOW, "5")),
    (lambda: attempt(window=(1.0, 2)), TypeError, (WINDOW, "(1.0, 2)")),
    (lambda: attempt(window=(True, 2)), TypeError, (WINDOW, "(True, 2)")),
    (lambda: attempt(window=(None, 2)), TypeError, (WINDOW, "(None, 2)")),
    (lambda: attempt(scale=math.inf), ValueError, ("scale: wanted a finite number that float32 can hold, got inf",)),
    (lambda: attempt(scale=math.nan), ValueError, ("scale: wanted a finite number", "nan")),
    (lambda: attempt(scale=1e39), ValueError, ("scale: wanted a finite number that float32 can hold, got 1e+39",)),
    (lambda: attempt(scale=10**400), ValueError, ("scale: wanted a finite number",)),
    (lambda: attempt(scale="1"), TypeError, ("scale: wanted a finite number", "'1'")),
    (lambda: attempt(scale=True), TypeError, ("scale: wanted a finite number", "True")),
    (lambda: attempt(scale=1j), TypeError, ("scale: wanted a finite number", "1j")),
    (lambda: attempt(scale=np.ones(2)), TypeError, ("scale: wanted a finite number",)),
    (lambda: attempt(softcap=0), ValueError, ("softcap: wanted a finite number above 0", "got 0")),
    (lambda: attempt(softcap=-1.0), ValueError, ("softcap: wanted a finite number above 0", "got -1.0")),
    (lambda: attempt(softcap=math.inf), ValueError, ("softcap: wanted a finite number above 0", "inf")),
    (lambda: attempt(softcap=1e-50), ValueError, ("softcap: wanted a finite number above 0", "float32", "1e-50")),
    (lambda: attempt(softcap="30"), TypeError, ("softcap: wanted a finite number above 0", "'30'")),
    # lengths
    (lambda: packed(cu_seqlens_k=None), ValueError, ("cu_seqlens_k: wanted together", "None")),
    (lambda: packed(cu_seqlens_q=None), ValueError, ("cu_seqlens_q: wanted together", "None")),
    (lambda: packed(q=zeros(1, 5, 4, 8)), ValueError, ("q: wanted 3 dimensions", "total length", "(1, 5, 4, 8)")),
    (lambda: packed(cu_seqlens_q=[0, 2, 4]), ValueError, ("cu_seqlens_q: wanted 5, the length of q", "got 4")),
    (lambda: packed(cu_seqlens_k=[0, 3, 8]), ValueError, ("cu_seqlens_k: wanted 7, the length of k", "got 8")),
    (
        lambda: packed(cu_seqlens_q=[1, 2, 5]),
        ValueError,
        ("cu_seqlens_q: wanted bounds that climb from 0", "[1, 2, 5]"),
    ),
    (lambda: packed(cu_seqlens_q=[0, 6, 5]), ValueError, ("cu_seqlens_q: wanted bounds that climb", "[0, 6, 5]")),
    (lambda: packed(cu_seqlens_q=[[0, 2, 5]]), ValueError, ("cu_seqlens_q: wanted", "one dimension", "(1, 3)")),
    (lambda: packed(cu_seqlens_q=[]), ValueError, ("cu_seqlens_q: wanted", "(0,)")),
    (lambda: packed(cu_seqlens_q=[0.0, 2.0, 5.0]), TypeError, ("cu_seqlens_q: wanted integers", "float64")),
    (lambda: packed(cu_seqlens_q=5), TypeError, ("cu_seqlens_q: wanted", "got an int")),
    (lambda: packed(cu_seqlens_q=Foreign([0, 6, 5])), ValueError, ("cu_seqlens_q: wanted bounds that climb from 0",)),
    (lambda: packed(cu_seqlens_k=Foreign([0, 3, 8])), ValueError, ("cu_seqlens_k: wanted 7, the length of k", "8")),
    (
        lambda: packed_on_device(cu_seqlens_q=[0, 2, 4]),
        ValueError,
        ("cu_seqlens_q: wanted 5, the length of q", "got 4"),
    ),
    (lambda: packed_on_device(cu_seqlens_k=[0, 7]), ValueError, ("cu_seqlens_k: wanted 3 numbers", "got 2")),
    (lambda: packed_on_device(cu_seqlens_q=there(3)), TypeError, ("cu_seqlens_q: wanted integers, got dtype float32",)),
    (
        lambda: packed_on_device(cu_seqlens_q=there(1, dtype=int), cu_seqlens_k=there(1, dtype=int)),
        ValueError,
        ("cu_seqlens_q: wanted",),
    ),
    (lambda: packed(cu_seqlens_k=[0, 7]), ValueError, ("cu_seqlens_k: wanted 3 numbers", "got 2")),
    # out
    (lambda: attempt(out=zeros(2, 4, 5, 8)), ValueError, ("out: wanted float32 of shape (2, 4, 5, 3)", "(2, 4, 5, 8)")),
    (lambda: attempt(out=zeros(2, 4, 5, 3), out_dtype=F16), ValueError, ("out: wanted float16", "got float32")),
    (lambda: attempt(out=zeros(2, 4, 5, 3, dtype=int)), TypeError, ("out: does not support dtype int64",)),
    (lambda: attempt(out=[0.0]), TypeError, ("out: wanted a dense array on 'cpu', where q is, got a list",)),
    (lambda: attempt(out=read_only()), ValueError, ("out: array is read-only",)),
    (lambda: attempt(out_dtype=int), TypeError, ("out_dtype: does not support dtype int64",)),
    (lambda: overlapping("q"), ValueError, ("out: overlaps q",)),
    (lambda: overlapping("k"), ValueError, ("out: overlaps k",)),
    (lambda: overlapping("v"), ValueError, ("out: overlaps v",)),
    (
        lambda: attempt(out=np.lib.stride_tricks.as_strided(zeros(3), (2, 4, 5, 3), (0, 0, 0, 4), writeable=True)),
        ValueError,
        ("out: elements share memory",),
    ),
    # fp8
    (lambda: fp8(q_scale=None), TypeError, ("q: does not support dtype uint8", "float16")),
    (lambda: fp8(q=zeros(2, 4, 5, 8, dtype=FLOAT8), q_scale=None), TypeError, ("q: does not support dtype float8",)),
    (lambda: attempt(q_scale=1.0), TypeError, (f"q: {BYTES} float32",)),
    (lambda: fp8(k=zeros(2, 2, 7, 8, dtype=F16)), TypeError, (f"k: {BYTES} float16",)),
    (lambda: fp8(v=zeros(2, 2, 7, 3, dtype=np.int8)), TypeError, (f"v: {BYTES} int8",)),
    (lambda: fp8(q_scale=None, v_scale=2.0, v=zeros(2, 2, 7, 3)), TypeError, (f"v: {BYTES} float32",)),
    (lambda: fp8(q=zeros(4, 5, 8, dtype=U8)), ValueError, ("q: wanted 4 dimensions", "(4, 5, 8)")),
    (lambda: fp8(q_scale=0), ValueError, (f"q_scale: {ABOVE_0}", "got 0")),
    (lambda: fp8(k_scale=-1.5), ValueError, (f"k_scale: {ABOVE_0}", "got -1.5")),
    (lambda: fp8(v_scale=math.nan), ValueError, (f"v_scale: {ABOVE_0}", "got nan")),
    (lambda: fp8(v_scale=math.inf), ValueError, (f"v_scale: {ABOVE_0}", "got inf")),
    (lambda: fp8(v_scale=1e39), ValueError, (f"v_scale: {ABOVE_0}", "got 1e+39")),
    (lambda: fp8(v_scale=1e-60), ValueError, (f"v_scale: {ABOVE_0}", "got 1e-60")),
    (lambda: fp8(q_scale="1"), TypeError, (f"q_scale: {ABOVE_0}", "got '1'")),
    (lambda: fp8(q_scale=True), TypeError, (f"q_scale: {ABOVE_0}", "got True")),
    (lambda: fp8(q_scale=1j), TypeError, (f"q_scale: {ABOVE_0}", "got 1j")),
    (lambda: fp8(k_scale=[1.0, 2.0]), TypeError, (f"k_scale: {ABOVE_0}", "[1.0, 2.0]")),
    (lambda: fp8(q_scale=four(1, 2, 3)), ValueError, (f"q_scale: {SIZES} (4,) or (2, 4)", "got float32 of shape (3,)")),
    (lambda: fp8(k_scale=four(1, 2, 3, 4)), ValueError, (f"k_scale: {SIZES} (2,) or (2, 2)", "shape (4,)")),
    (lambda: fp8(v_scale=np.ones((1, 2), F32)), ValueError, (f"v_scale: {SIZES} (2,) or (2, 2)", "shape (1, 2)")),
    (lambda: fp8(v_scale=np.ones((2, 2, 1, 1), F32)), ValueError, (f"v_scale: {SIZES} (2,)", "shape (2, 2, 1, 1)")),
    (lambda: fp8(q_scale=four(1, 2, 3, 4, dtype=F64)), ValueError, (f"q_scale: {SIZES} (4,)", "got float64")),
    (lambda: fp8(q_scale=four(1, 2, 3, 4, dtype=int)), ValueError, (f"q_scale: {SIZES} (4,)", "got int64")),
    *(
        (lambda bad=bad: fp8(q_scale=four(1, 2, bad, 4)), ValueError, ("q_scale: wanted", "above 0", f"{bad:g}"))
        for bad in (0.0, -3.0, math.nan, math.inf)
    ),
    (lambda: fp8(q_scale=there(4)), TypeError, ("q_scale: wanted a number or a dense array on 'cpu', where q is",)),
    (lambda: fp8(k_scale=OnTheGPU()), TypeError, ("k_scale: wanted a", "OnTheGPU")),
    (
        lambda: fp8_on_device(v_scale=four(1, 2)),
        TypeError,
        ("v_scale: wanted a number or a dense array on 'cuda', where q is, got numpy ndarray",),
    ),
    (lambda: fp8_on_device(v_scale=there(4)), ValueError, (f"v_scale: {SIZES} (2,) or (2, 2)", "shape (4,)")),
    (lambda: fp8_on_device(v_scale=there(2, dtype=F64)), ValueError, (f"v_scale: {SIZES} (2,)", "got float64")),
    (
        lambda: fp8(out_dtype=F64),
        TypeError,
        ("out_dtype: does not support dtype float64", "float32, float16, bfloat16"),
    ),
    (lambda: fp8(out_dtype=U8), TypeError, ("out_dtype: does not support dtype uint8",)),
    (lambda: fp8(out=zeros(2, 4, 5, 3, dtype=F64)), TypeError, ("out: does not support dtype float64",)),
    (lambda: fp8(out=zeros(2, 4, 5, 3), out_dtype=F16), ValueError, ("out: wanted float16", "got float32")),
    (lambda: fp8(out=zeros(2, 4, 5, 8)), ValueError, ("out: wanted float32 of shape (2, 4, 5, 3)", "(2, 4, 5, 8)")),
    (lambda: fp8(out=[0.0]), TypeError, ("out: wanted a dense array on 'cpu', where q is, got a list",)),
]


@pytest.mark.parametrize(("call", "error", "texts"), REFUSED, ids=[f"{n}: {r[2][0]}" for n, r in enumerate(REFUSED)])
def test_bad_input_is_refused_by_name(call: Callable[[], Any], error: type[Exception], texts: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        call()
    for text in texts:
        assert text in str(raised.value)


def test_the_good_calls_that_bad_ones_are_made_from_are_good() -> None:
    assert attempt().shape == (2, 4, 5, 3)
    assert fp8().dtype == fp8_on_device().dtype == F32
    assert fp8(q_scale=np.ones(4, F32), k_scale=np.array(2), v_scale=np.ones((2, 2), F32)).shape == (2, 4, 5, 3)
    assert packed().shape == (5, 4, 3)
    assert packed(cu_seqlens_q=Foreign([0, 2, 5])).shape == (5, 4, 3)
    assert fake_cupy.backend().is_dense(on_device()) and fake_cupy.backend().is_dense(packed_on_device())
    assert (
        attempt(mask=mask(heads=(2, 4)), scale=np.float32(2), softcap=np.array(3), window=[np.int64(1), 2]).any() == 0
    )


def test_refused_calls_write_nothing() -> None:
    out = np.full((2, 4, 5, 3), 7, np.float32)
    for options in ({"window": (3,)}, {"softcap": 0}, {"mask": mask(7, 5)}, {"scale": math.inf}):
        with pytest.raises(ValueError, match="wanted"):
            attempt(out=out, **options)
    assert (out == 7).all()


def test_refused_calls_of_fp8_write_nothing() -> None:
    out = np.full((2, 4, 5, 3), 7, np.float32)
    for options in ({"q_scale": -1.0}, {"k_scale": "1"}, {"v_scale": four(1, np.nan)}, {"q": zeros(2, 4, 5, 8)}):
        with pytest.raises((TypeError, ValueError), match="wanted"):
            fp8(out=out, **options)
    with pytest.raises(TypeError, match="out_dtype"):
        fp8(out=out, out_dtype=F64)
    assert (out == 7).all()
