"""Captured graphs on the emulator: what their kernels read and write is there, whatever becomes of the operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._array.leaves import leaf
from bsrgemm._attention import checks, heuristics
from bsrgemm._attention.cuda import CudaAttention
from bsrgemm._attention.host import ENGINE
from bsrgemm._backend.base import Blocks
from bsrgemm._kernels import graphs
from bsrgemm._products.engine import ENGINES

from ..products.test_launch import Card as Backend
from ..products.test_launch import CardProducts
from . import emulator
from .captures import Card
from .emulator import Array

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="there is neither g++ nor clang++ on the PATH")


class Recorded(Backend):
    """The GPU's backend, for arrays of the card that is emulated."""

    name = "recorded"
    index_class = None  # arrays of indices are not watched

    def empty(self, shape: Any, dtype: Any) -> Any:
        return graphs.cupy.empty(shape, dtype)


BACKEND = Recorded()
ENGINES.register(BACKEND.name, CardProducts(BACKEND))
LEAF = leaf(BACKEND, True)
#: Architectures and types for which other kernels are chosen.
KINDS = [("sm_80", "f4"), ("sm_90a", "f2"), ("sm_80", "c8")]


@pytest.fixture
def card(arch: str) -> Iterator[Card]:
    with Card().emulated(arch) as found:
        yield found


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def small(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Numbers whose products and sums are exact."""
    x = rng.integers(-2, 3, shape)
    return (x + 1j * rng.integers(-2, 3, shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def matrix(card: Card, rng: np.random.Generator, dtype: str, side: int = 64, rows: int = 4) -> Any:
    there = rng.random((rows, rows)) < 0.6
    there[0, :2] = True
    row, column = np.nonzero(there)
    indptr = np.searchsorted(row, np.arange(rows + 1))
    index = (card.put(x.astype("i4")) for x in (column, indptr))
    blocks = Blocks(card.put(small(rng, (len(row), side, side), dtype)), *index)
    return object.__new__(LEAF)._set(blocks, (rows * side, rows * side), canonical=True)


def dense(A: Any, data: Any = None) -> Any:
    """A matrix, or one with its pattern and these values, as an array of NumPy."""
    arrays = (np.array(x) for x in (A.data if data is None else data, A.indices, A.indptr))
    return bg.bsr_array(tuple(arrays), shape=A.shape).toarray()


def equals(x: Any, want: Any) -> Callable[[], bool]:
    return lambda: np.array_equal(np.array(x), want)


@pytest.mark.parametrize("arch, dtype", KINDS)
@pytest.mark.parametrize("then", ["assigned and used", "assigned", "deleted", "indices written"])
def test_a_product_finds_its_operands(card: Card, rng: np.random.Generator, dtype: str, then: str) -> None:
    A, B = matrix(card, rng, dtype), card.put(small(rng, (256, 64), dtype))
    out, other = (card.put(np.zeros((256, 64), dtype)) for _ in range(2))
    want = dense(A) @ np.array(B)
    bg.matmul(A, B, out=out)
    assert equals(out, want)()
    with card.capture():
        bg.matmul(A, B, out=out)
    if then == "deleted":
        del A
    elif then == "indices written":
        A.indices = card.put(np.array(A.indices)[::-1].copy())
    else:
        A.data = card.put(np.array(A.data) * 0)
    if then == "assigned and used":
        bg.matmul(A, B, out=other)
    out[...] = 7
    assert not card.dangling() and card.replays(equals(out, want))


@pytest.mark.parametrize("arch, dtype", KINDS[:2])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_sampled_product_into_a_matrix_writes_nowhere_else(
    card: Card, rng: np.random.Generator, dtype: str, order: str
) -> None:
    P = matrix(card, rng, dtype)
    out = matrix(card, np.random.default_rng(5), dtype)
    X, Y = (card.put(small(rng, (256, 256), dtype)) for _ in range(2))
    if order == "F":
        X = card.put(np.array(X.T)).T

    def sample() -> None:
        bg.sddmm(X, Y, P, out=out)

    sample()
    assert np.array_equal(dense(out), np.array(X) @ np.array(Y) * (dense(P, np.ones(P.data.shape)) != 0))
    with card.capture():
        sample()
    assert not card.dangling() and card.replays(lambda: True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("of", ["mask", "lengths"])
def test_attention_finds_its_mask_and_lengths(card: Card, rng: np.random.Generator, of: str) -> None:
    shape = (1, 1, 200, 64) if of == "mask" else (200, 2, 64)
    q, k, v = (card.put(rng.standard_normal(shape).astype("f2")) for _ in range(3))
    out = card.put(np.zeros(shape, "f2"))
    more: dict[str, Any] = {"causal": True}
    if of == "mask":
        mask = bg.BlockMask.causal(200, block=32, device="cpu")
        object.__setattr__(mask, "bits", card.put(mask.bits))
        more = {"mask": mask}
        del mask
    else:
        lengths = card.put(np.array([0, 70, 200], "i4"))
        more |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
        del lengths
    on_host = {name: np.array(x) if isinstance(x, Array) else x for name, x in more.items()}
    want = bg.attention(*(np.array(x).astype("f8") for x in (q, k, v)), **on_host)

    def forward(call: Any) -> None:
        views = {name: getattr(call, name).view(Array) for name in ("q", "k", "v", "out")}
        CudaAttention(BACKEND).forward(replace(call, **views))

    def is_right() -> bool:
        return bool(np.abs(np.array(out).astype("f8") - want).max() < 2e-2)

    with (
        patch.object(ENGINE, "forward", forward),
        patch.object(heuristics, "SHORT_KEYS", 0),
        patch.object(checks, "_bounds", lambda backend, given, *rest: given),  # it is on the card
    ):
        bg.attention(q, k, v, out=out, **more)
        assert is_right()
        with card.capture():
            bg.attention(q, k, v, out=out, **more)
    more.clear()
    on_host.clear()
    out[...] = 7
    assert not card.dangling() and card.replays(is_right)


@pytest.mark.parametrize("arch", ["sm_80"])
def test_numbers_of_the_host_are_refused_in_a_capture(card: Card) -> None:
    """They would lie in memory of the host that others have when the graph runs."""
    with card.capture(), pytest.raises(RuntimeError, match=r"host of shape \(3,\) .*make an array of them on the GPU"):
        BACKEND.from_host(np.array([0, 5, 9]))
