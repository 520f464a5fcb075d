"""Public calls in a captured graph: what it computes does not depend on what happens to memory before it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device
from .products import BF16, F16, F32, F64, Case, matrix, numbers


@dataclass
class Call:
    """A call that writes into `results`, and what it uses."""

    results: list[Any]
    act: Callable[[], Any]
    #: replaces what the operands have: other values, other index arrays
    assign: Callable[[], None] = lambda: None


def product(device: Device, case: Case) -> Call:
    rng = np.random.default_rng(3)
    A = matrix(rng, case).on(device)
    B = device.lying(numbers(rng, (A.shape[1], case.N or 1), case.dtype), case.b)
    out = device.asarray(np.zeros((A.shape[0], case.N or 1), case.out or case.dtype))

    def assign() -> None:
        A.data = A.data * 2
        A.indices, A.indptr = A.indices.copy(), A.indptr.copy()
        bg.matmul(A, B)  # new lists replace those of the graph

    return Call([out], lambda: bg.matmul(A, B, out=out), assign)


def filled(device: Device) -> Call:
    """Blocks of 3 x 4 are no blocks of gemm_sm90, but their matrix filled up is."""
    call = product(device, Case(F16, (3, 4), 64, rows=16, cols=16))

    def act() -> None:
        with force_kernel("GemmSm90"):
            call.act()

    return Call(call.results, act, call.assign)


def sampled(device: Device, block: int = 32, inner: int = 64) -> Call:
    rng = np.random.default_rng(3)
    A = matrix(rng, Case(F16, (block, block), 64), unique=True).on(device)
    X = device.asarray(numbers(rng, (A.shape[0], inner), F16))
    Y = device.asarray(numbers(rng, (inner, A.shape[1]), F16))
    out = bg.sddmm(X, Y, A)
    return Call([out.data], lambda: bg.sddmm(X, Y, A, out=out))


def attention(device: Device) -> Call:
    rng = np.random.default_rng(3)
    q, k, v = (device.asarray(rng.standard_normal((1, 2, 128, 64)).astype(F16)) for _ in range(3))
    mask = bg.BlockMask.causal(128, block=64, device="cuda")
    out = device.cupy.zeros_like(q)
    return Call([out], lambda: bg.attention(q, k, v, mask=mask, out=out))


def gradients(device: Device) -> Call:
    rng = np.random.default_rng(3)
    q, k, v, dout = (device.asarray(rng.standard_normal((1, 2, 128, 64)).astype(F16)) for _ in range(4))
    mask = bg.BlockMask.causal(128, block=64, device="cuda")
    out, lse = bg.attention(q, k, v, mask=mask, return_lse=True)
    found = {name: device.cupy.zeros_like(q) for name in ("dq", "dk", "dv")}
    return Call([*found.values()], lambda: bg.attention_backward(dout, q, k, v, out, lse, mask=mask, **found))


def decode(device: Device) -> Call:
    rng = np.random.default_rng(3)
    cache = bg.KVCache(2, 2, 256, 64, dtype=F16, device="cuda")
    k, v = (device.asarray(rng.standard_normal((2, 2, 70, 64)).astype(F16)) for _ in range(2))
    cache.append(k, v)
    q = device.asarray(rng.standard_normal((2, 4, 1, 64)).astype(F16))
    out = device.cupy.zeros_like(q)
    return Call([out], lambda: bg.attention_decode(q, cache, out=out))


CALLS: dict[str, tuple[str, Callable[[Device], Call]]] = {
    "few columns": ("sm_80", lambda device: product(device, Case(F16, (32, 64), 3))),
    "Ampere": ("sm_80", lambda device: product(device, Case(F16, (32, 64), 64))),
    "Hopper": ("sm_90a", lambda device: product(device, Case(BF16, (64, 64), 64))),
    "three tf32": ("sm_80", lambda device: product(device, Case(F32, (32, 32), 64))),
    "a copy of B": ("sm_90a", lambda device: product(device, Case(F16, (64, 64), 77, b="C"))),
    "filled": ("sm_90a", filled),
    "one vector": ("sm_80", lambda device: product(device, Case(F64, (4, 4), 1, b="C"))),
    "sampled": ("sm_90a", sampled),
    "sampled, all of X @ Y": ("sm_90a", lambda device: sampled(device, 40, 129)),
    "attention": ("sm_90a", attention),
    "gradients": ("sm_90a", gradients),
    "gradients on Ampere": ("sm_80", gradients),
    "decode": ("sm_90a", decode),
}


def nothing(call: Call) -> None:
    pass


def assigned(call: Call) -> None:
    call.assign()


def dropped(call: Call) -> None:
    call.act = call.assign = lambda: None


@pytest.mark.parametrize("what", [nothing, assigned, dropped])
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_computes_what_the_captured_call_did(name: str, what: Callable[[Call], None], device: Device) -> None:
    arch, make = CALLS[name]
    device.needs(arch)
    call = make(device)
    call.act()
    want = [device.asnumpy(x) for x in call.results]
    graph = device.captured(call.act)
    what(call)
    gc.collect()
    intact = device.bystanders()

    def replay() -> None:
        for _ in range(3):
            for x in call.results:
                x[...] = 0
            graph.launch()
            device.synchronize()
            for x, first in zip(call.results, want, strict=True):
                np.testing.assert_array_equal(device.asnumpy(x), first)
        assert intact()

    device.safely(replay)
