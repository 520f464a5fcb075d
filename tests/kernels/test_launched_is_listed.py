"""What is launched can be compiled ahead of time: the index of kernels lists it. Nothing is computed here.

Gradients of attention have a list of their own, in tests/attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import _kernel_index
from bsrgemm._kernels.jit import KernelSpec
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Emulated
from ..fake_cupy import Card, Policy, installed
from .products import BF16, C64, C128, E4M3, F16, F32, F64, I8, I32, Case, matrix

DTYPES = (F16, BF16, F32, F64, C64, C128, I8, I32, np.dtype(np.uint8), np.dtype(np.int64))
ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_120")
#: Kernels of which the list has a few sizes: those of heads, or of blocks and columns of B, are compiled in.
EXAMPLES = {"attention_simt", "spmm", "spmm_f64", "spmv_small"}


@cache
def listed(arch: str) -> frozenset[KernelSpec]:
    return frozenset(kernel.spec() for kernel in _kernel_index.every(DTYPES) if kernel.runs_on(arch))


@pytest.fixture(params=ARCHS)
def device(request: pytest.FixtureRequest) -> Iterator[Emulated]:
    card = Card(request.param, policy=Policy.RECORD)
    with installed(card) as cupy:
        yield Emulated(card, cupy)


def ones(device: Emulated, shape: tuple[int, ...], dtype: Any) -> Any:
    return device.asarray(np.zeros(shape, np.uint8) if dtype == E4M3 else np.ones(shape, dtype))


def masks(dtype: Any) -> Iterator[dict[str, Any]]:
    yield from ({}, {"causal": True}, {"softcap": 2.0}, {"softcap": 0.1}, {"scale": -0.5})
    for block in (16, 64, 128):
        yield {"mask": bg.BlockMask.random(70, 90, per_row=1, block=block, device="cuda")}


def forward(device: Emulated) -> None:
    sizes = ((64, 64), (40, 24), (80, 80), (96, 128), (32, 192), (256, 129), (128, 128))
    for dtype, (D, D_v) in itertools.product((F16, BF16, E4M3), sizes):
        shapes = ((1, 2, 70, D), (1, 1, 90, D), (1, 1, 90, D_v))
        q, k, v = (ones(device, x, dtype) for x in shapes)
        many = ones(device, (64, 4, 70, D), dtype), *(ones(device, (64, 1, *x[2:]), dtype) for x in shapes[1:])
        for options in masks(dtype):
            scales = {"q_scale": 1.0} if dtype == E4M3 else {}
            if dtype != E4M3 or device.arch == "sm_90a":
                for out in (F16, BF16, F32):
                    bg.attention(q, k, v, out_dtype=out, **scales, **options)
                    if "mask" not in options:
                        bg.attention(*many, out_dtype=out, **scales, **options)


def plain_forward(device: Emulated) -> None:
    """At the sizes of which the list has examples."""
    for dtype, D, options in itertools.product(
        (F16, BF16, F32, F64, E4M3), (32, 64, 256), ({}, {"softcap": 2.0}, {"scale": -1.0})
    ):
        q = ones(device, (1, 2, 40, D), dtype)
        with force_kernel("AttentionSimt"):
            bg.attention(q, q, q, **options, **({"q_scale": 1.0} if dtype == E4M3 else {}))


def decode(device: Emulated) -> None:
    if device.arch == "sm_75":
        return
    for dtype, (D, D_v), heads in itertools.product(
        (F16, BF16), ((64, 64), (128, 128), (192, 128), (256, 80)), (2, 40)
    ):
        cache = bg.KVCache(2, 2, 256, D, value_dim=D_v, dtype=dtype, device="cuda")
        cache.append(ones(device, (2, 2, 70, D), dtype), ones(device, (2, 2, 70, D_v), dtype))
        bg.attention_decode(ones(device, (2, heads, 1, D), dtype), cache)
        bg.attention_decode(ones(device, (2, heads, 16, D), dtype), cache)


def products(device: Emulated) -> None:
    rng = np.random.default_rng(3)
    for dtype, block in itertools.product(
        (F16, BF16, F32, F64, C64, C128, I8), ((4, 4), (8, 4), (16, 16), (32, 32), (64, 64), (48, 80))
    ):
        A = matrix(rng, Case(dtype, block, 1), unique=True).on(device)
        for N, order in itertools.product((1, 3, 16, 64, 200), "CF"):
            B = ones(device, (A.shape[1], N), dtype)
            bg.matmul(A, B if order == "C" else device.cupy.asfortranarray(B))
            bg.matmul(A.T, ones(device, (A.shape[0], N), dtype))
        bg.sddmm(ones(device, (A.shape[0], 64), dtype), ones(device, (64, A.shape[1]), dtype), A)


CALLS: tuple[Callable[[Emulated], None], ...] = (
    forward, plain_forward, decode, products,
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_what_is_launched_is_listed(call: Callable[[Emulated], None], device: Emulated) -> None:
    call(device)
    launched = {x.spec for x in device.card.launches}
    assert launched or (call is decode and device.arch == "sm_75")
    missing = launched - listed(device.arch)
    missing = {x for x in missing if x.entry not in EXAMPLES or call is plain_forward}
    assert not missing, f"{len(missing)} of {len(launched)}, such as {next(iter(missing))}"
