"""The calls that `memory` lets run out of memory: for each, how to make its operands and how to make the call."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm.dtypes import BFLOAT16, FLOAT8

from ..strategies import Place
from .case import Case
from .samples import sample

#: The operands, and the call, which returns what it computed: arrays, matrices, masks or caches.
Setup = tuple[list[Any], Callable[[], Any]]


@dataclass(frozen=True)
class Maker:
    """Makes the operands of a call: the same ones each time."""

    place: Place
    name: str

    def case(self) -> Case:
        return Case(zlib.crc32(self.name.encode()), 0, self.place)

    def matrix(
        self, case: Case, dtype: Any = "float32", block: tuple[int, int] = (4, 4), *, messy: bool = False
    ) -> Any:
        a = sample(case, np.dtype(dtype), block, (7, 7), spread="small", messy=messy, most=40)
        return self.place.bsr(a)

    def dense(self, case: Case, shape: tuple[int, ...], dtype: Any = "float32") -> Any:
        return self.place.put(case.rng.standard_normal(shape).astype(dtype))


CALLS: dict[str, Callable[[Maker], Setup]] = {}


def call(function: Callable[[Maker], Setup]) -> Callable[[Maker], Setup]:
    CALLS[function.__name__] = function
    return function


# --------------------------------------------------------------------------------------------- products
def _product(maker: Maker, dtype: Any, block: tuple[int, int], columns: int, **options: Any) -> Setup:
    case = maker.case()
    A = maker.matrix(case, dtype, block, messy=True)
    B = maker.dense(case, (A.shape[1], columns), dtype)
    return [A, B], lambda: bg.matmul(A, B, **options)


@call
def product_of_small_blocks(maker: Maker) -> Setup:
    return _product(maker, "float64", (3, 3), 1)


@call
def product_on_tensor_cores(maker: Maker) -> Setup:
    return _product(maker, "float16", (64, 64), 64)


@call
def product_in_bfloat16(maker: Maker) -> Setup:
    return _product(maker, BFLOAT16, (16, 16), 33)


@call
def product_of_complex_numbers(maker: Maker) -> Setup:
    return _product(maker, "complex64", (16, 16), 64)


@call
def product_of_integers(maker: Maker) -> Setup:
    return _product(maker, "int8", (4, 4), 16, out_dtype=np.int32)


@call
def product_with_out(maker: Maker) -> Setup:
    case = maker.case()
    A = maker.matrix(case, "float32", (16, 16))
    B, out = maker.dense(case, (A.shape[1], 40)), maker.dense(case, (40, A.shape[0])).T
    return [A, B, out], lambda: bg.matmul(A, B, out=out, alpha=2, beta=3)


@call
def product_of_fp8(maker: Maker) -> Setup:
    case = maker.case()
    a = sample(case, np.dtype(np.uint8), (64, 64), (4, 4), messy=False)
    A = maker.place.bsr(a)
    B = maker.place.put(case.rng.standard_normal((A.shape[1], 64)).astype(FLOAT8).view(np.uint8))
    return [A, B], lambda: bg.matmul(A, B, scale_a=0.5)


@call
def transposed_product(maker: Maker) -> Setup:
    case = maker.case()
    A = maker.matrix(case, "float32", (8, 4), messy=True)
    B = maker.dense(case, (A.shape[0], 7))
    return [A, B], lambda: A.T @ B


@call
def product_from_the_left(maker: Maker) -> Setup:
    case = maker.case()
    A = maker.matrix(case, "float32", (8, 8))
    B = maker.dense(case, (2, 5, A.shape[0]))
    return [A, B], lambda: bg.matmul(B, A)


@call
def sparse_product(maker: Maker) -> Setup:
    case = maker.case()
    A, B = (maker.matrix(case, "float64", messy=messy) for messy in (True, False))
    return [A, B], lambda: A @ B


@call
def planned_product(maker: Maker) -> Setup:
    case = maker.case()
    A, B = maker.matrix(case), maker.matrix(case)
    plan = bg.plan(A, B)
    return [A, B], lambda: plan(A, B)


@call
def sampled_product(maker: Maker) -> Setup:
    case = maker.case()
    A = maker.matrix(case, "float32", (16, 16))
    X, Y = maker.dense(case, (A.shape[0], 32)), maker.dense(case, (32, A.shape[1]))
    return [A, X, Y], lambda: bg.sddmm(X, Y, A, alpha=2, beta=1, out=A)


@call
def gradients(maker: Maker) -> Setup:
    case = maker.case()
    A = maker.matrix(case, "float32", (16, 16))
    dC, B = maker.dense(case, (A.shape[0], 16)), maker.dense(case, (A.shape[1], 16))
    return [A, dC, B], lambda: bg.matmul_backward(dC, A, B)


# ----------------------------------------------------------------------------------------------- arrays
def _on_matrix(operation: Callable[[Any, Any], Any], messy: bool = True) -> Callable[[Maker], Setup]:
    def setup(maker: Maker) -> Setup:
        case = maker.case()
        A, B = maker.matrix(case, messy=messy), maker.matrix(case, messy=False)
        return [A, B], lambda: operation(A, B)

    return setup


def _changed(A: Any, _: Any) -> Any:
    return A


def _iadd(A: Any, B: Any) -> Any:
    A += B
    return A


def _set_diagonal(A: Any, B: Any) -> Any:
    A.setdiag(B.diagonal())
    return A


def _assign(A: Any, B: Any) -> Any:
    A[4:12, :8] = A[4:12, :8].toarray() * 2
    return A


def _assemble(A: Any, B: Any) -> Any:
    rows = np.repeat(np.arange(7), np.diff(np.asarray(A.get().indptr)))
    return A.assemble(A.data.copy(), rows, A.indices, check=True)


def _invert(A: Any, B: Any) -> Any:
    far = bg.eye(28, blocksize=(4, 4), dtype=np.float32, device=A._backend.name) * 50
    return (A + far).inverse_block_diagonal()


CALLS |= {
    "sum_of_matrices": _on_matrix(lambda A, B: A + B),
    "in_place_sum": _on_matrix(_iadd),
    "element_wise_product": _on_matrix(lambda A, B: A.multiply(B)),
    "power": _on_matrix(lambda A, B: A.power(2)),
    "row_sums": _on_matrix(lambda A, B: A.sum(axis=1)),
    "largest": _on_matrix(lambda A, B: A.max()),
    "norm": _on_matrix(lambda A, B: bg.norm(A)),
    "nonzero": _on_matrix(lambda A, B: A.nonzero()),
    "to_dense": _on_matrix(lambda A, B: A.toarray()),
    "from_dense": _on_matrix(lambda A, B: bg.from_dense(A.toarray(), (4, 4))),
    "to_csr_and_back": _on_matrix(lambda A, B: bg.bsr_array(A.tocsr(), blocksize=(2, 2))),
    "other_blocks": _on_matrix(lambda A, B: A.tobsr((2, 4))),
    "transpose": _on_matrix(lambda A, B: A.T.copy()),
    "slice": _on_matrix(lambda A, B: A[4:12, :16]),
    "selection": _on_matrix(lambda A, B: A.select_blocks([3, 1, 1], [0, 5])),
    "stack": _on_matrix(lambda A, B: bg.block_array([[A, B], [None, A]])),
    "sort_indices": _on_matrix(lambda A, B: _changed(A, A.sort_indices())),
    "sum_duplicates": _on_matrix(lambda A, B: _changed(A, A.sum_duplicates())),
    "eliminate_zeros": _on_matrix(lambda A, B: _changed(A, A.eliminate_zeros())),
    "resize": _on_matrix(lambda A, B: _changed(A, A.resize(40, 20))),
    "setdiag": _on_matrix(_set_diagonal),
    "assign": _on_matrix(_assign),
    "assemble": _on_matrix(_assemble, messy=False),
    "assemble_with_duplicates": _on_matrix(_assemble),
    "inverse_blocks": _on_matrix(_invert),
}


# ------------------------------------------------------------------------------------- masks, attention
@call
def masks_combined(maker: Maker) -> Setup:
    where: dict[str, Any] = {"block": 16, "device": maker.place.backend.name}
    a, b = BlockMask.causal(100, **where), BlockMask.window(100, left=20, right=0, **where)
    return [a, b], lambda: BlockMask.stack([a & b, a | ~b])


def _attention(dtype: Any, D: int, masked: bool, **options: Any) -> Callable[[Maker], Setup]:
    def setup(maker: Maker) -> Setup:
        case = maker.case()
        q, k, v = (maker.dense(case, (1, h, 100, D), dtype) for h in (4, 2, 2))
        mask = BlockMask.random(100, per_row=2, block=32, device=maker.place.backend.name) if masked else None
        return [q, k, v, *([mask] if masked else [])], lambda: bg.attention(q, k, v, mask=mask, **options)

    return setup


CALLS |= {
    "attention_in_half": _attention("float16", 64, False, causal=True, return_lse=True),
    "attention_with_mask": _attention("float16", 64, True),
    "attention_in_single": _attention("float32", 36, True, return_lse=True),
}


@call
def attention_of_fp8(maker: Maker) -> Setup:
    case = maker.case()
    coded = [case.rng.standard_normal((1, h, 100, 64)).astype(FLOAT8).view(np.uint8) for h in (4, 2, 2)]
    q, k, v = (maker.place.put(x) for x in coded)
    return [q, k, v], lambda: bg.attention(q, k, v, q_scale=0.5)


@call
def attention_of_sequences(maker: Maker) -> Setup:
    case = maker.case()
    q, k, v = (maker.dense(case, (100, 2, 64), "float16") for _ in range(3))
    cuts = [0, 30, 100]
    return [q, k, v], lambda: bg.attention(q, k, v, cu_seqlens_q=cuts, cu_seqlens_k=cuts)


def _cache(maker: Maker, page: int | None) -> tuple[Case, Any]:
    case = maker.case()
    cache = bg.KVCache(2, 2, 100, 64, dtype=np.float16, page=page, device=maker.place.backend.name)
    k, v = (maker.dense(case, (2, 2, 20, 64), "float16") for _ in range(2))
    cache.append(k, v, [20, 13])
    return case, cache


def _append(page: int | None, lengths: list[int] | None) -> Callable[[Maker], Setup]:
    def setup(maker: Maker) -> Setup:
        case, cache = _cache(maker, page)
        k, v = (maker.dense(case, (2, 2, 30, 64), "float16") for _ in range(2))

        def run() -> Any:
            cache.append(k, v, lengths)
            return cache

        return [cache, k, v], run

    return setup


def _reset(maker: Maker) -> Setup:
    cache = _cache(maker, 16)[1]

    def run() -> Any:
        cache.reset(0)
        return cache

    return [cache], run


def _decode(maker: Maker) -> Setup:
    case, cache = _cache(maker, 16)
    q = maker.dense(case, (2, 4, 1, 64), "float16")
    return [cache, q], lambda: bg.attention_decode(q, cache, blocks=[[[0, 1]]], return_lse=True)


CALLS |= {
    "append": _append(None, None),
    "append_different_lengths": _append(None, [30, 4]),
    "append_to_pages": _append(16, None),
    "append_different_lengths_to_pages": _append(16, [3, 30]),
    "reset": _reset,
    "decode": _decode,
    "new_cache": lambda maker: ([], lambda: bg.KVCache(2, 2, 64, 64, page=16, device=maker.place.backend.name)),
}
