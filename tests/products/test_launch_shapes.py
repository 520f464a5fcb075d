"""What products start: the grid, threads, shared memory, and each field of the argument by its name.

launches.txt has a line for each launch of a public call on a fake card, with the fields that are not zero. A launch
that was changed on purpose writes it anew: ``python -m tests.products.test_launch_shapes``. Each family of kernels has
sections of its own in `SECTIONS`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels.structs import Complex, Struct, TensorMap
from bsrgemm._products import cuda as products_cuda
from bsrgemm._products import gemm_sm90

from .. import written_lists
from ..fake_cupy import Card, Policy, installed

PATH = Path(__file__).with_name("launches.txt")
F16, F32, F64 = (np.dtype(x) for x in "efd")
#: Kernels that make lists; their own tests say which lists.
LISTS = {"expand", "work_list", "row_shares", "row_bits", "overlaps", "match_rows", "segment"}


class Started:
    """Writes the launches of a card as lines; pointers are the names of the arrays that lie there."""

    def __init__(self, card: Card, cupy: Any) -> None:
        self.card, self.cupy = card, cupy
        self.places: dict[int, str] = {}

    def put(self, x: Any, name: str = "") -> Any:
        """An array on the card, which lines may name."""
        found = self.cupy.asarray(x)
        if name:
            self.places[found.data.ptr] = name
        return found

    def bsr(self, data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> Any:
        """A matrix on the card, whose arrays lines may name."""
        index = (self.put(np.array(x, np.int32)) for x in (indices, indptr))
        A = bg.bsr_array((self.put(data), *index), shape=shape)
        A.has_canonical_format = True  # kernels that would look for duplicates are not run
        self.places |= {x.data.ptr: name for name, x in zip(("data", "indices", "indptr"), A._blocks, strict=True)}
        return A

    def lines(self) -> str:
        """The launches since the last time."""
        launches = [x for x in self.card.launches if x.entry not in LISTS]
        self.card.launches.clear()
        return " ; ".join(map(self._line, launches))

    def _line(self, launch: Any) -> str:
        grid, threads = ("x".join(map(str, x)) for x in (launch.grid, launch.threads))
        words = [launch.entry, grid, threads, str(launch.shared_bytes)]
        layouts = iter(launch.spec.structs)
        for packed in launch.arguments:
            if len(packed) <= 8:
                words.append(self._pointer(int.from_bytes(packed, "little")))
            else:
                words += self._fields(next(layouts), packed)
        return " ".join(words)

    def _pointer(self, address: int) -> str:
        return self.places.get(address, "-" if address > 1 << 32 else str(address))

    def _fields(self, layout: Struct, packed: bytes, first: int = 0) -> Iterator[str]:
        for name, kind in layout.fields:
            at = first + layout.offsets[name]
            if isinstance(kind, Struct):
                yield f"{name}({' '.join(self._fields(kind, packed, at))})"
            elif isinstance(kind, TensorMap):
                address, *words = struct.unpack_from("=Q10I3Q", packed, at)
                if any(words):
                    yield f"{name}[{self._pointer(address)} {' '.join(map(str, words))}]"
            elif isinstance(kind, Complex):
                yield f"{name}={struct.unpack_from('=2' + kind.part, packed, at)}"
            else:
                (value,) = struct.unpack_from("=" + ("Q" if kind == "P" else kind), packed, at)
                if value:
                    yield f"{name}={self._pointer(value) if kind == 'P' else f'{value:.9g}'}"


@contextmanager
def started(arch: str = "sm_90a", multiprocessors: int = 2, policy: Policy = Policy.RECORD) -> Iterator[Started]:
    card = Card(arch, multiprocessors=multiprocessors, policy=policy)
    with installed(card) as cupy:
        yield Started(card, cupy)


# ------------------------------------------------------------------------------------------------ products
def matrix(on: Started, R: int, K: int, dtype: Any = F16, full: int = 0) -> Any:
    """Three block rows of two blocks each, and four block columns; or two full block rows of `full` blocks."""
    indices, indptr = ([0, 1, 0, 3, 1, 2], [0, 2, 4, 6]) if not full else ([*range(full)] * 2, [0, full, 2 * full])
    data = np.ones((len(indices), R, K), dtype)
    return on.bsr(data, indices, indptr, ((len(indptr) - 1) * R, (full or 4) * K))


def dense(on: Started, name: str, rows: int, N: int, dtype: Any, order: str = "C", batches: int = 1) -> Any:
    shape = (batches, rows, N) if batches > 1 else (rows, N)
    x = on.put(np.ones(shape[:-2] + shape[:-3:-1] if order == "F" else shape, dtype), name)
    return x.swapaxes(-1, -2) if order == "F" else x


#: Rows that are cut into pieces: by Hopper's tensor cores, and by the kernel for small blocks and one column.
LONG = (("f2", (128, 64), 64, 60), ("f4", (3, 2), 1, 9000), ("f8", (3, 2), 1, 9000), ("f2", (3, 2), 1, 9000))
PRODUCTS: dict[str, dict[str, Any]] = {
    **{f"{d} {n}": {"dtype": d, "block": (n, n)} for d, n in product(("f2", "f4", "f8"), (3, 16, 64, 128))},
    **{f"f2 16 x 48, {N} columns": {"block": (16, 48), "N": N} for N in (1, 2, 64, 65, 600)},
    **{f"f8 3 x 2, {N} columns": {"dtype": "f8", "block": (3, 2), "N": N} for N in (1, 2, 64, 200)},
    **{f"f4 20 x 9, {N} columns": {"dtype": "f4", "block": (20, 9), "N": N} for N in (1, 33, 200)},
    "transposed": {"block": (64, 128), "transposed": True},
    "transposed small blocks": {"block": (3, 5), "dtype": "f4", "transposed": True, "N": 1},
    "batches": {"batches": 3},
    "batches of small blocks": {"block": (5, 5), "dtype": "f8", "batches": 3, "N": 16},
    "orders": {"b": "F", "c": "F"},
    "orders of a high block": {"b": "F", "c": "F", "block": (128, 80), "N": 520, "batches": 2},
    "beta": {"beta": 2, "alpha": -3},
    "complex": {"dtype": "c16", "block": (5, 5), "alpha": 1 - 2j, "beta": 3j},
    "bytes": {"dtype": "i1", "out": "i4", "block": (32, 32)},
    "fp8": {"dtype": "u1", "out": "f2", "block": (64, 96), "b": "F", "scale_a": 1},
    "tf32": {"dtype": "f4", "b": "F", "precision": "tf32"},
    **{f"long rows {d} {n}": {"dtype": d, "block": n, "N": N, "full": k} for d, n, N, k in LONG},
}


def one_product(on: Started, how: dict[str, Any]) -> str:
    R, K = how.get("block", (64, 64))
    dtype = np.dtype(how.get("dtype", "f2"))
    batches, transposed = how.get("batches", 1), "transposed" in how
    N = how.get("N", 100 if how.get("b") == "F" else 96)
    A = matrix(on, R, K, dtype, how.get("full", 0))
    rows, cols = A.shape[::-1] if transposed else A.shape
    B = dense(on, "B", cols, N, dtype, how.get("b", "C"), batches)
    out = dense(on, "out", rows, N, np.dtype(how.get("out", dtype)), how.get("c", "C"), batches)
    options = {name: how[name] for name in ("alpha", "beta", "scale_a", "precision") if name in how}
    bg.matmul(A.T if transposed else A, B, out=out, **options)
    return on.lines()


def products() -> Iterator[tuple[str, str]]:
    for arch, (name, how) in product(("sm_75", "sm_80", "sm_90a"), PRODUCTS.items()):
        with started(arch) as on:
            yield f"{arch} {name}", one_product(on, how)
    with started(multiprocessors=132) as on:
        for name in ("f2 64", "f8 16", "f2 16 x 48, 600 columns", "f8 3 x 2, 1 columns", "long rows f2 (128, 64)"):
            yield f"132 multiprocessors {name}", one_product(on, PRODUCTS[name])
    with started() as on, patch.object(gemm_sm90, "_KEPT_BYTES", 6 * 64 * 64 * 2 - 1):
        yield "A that the L2 cannot keep", one_product(on, {})


# ------------------------------------------------------------------------------------------------ blocks of products
def blocks() -> Iterator[tuple[str, str]]:
    for arch, dtype, (R, K, N) in product(
        ("sm_80", "sm_90a"), (F16, F32, F64), ((64, 64, 64), (128, 72, 128), (16, 8, 48), (9, 5, 4))
    ):
        with started(arch) as on:
            ia, ib, starts = (
                on.put(np.array(x, np.int64), name)
                for name, x in (("ia", [0, 1, 2, 3, 4, 0, 1]), ("ib", [4, 3, 2, 1, 0, 0, 1]), ("starts", [0, 3, 5]))
            )
            a, b = on.put(np.ones((5, R, K), dtype), "a"), on.put(np.ones((6, K, N), dtype), "b")
            products_cuda.ENGINE.pair_products(a, ia, b, ib, starts, dtype)
            yield f"pairs {arch} {dtype} {R} {K} {N}", on.lines()
    with started() as on:
        on.card.l2_bytes = 1 << 10
        a, b = on.put(np.ones((40, 64, 64), F16)), on.put(np.ones((6, 64, 64), F16))
        order = on.put(np.arange(40))
        for rows in (0, 15, 16, 40):
            products_cuda.ENGINE.pair_products(a, order, b, order, order, F32, rows)
            yield f"pairs in strips, {rows} rows", on.lines()
    for arch, dtype, (R, K, N), order, tf32 in product(
        ("sm_80", "sm_90a"), (F16, F32), ((64, 40, 64), (16, 72, 16), (128, 64, 32)), "CF", (False, True)
    ):
        if tf32 and dtype != F32:
            continue
        with started(arch) as on:
            P = on.bsr(np.ones((3, R, N), dtype), [0, 2, 1], [0, 2, 3], (2 * R, 3 * N))
            X, Y = dense(on, "X", 2 * R, K, dtype), dense(on, "Y", K, 3 * N, dtype, order)
            bg.sddmm(X, Y, P, precision="tf32" if tf32 else None)
            yield f"sampled {arch} {dtype} {R} {K} {N} {order} {tf32}", on.lines()


SECTIONS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {"products": products, "blocks of products": blocks}


@pytest.mark.parametrize("section", SECTIONS)
def test_launches_are_those_that_were_written_down(section: str) -> None:
    written_lists.compare(PATH, section, SECTIONS[section])


if __name__ == "__main__":
    written_lists.write(PATH, SECTIONS)
