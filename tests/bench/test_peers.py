"""Peers refuse properly: ImportError where they are not installed, NotImplementedError for what they do not serve."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bench.cases.attention import Attention
from bench.cases.products import Product
from bench.measure import Run
from bench.peers import attention, gradients, products
from bench.place import Place

PLACE = Place("cpu", quick=True)
LIBRARIES = ("torch", "flash_attn", "flash_attn_interface", "cudnn", "warp", "pyamg")


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    products._warp.cache_clear()


@pytest.mark.usefixtures("nothing_installed")
def test_libraries_that_are_missing_raise_import_errors() -> None:
    q = np.zeros((1, 1, 16, 16), np.float16)
    A, B = bg.eye(16, blocksize=(16, 16), dtype="float32"), np.zeros((16, 4), np.float32)
    calls = [
        lambda make=make: make(q, q, q) for make in attention.PEERS.values() if make is not attention.block_sparse_cudnn
    ]
    x, case = SimpleNamespace(q=q, k=q, v=q, dout=q, mask=None), Attention(1, 1, 16, 16)
    blocks = Attention(1, 1, 16, 16, blocks=(16, 1))
    calls += [lambda make=make: make(x, case) for name, make in gradients.PEERS.items() if name != "cuDNN BSA"]
    calls += [lambda: gradients.block_sparse_cudnn(x, blocks), lambda: products.torch_bsr(A, B, B)]
    calls += [lambda: products.warp_bsr(A, B[:, 0], B[:, 0])]
    for call in calls:
        with pytest.raises(ImportError):
            call()


@pytest.mark.usefixtures("nothing_installed")
def test_a_run_names_what_is_missing_and_goes_on() -> None:
    run = Run(PLACE)
    row = run.row(Product(900, (3, 3), 0.1, 1, "float64", "near diagonal"))
    assert list(run.absent) == ["warp"] and set(row["peers"]) == {"scipy bsr", "scipy csr"}


def test_peers_of_the_host_agree_with_us() -> None:
    for case in (Product(64, (16, 16), 0.5, 4, "float16"), Attention(1, 2, 64, 16, causal=True, kind="float32"),
                 Attention(1, 2, 64, 16, blocks=(16, 2), kv_heads=1, kind="float32"),
                 Attention(1, 2, 64, 16, window=7, kind="float32")):  # fmt: skip
        ready = case.ready(PLACE)
        assert ready.peers
        for make in ready.peers.values():
            peer = make()
            assert (peer.error or ready.error)(peer.call()) <= 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: products._cuda_type(np.dtype(np.int8)), "does not support int8"),
        (lambda: attention.block_lists(bg.BlockMask.causal(32, block=16, device="cpu")), "masks of whole blocks only"),
        (lambda: _dense_of("float64", 1 << 16).cublas(), "a dense A would take more than 8 GiB"),
    ],
)
def test_problems_that_a_peer_does_not_serve_are_refused_with_the_reason(make: Any, said: str) -> None:
    with pytest.raises(NotImplementedError, match=said):
        make()


def _dense_of(kind: str, n: int = 64) -> Any:
    from bench.cases.products import _Dense

    return _Dense(Product(n, (32, 32), 0.5, 1, kind), PLACE, PLACE.draw((n,), kind))


def test_blocks_become_the_columns_of_blocked_ell() -> None:
    blocks = np.arange(16.0).reshape(4, 2, 2)
    np.testing.assert_array_equal(products.blocked_ell(blocks, 2)[:2], [[0, 1, 4, 5], [2, 3, 6, 7]])
