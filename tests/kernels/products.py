"""One table for each kernel of `A @ B`: a case is a product of small integers, whose sums are exact in every dtype."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._kernels.launch import Launch
from bsrgemm.dtypes import BFLOAT16

from ..devices import Device

F16, F32, F64, I8, I32, C64, C128 = (np.dtype(x) for x in "efdbiFD")
BF16 = BFLOAT16
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class Case:
    """A product: what the operands are, how they lie, and what is done with the result."""

    dtype: np.dtype[Any]
    block: tuple[int, int]
    N: int | None
    #: the dtype of the result; None for that of the operands
    out: np.dtype[Any] | None = None
    #: how B and the result lie, see `Device.lying`
    b: str = "C16"
    c: str = "C"
    batches: int = 0
    alpha: Any = 2
    beta: Any = -1
    transposed: bool = False
    precision: str | None = None
    index: str = "i4"
    rows: int = 6
    cols: int = 5
    density: float = 0.5

    def __str__(self) -> str:
        said = [str(self.dtype), "x".join(map(str, self.block)), str(self.N), self.b + self.c]
        said += [str(self.out)] if self.out else []
        said += ["batches"] if self.batches else []
        said += ["transposed"] if self.transposed else []
        said += [self.precision] if self.precision else []
        return "-".join(said)


def cases(*every: Case, large: tuple[Case, ...] = ()) -> Any:
    """A mark with all cases; those that are too large for the emulator run on a card alone."""
    beyond = [pytest.param(case, marks=pytest.mark.large, id=f"large-{case}") for case in large]
    return pytest.mark.parametrize("case", [*(pytest.param(x, id=str(x)) for x in every), *beyond])


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Integers from -2 to 2, or from 0 to 4 where there is no sign; complex ones for complex dtypes."""
    x = rng.integers(-2, 3, shape) + (2 if dtype.kind == "u" else 0)
    if dtype.kind == "b":
        return x > 1
    return (x + 1j * rng.integers(-2, 3, shape)).astype(dtype) if dtype.kind == "c" else x.astype(dtype)


def exact(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype in which small numbers of `dtype` are added up exactly; integers wrap around when they come back."""
    return np.dtype(np.complex128 if dtype.kind == "c" else np.int64 if dtype.kind in "biu" else np.float64)


def in_bytes(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array as it goes to a card: numbers of fp8 are bytes there."""
    return x.view(np.uint8) if x.dtype == E4M3 else x


@dataclass
class Bsr:
    """The three arrays of a BSR matrix on the host. Index arrays are believed where they are inside."""

    data: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]
    indptr: np.ndarray[Any, Any]
    shape: tuple[int, int]

    @property
    def dense(self) -> np.ndarray[Any, Any]:
        blocks, R, K = self.data.shape
        rows, cols = self.shape[0] // R, self.shape[1] // K
        wide = np.zeros((rows, cols, R, K), exact(self.data.dtype))
        for i in range(rows):
            for p in range(max(int(self.indptr[i]), 0), min(int(self.indptr[i + 1]), blocks)):
                if 0 <= self.indices[p] < cols:
                    wide[i, self.indices[p]] += self.data[p].astype(wide.dtype)
        return wide.swapaxes(1, 2).reshape(self.shape)

    def stored(self, column: int) -> np.ndarray[Any, Any]:
        """For each row of the matrix, whether it has a block at this block column."""
        R = self.data.shape[1]
        rows = [column in self.indices[a:b] for a, b in zip(self.indptr[:-1], self.indptr[1:], strict=True)]
        return np.repeat(rows, R)

    def on(self, device: Device) -> Any:
        """The matrix on a device, with these arrays as they are."""
        arrays = (device.asarray(in_bytes(self.data)), device.asarray(self.indices), device.asarray(self.indptr))
        return bg.bsr_array(arrays, shape=self.shape)

    def times(self, B: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A @ B in float64 where only stored blocks count: NaN and infinity in B reach no other rows."""
        _, R, K = self.data.shape
        out = np.zeros((*B.shape[:-2], self.shape[0], B.shape[-1]))
        with np.errstate(all="ignore"):
            for i in range(self.shape[0] // R):
                for p in range(self.indptr[i], self.indptr[i + 1]):
                    c = self.indices[p]
                    right = B[..., c * K : c * K + K, :].astype(np.float64)
                    out[..., i * R : i * R + R, :] += self.data[p].astype(np.float64) @ right
        return out


def matrix(rng: np.random.Generator, case: Case, unique: bool = False) -> Bsr:
    """Random blocks in any order, the first one twice unless they are to be unique. The first block row is empty."""
    R, K = case.block[::-1] if case.transposed else case.block
    stored = rng.random((case.rows, case.cols)) < case.density
    stored[0] = False
    stored[1, 0] = True
    row, col = np.nonzero(stored)
    if not unique:
        row, col = np.append(row[:1], row), np.append(col[:1], col)
    order = np.lexsort((rng.random(len(row)), row))
    indptr = np.searchsorted(row, np.arange(case.rows + 1)).astype(case.index)
    data = numbers(rng, (len(row), R, K), case.dtype)
    return Bsr(data, col[order].astype(case.index), indptr, (case.rows * R, case.cols * K))


def check(device: Device, kernel: str | None, case: Case, A: Bsr, on_device: Any = None) -> Any:
    """out = alpha * A @ B + beta * out by a kernel, against float64; the matrix on the device.

    Only elements of the result are written, not what lies between them.
    """
    rng = np.random.default_rng(7)
    dense = A.dense.T if case.transposed else A.dense
    tail = () if case.N is None else (case.N,)
    front = (case.batches,) if case.batches else ()
    B = numbers(rng, (*front, dense.shape[1], *tail), case.dtype)
    wide = exact(case.dtype)
    out_dtype = case.out or case.dtype
    before = numbers(rng, (*front, dense.shape[0], *tail), out_dtype)
    want = case.alpha * (dense @ B.astype(wide)) + case.beta * before.astype(exact(out_dtype))
    M = A.on(device) if on_device is None else on_device
    on_b = device.asarray(B) if case.N is None else device.lying(in_bytes(B), case.b)
    out = device.asarray(before) if case.N is None else device.lying(before, case.c)
    how: dict[str, Any] = {"precision": case.precision} if case.precision else {}
    how |= {"scale_a": 1} if case.dtype == E4M3 else {}
    with force_kernel(kernel) if kernel else nullcontext():
        bg.matmul(M.T if case.transposed else M, on_b, out=out, alpha=case.alpha, beta=case.beta, **how)
    np.testing.assert_array_equal(device.asnumpy(out), want.astype(out_dtype))
    return M


def in_pieces(M: Any) -> bool:
    """Were rows of this matrix cut into pieces by a product that it was in?"""
    known = [found.value for found in M._memo.calls._found.values()]
    launches = [found for found in known if isinstance(found, Launch)]
    return any(found._scratch is not None and found._scratch.bytes > 0 for found in launches)


def few_ctas(most: int) -> Any:
    """Inside, grids of kernels that go on beyond them are small, on the emulator."""
    from ..emulator import emulator

    return emulator.few_ctas(most)
