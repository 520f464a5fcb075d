"""Public calls on a card compute what they compute on the CPU: with their own lists, conversions, masks and graphs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg

from ..devices import Device
from .products import F16, F64


class Operands:
    """The same operands for the CPU and for a card; `put` brings an array there."""

    def __init__(self, put: Callable[[Any], Any], device: str) -> None:
        rng = np.random.default_rng(5)
        self.put, self.device = put, device
        dense = (rng.integers(-2, 3, (6, 6, 8, 8)) * (rng.random((6, 6, 1, 1)) < 0.5)).swapaxes(1, 2).reshape(48, 48)
        self.D, self.b = put(dense.astype(F64)), put(np.ones(48))
        self.A = self.bsr(dense, 8)
        self.S = self.bsr(dense @ dense.T + 200 * np.eye(48), 8)
        self.L = self.bsr(np.tril(dense @ dense.T + 200 * np.eye(48)), 8)
        self.H = self.bsr(np.kron(dense[:4, :4], np.ones((64, 64))), 64, F16)
        self.X = put(rng.integers(-2, 3, (256, 72)).astype(F16))
        self.q, self.k, self.v, self.dout = (put(rng.standard_normal((1, 2, 128, 64)).astype(F16)) for _ in range(4))
        self.mask = bg.BlockMask.causal(128, block=64, device=device)

    def bsr(self, dense: Any, side: int, dtype: Any = F64) -> Any:
        return bg.bsr_array(self.put(np.asarray(dense, dtype)), blocksize=(side, side))

    def gradients(self) -> Any:
        qkv = self.q, self.k, self.v
        out, lse = bg.attention(*qkv, mask=self.mask, return_lse=True)
        return bg.attention_backward(self.dout, *qkv, out, lse, mask=self.mask)

    def decoded(self) -> Any:
        cache = bg.KVCache(1, 2, 256, 64, dtype=F16, device=self.device)
        cache.append(self.k[:, :, :100], self.v[:, :, :100])
        cache.append(self.k[:, :, 100:], self.v[:, :, 100:])
        return bg.attention_decode(self.q[:, :, :1], cache)

    def written(self) -> Any:
        B = self.A.copy()
        B[:8, 8:16] = 3.0
        B.eliminate_zeros()
        return B


PRODUCTS: dict[str, Callable[[Operands], Any]] = {
    "A @ B": lambda x: x.A @ x.D,
    "A.T @ B": lambda x: x.A.T @ x.D,
    "B @ A": lambda x: x.D @ x.A,
    "A @ x": lambda x: x.A @ x.b,
    "A @ A": lambda x: x.A @ x.A,
    "16 bits": lambda x: x.H @ x.X,
    "16 bits, A @ A": lambda x: x.H @ x.H,
    "complex": lambda x: (x.A * (1 + 2j)) @ x.D.astype(np.complex128),
    "sddmm": lambda x: bg.sddmm(x.D, x.D, x.A),
    "matmul_backward": lambda x: bg.matmul_backward(x.D, x.A, x.D),
    "plan": lambda x: bg.plan(x.A, x.A)(x.A, x.A),
}
MATRICES: dict[str, Callable[[Operands], Any]] = {
    "add": lambda x: x.A + x.A.T,
    "compare": lambda x: x.A > 1,
    "multiply": lambda x: x.A.multiply(x.A.T),
    "sum": lambda x: x.A.sum(axis=0),
    "max": lambda x: x.A.max(axis=1),
    "transpose": lambda x: x.A.T.copy(),
    "to csr and back": lambda x: bg.bsr_array(x.A.tocsr(), blocksize=(4, 4)),
    "to coo": lambda x: x.A.tocoo(),
    "other blocks": lambda x: x.A.tobsr(blocksize=(4, 16)),
    "slice": lambda x: x.A[8:24, :16],
    "assign": Operands.written,
    "diagonal": lambda x: x.A.diagonal(),
    "vstack": lambda x: bg.vstack([x.A, x.A]),
    "kron": lambda x: bg.kron(x.A, x.A),
    "copy": lambda x: copy.deepcopy(x.A),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.A)),
}
ATTENTION: dict[str, Callable[[Operands], Any]] = {
    "attention": lambda x: bg.attention(x.q, x.k, x.v),
    "causal": lambda x: bg.attention(x.q, x.k, x.v, causal=True),
    "mask": lambda x: bg.attention(x.q, x.k, x.v, mask=x.mask),
    "window": lambda x: bg.attention(x.q, x.k, x.v, window=(10, 3)),
    "backward": Operands.gradients,
    "decode": Operands.decoded,
}
SOLVERS: dict[str, Callable[[Operands], Any]] = {
    "cg": lambda x: bg.linalg.cg(x.S, x.b, rtol=1e-10),
    "gmres": lambda x: bg.linalg.gmres(x.S, x.b, rtol=1e-10),
    "bicgstab": lambda x: bg.linalg.bicgstab(x.S, x.b, rtol=1e-10),
    "block_jacobi": lambda x: bg.linalg.cg(x.S, x.b, rtol=1e-10, M=bg.linalg.block_jacobi(x.S)),
    "multigrid": lambda x: bg.linalg.cg(x.S, x.b, rtol=1e-10, M=bg.linalg.smoothed_aggregation(x.S)),
    "ilu0": lambda x: bg.linalg.cg(x.S, x.b, rtol=1e-10, M=bg.linalg.ilu0(x.S)),
    "triangular": lambda x: bg.linalg.spsolve_triangular(x.L, x.b),
}


def on_host(x: Any) -> list[np.ndarray[Any, Any]]:
    """Results as dense arrays of the host."""
    if isinstance(x, tuple):
        return [array for part in x for array in on_host(part)]
    x = x.toarray() if hasattr(x, "toarray") else x
    return [np.asarray(x.get() if hasattr(x, "get") else x)]


def assert_as_on_the_cpu(call: Callable[[Operands], Any], device: Device) -> None:
    want = on_host(call(Operands(np.asarray, "cpu")))
    got = on_host(call(Operands(device.asarray, "cuda")))
    assert len(got) == len(want)
    for mine, wanted in zip(got, want, strict=True):
        assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape)
        bound = 1e-2 if mine.dtype == F16 else 1e-9
        np.testing.assert_allclose(mine.astype(np.complex128), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, arch: str, device: Device) -> None:
    device.needs(arch)
    assert_as_on_the_cpu(PRODUCTS[name], device)


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name: str, device: Device) -> None:
    assert_as_on_the_cpu(MATRICES[name], device)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, arch: str, device: Device) -> None:
    device.needs(arch)
    assert_as_on_the_cpu(ATTENTION[name], device)


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers(name: str, device: Device) -> None:
    assert_as_on_the_cpu(SOLVERS[name], device)
