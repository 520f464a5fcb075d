"""Calls over the whole public surface, each with what NumPy says that it returns.

Values are few halves around zero, so that every sum is exact and has one right result in every order.
"""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm.dtypes import BFLOAT16, BOOL, FLOAT8, result_dtype

from ..strategies import INEXACT, Place, Sample, random_values, widened

Array = np.ndarray[Any, Any]
SINGLE = np.dtype(np.float32)
#: dtypes, sides of blocks and numbers of columns of dense operands.
DTYPES = (*INEXACT, np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint8), BOOL)
SIDES = (1, 2, 3, 4, 6, 8, 16, 32)
WIDTHS = (1, 2, 3, 7, 16, 33, 64)


def sample(rng: np.random.Generator, dtype: Any, block: tuple[int, int], grid: tuple[int, int], messy: bool) -> Sample:
    """A BSR matrix; if `messy`, its blocks are not sorted and some come twice."""
    rows, cols = grid
    places = np.flatnonzero(rng.random(rows * cols) < rng.choice([0.0, 0.3, 0.6, 1.0], p=[0.05, 0.35, 0.4, 0.2]))
    if messy:
        places = rng.permutation(np.concatenate([places, places[: len(places) // 3]]))
    row, col = np.divmod(places, cols)
    order, index = np.argsort(row, kind="stable"), rng.choice([np.int32, np.int64])
    data = random_values(rng, (len(places), *block), np.dtype(dtype))
    indptr = np.searchsorted(row[order], np.arange(rows + 1)).astype(index)
    return Sample(data, col[order].astype(index), indptr, (rows * block[0], cols * block[1]))


class Pair:
    """A matrix and what it has to be."""

    def __init__(self, place: Place, a: Sample, cls: type = bg.bsr_array) -> None:
        self.ours, self.dense, self.stored = place.bsr(a, cls), a.dense, a.layers > 0
        self.form = self.ours.shape, self.ours.blocksize, self.ours.dtype

    def read(self, place: Place) -> None:
        """Take what the matrix says of itself: its arrays were written to."""
        a = place.blocks(self.ours)
        self.dense, self.stored = a.dense, a.layers > 0


class Operands:
    """What a call may take: square matrices A and B with dense values a and b, and more that it makes when it asks."""

    def __init__(self, place: Place, rng: np.random.Generator, A: Pair, B: Pair) -> None:
        self.place, self.rng, self.pair = place, rng, A
        self.A, self.a, self.B, self.b, self.stored = A.ours, A.dense, B.ours, B.dense, A.stored
        self.dtype, (self.R, _) = A.ours.dtype, A.ours.blocksize
        self.n, self.m = A.dense.shape[0], A.dense.shape[0] // A.ours.blocksize[0]
        self.k = int(rng.integers(1 - self.n, self.n))
        self.i, self.j = sorted(int(i) * self.R for i in rng.integers(0, self.m + 1, 2))
        self.axis = rng.choice([None, 0, 1])
        self.columns = int(rng.choice(WIDTHS))

    def put(self, x: Array) -> Any:
        return self.place.put(x)

    def values(self, *shape: int, dtype: Any = None) -> Array:
        return random_values(self.rng, shape, np.dtype(self.dtype if dtype is None else dtype))

    def normal(self, *shape: int, dtype: Any) -> Array:
        return self.rng.standard_normal(shape, np.float32).astype(dtype)

    @cached_property
    def x(self) -> Array:
        """The values of X, with as many rows as A has columns; X lies in memory in any order, with gaps or without."""
        return widened(self.values(self.n, self.columns))

    @cached_property
    def X(self) -> Any:
        x = self.x.astype(self.dtype)
        turned, gaps = self.put(np.ascontiguousarray(x.T)).T, self.put(np.repeat(x, 2, axis=1))[:, ::2]
        return (self.put(x), turned, gaps)[self.k % 3]

    @cached_property
    def f(self) -> Array:
        return widened(self.values(self.n, self.n))

    @cached_property
    def F(self) -> Any:
        """A dense matrix of the shape of A."""
        return self.put(self.f.astype(self.dtype))

    @property
    def device(self) -> str:
        return self.place.backend.name


#: What came, what has to come, and how many roundings it may be off (0 if it is not said); below 0, how far.
Result = Iterable[tuple[Any, ...]]


@dataclass(frozen=True)
class Call:
    """What a call returns, each with what NumPy says and how many roundings it may be off; and for which dtypes."""

    run: Callable[[Operands], Result]
    on: str = ""

    def able(self, o: Operands) -> bool:
        """May these operands be asked for this?"""
        kind = "f" if o.dtype == BFLOAT16 else o.dtype.kind
        answers = {
            "numbers": o.dtype != BOOL,
            "inexact": o.dtype in INEXACT,
            "floats": kind == "f",
            "attention": kind == "f" and not o.place.is_fake,  # where it would take long
            "decode": o.dtype.itemsize == 2 or o.place.is_host,
            "real": kind != "c",
            "ordered": kind in "fiu",
            "single": o.dtype == SINGLE,
            "foreign": o.place.holds(o.dtype),
            "host": o.place.is_host,
            "canonical": bool(o.A.has_canonical_format),
        }
        return all(answers[word] for word in self.on.split())


CALLS: dict[str, Call] = {}


def call(on: str = "") -> Callable[[Callable[[Operands], Any]], Callable[[Operands], Any]]:
    """Add a function to the calls; it returns results with what they have to be."""

    def add(function: Callable[[Operands], Any]) -> Callable[[Operands], Any]:
        CALLS[function.__name__] = Call(function, on)
        return function

    return add


# ------------------------------------------------------------------------------------ arithmetic, order, views
def changed(A: Any, *_: Any) -> Any:
    """A matrix after a call that returned nothing."""
    return A


def names(o: Operands, ours: bool) -> dict[str, Any]:
    """What expressions may use: matrices of ours, or copies of their dense values in NumPy."""
    both = {"i": o.i, "j": o.j, "k": o.k, "n": o.n, "m": o.m, "R": o.R, "axis": o.axis, "where": {"device": o.device}}
    both |= {"np": np, "bg": bg, "copy": copy, "pickle": pickle, "changed": changed, "kind": o.dtype, **vars(operator)}
    both |= {"diagonal": np.kron(np.eye(o.m), np.ones((o.R, o.R))) > 0}
    if ours:
        return both | {"A": o.A, "B": o.B, "F": o.F, "lib": bg}
    return both | {"A": o.a.copy(), "B": o.b, "F": o.f, "lib": np}


def expressions(on: str, off: float, ours: str, theirs: str | None = None) -> None:
    """Add calls, apart by semicolons; NumPy's are the same unless they are given."""
    for text in ours.split(";"):

        def run(o: Operands, one: str = text.strip(), other: str = (theirs or text).strip()) -> Result:
            want = eval(other, names(o, ours=False))  # before ours changes anything
            return [(eval(one, names(o, ours=True)), want, off)]

        CALLS[text.strip()] = Call(run, on)


expressions("", 0, "A + B; A + F; F + A; A * B; A == F; A != F; A.T; A.mT; A.T.T; A.conj(); A.real; A.imag; iadd(A, B)")
expressions("", 0, "A.transpose(); A.diagonal(k); A[i:, :j]; lib.vstack([A, B]); lib.hstack([A, B]); A.nonzero()")
expressions("", 0, "lib.kron(A, F[:2, :1])")
expressions("", 1, "A.sum(axis=axis)")
expressions("numbers", 0, "A - B; A - F; F - A; A * 3; 2 * A; -A; isub(A, B); imul(A, 2)")
expressions("numbers", 2, "abs(A)")
expressions("numbers", 64, "A.trace(offset=k)")
expressions("inexact", 0, "A / 2; itruediv(A, 2)")
expressions("real", 0, "A < F; A <= F; A > F; A >= F")
expressions("real canonical", 0, "A.min(axis=axis); A.max(axis=axis); A.argmin(axis=axis); A.argmax(axis=axis)")
expressions("numbers canonical", 2, "A**2")
expressions("floats canonical", 0, "round(A)", "np.around(A)")
expressions("ordered foreign canonical", 0, "A < B")
expressions("foreign canonical", 0, "A.reshape(1, -1)")
# What keeps the values.
KEPT = "A.copy(); copy.copy(A); copy.deepcopy(A); pickle.loads(pickle.dumps(A)); A.toarray(order='F'); A.todense(); "
KEPT += "A.toarray(out=F); A.tobsr((n, R)); A.get().to_device(**where); A.sorted_indices(); changed(A, A.prune()); "
expressions("", 0, KEPT + "changed(A, A.sort_indices()); changed(A, A.sum_duplicates())", "A")
TURNED = "A.tocsr(); A.tocsc(); A.tocoo(); A.asformat('csr'); bg.bsr_array(A.tocsr(), blocksize=(R, R))"
expressions("foreign canonical", 0, TURNED, "A")
expressions("foreign canonical host", 0, "A.todia(); A.tolil(); A.todok()", "A")
expressions("floats canonical", 0, "changed(A, A.eliminate_zeros()); A.astype('float64')", "A")
# What has other names in NumPy.
for _name in "sin tan arctan sinh tanh arcsinh rint sign expm1 deg2rad rad2deg floor ceil trunc".split():  # noqa: SIM905
    expressions("floats canonical", 16, f"A.{_name}()", f"np.{_name}(A)")
for _name in ("arcsin", "arctanh", "log1p", "sqrt"):
    expressions("floats canonical", 16, f"(abs(A) / 16).{_name}()", f"np.{_name}(abs(A) / 16)")
for _on, _off, _ours, _theirs in (
    ("", 0, "A.H", "A.conj().T"), ("", 0, "A.conjugate(copy=False)", "A.conj()"), ("", 0, "A.multiply(B)", "A * B"),
    ("", 0, "changed(A, setitem(A, slice(i, j), 0))",
     "np.where(((np.arange(n) < i) | (np.arange(n) >= j))[:, None], A, 0)"),
    ("", 0, "A.select_blocks([0, -1], slice(None, None, 2))",
     "A.reshape(m, R, m, R)[[0, -1]][:, :, ::2].reshape(2 * R, -1)"),
    ("", 0, "changed(B := A.copy(), B.resize(n + R, n))", "np.pad(A, ((0, R), (0, 0)))"),
    ("", 0, "A.count_nonzero(axis=axis)", "np.count_nonzero(A, axis=axis)"),
    ("", 0, "A.block_diagonal()", "A.reshape(m, R, m, R)[np.arange(m), :, np.arange(m)]"),
    ("", 0, "bg.block_array([[A, None], [B, A]])", "np.block([[A, 0 * A], [B, A]])"),
    ("", 0, "bg.block_diag([A, B])", "np.block([[A, 0 * A], [0 * A, B]])"),
    ("", 0, "bg.from_dense(F, (R, R))", "F"), ("", 0, "bg.bsr_array(F, blocksize=(n, R))", "F"),
    ("", 0, "bg.eye(n, k=k, blocksize=(R, R), dtype=kind, **where)", "np.eye(n, k=k)"),
    ("", 0, "bg.diags([A.block_diagonal()], offsets=[0])", "np.where(diagonal, A, 0)"),
    ("", 4, "A.mean(axis=axis)", "A.astype(np.result_type(A, float)).mean(axis=axis)"),
    ("numbers", 0, "changed(A, A.setdiag(F.diagonal(k), k=k))", "np.where(np.eye(n, k=k) > 0, F, A)"),
    ("numbers", 0, "A.scale_block_rows(F[:, 0].reshape(m, R))", "F[:, :1] * A"),
    ("numbers", 0, "A.scale_block_cols(F[:, 0].reshape(m, R))", "F[:, 0] * A"),
    ("real canonical", 0, "A.nanmin(axis=axis)", "np.nanmin(A, axis=axis)"),
    ("real canonical", 0, "A.nanmax(axis=axis)", "np.nanmax(A, axis=axis)"),
    ("ordered foreign canonical", 0, "A.maximum(B)", "np.maximum(A, B)"),
    ("ordered foreign canonical", 0, "A.minimum(B)", "np.minimum(A, B)"),
    ("numbers canonical", 64, "bg.norm(A, 1)", "abs(A).sum(axis=0).max()"),
    ("numbers canonical", 2, "A.power(2)", "A**2"),
    ("inexact", 1e4, "(A + 128 * bg.eye(n, blocksize=(R, R), dtype=kind, **where)).astype("
     "'complex128' if kind.kind == 'c' else 'float64').inverse_block_diagonal().toarray()",
     "np.linalg.inv(np.where(diagonal, A + 128 * np.eye(n), 0))"),
):  # fmt: skip
    expressions(_on, _off, _ours, _theirs)


def put_at(a: Array, key: Any, value: Any) -> Array:
    a = a.copy()
    a[key] = value
    return a


@call()
def description(o: Operands) -> Any:
    A = o.A
    A.check_format(full_check=True)
    bound = (o.n // o.R) ** 2
    yield (A.shape, A.blocksize, A.dtype, A.nnz, A.size), (o.a.shape, (o.R, o.R), o.dtype, A.data.size, A.data.size)
    yield A.density, len(A.data) / bound, 1
    yield A.nbytes, A.data.nbytes + A.indices.nbytes + A.indptr.nbytes
    yield bg.get_array_module(A.data) is o.place.xp and A.device is not None, True
    yield "Block" in repr(A) and len(str(A)) >= 0 and bg.default_device() in ("cpu", "cuda"), True
    yield A.sorted_indices().has_sorted_indices, True
    for error, refused in ((TypeError, lambda: len(A)), (ValueError, lambda: bool(A)), (TypeError, lambda: 1 / A)):
        try:
            refused()
        except error:
            continue
        yield (o.n, error), (1, ValueError)  # of one element alone the truth is known


@call("foreign canonical")
def older_names(o: Operands) -> Any:
    M = bg.bsr_matrix(o.A)
    yield (M.getformat(), M.get_shape(), M.getnnz()), ("bsr", o.a.shape, M.nnz)
    yield M.getmaxprint() > 0, True
    M.set_shape(M.shape)
    yield M.asfptype(), o.a
    yield M.getH(), o.a.conj().T
    yield M.getrow(o.n - 1), o.a[[-1]]
    yield bg.bsr_matrix(M, blocksize=(1, 1)).getcol(0), o.a[:, [0]]
    yield M * 2 if o.dtype != BOOL else M, o.a * 2 if o.dtype != BOOL else o.a


@call()
def file(o: Operands) -> Any:
    stream = io.BytesIO()
    bg.save_npz(stream, o.A)
    stream.seek(0)
    yield bg.load_npz(stream, device=o.device), o.a


@call()
def random_matrix(o: Operands) -> Any:
    options: dict[str, Any] = {"blocksize": (o.R, o.R), "density": 0.4, "seed": o.k + o.n, "dtype": o.dtype}
    A = bg.random(o.n, o.n, **options, device=o.device)
    yield A, widened(bg.random(o.n, o.n, **options).toarray())
    yield len(A.data), round(0.4 * o.m**2)


@call()
def assigned(o: Operands) -> Any:
    key = (slice(o.i, o.j), slice(None))
    value = np.where(o.stored[key], o.f[key], 0)
    o.A[key] = o.put(value.astype(o.dtype))
    yield o.A, put_at(o.a, key, value)


@call()
def new_values(o: Operands) -> Any:
    data = o.values(*o.A.data.shape)
    o.A.data = o.put(data)
    yield o.A, Sample(data, *(o.place.backend.to_host(x) for x in (o.A.indices, o.A.indptr)), o.A.shape).dense


@call()
def assembled(o: Operands) -> Any:
    row, col = o.stored[:: o.R, :: o.R].nonzero()
    places = o.rng.integers(0, max(len(row), 1), 9 if len(row) else 0)
    more = o.values(len(places), o.R, o.R)
    want = o.a.reshape(o.m, o.R, o.m, o.R).copy()
    np.add.at(want.swapaxes(1, 2), (row[places], col[places]), widened(more))
    got = o.A.assemble(o.put(more), row[places], o.put(col[places]), check=o.rng.choice([True, None]))
    yield got is o.A, True
    yield o.A, want.reshape(o.n, o.n)


@call()
def twin(o: Operands) -> Any:
    """A matrix on the same index arrays: a change of one is no change of the other."""
    other = bg.bsr_array((o.A.data.copy(), o.A.indices, o.A.indptr), shape=o.A.shape)
    other.sum_duplicates()
    other.data[...] = 0
    yield o.A, o.a


# ------------------------------------------------------------------------------------------------ products
def times(a: Array, x: Array) -> Array:
    return a @ x if a.dtype != bool else (a.astype(int) @ x.astype(int)) > 0


@call()
def products(o: Operands) -> Any:
    want = times(o.a, o.x)
    with bg.overlapping():
        yield o.A @ o.X, want
    yield bg.matmul(o.A, o.X), want
    yield o.A.dot(o.X[:, 0]), want[:, 0]
    yield o.A.T @ o.X, times(o.a.T, o.x)
    yield o.X.T @ o.A, times(o.x.T, o.a)
    out = o.put(np.zeros((o.columns, o.n), o.dtype)).T
    yield bg.matmul(o.A, o.X, out=out) is out, True
    yield out, want
    if o.dtype != BOOL:
        bg.matmul(o.A, o.X, out=out, alpha=2, beta=1)
        yield out, 3 * want
    yield bg.matmul(o.A, o.place.xp.stack([o.X, o.X])), np.stack([want, want])


@call()
def rectangular_products(o: Operands) -> Any:
    block = (int(o.rng.choice(SIDES)), int(o.rng.choice(SIDES)))
    s = sample(o.rng, o.dtype, block, (5, 4), True)
    x = o.values(s.shape[1], o.columns)
    yield o.place.bsr(s) @ o.put(x), times(s.dense, widened(x))
    yield o.place.bsr(s).T @ o.put(o.values(s.shape[0], 2) * 0), np.zeros((s.shape[1], 2))


@call("numbers")
def other_dtypes(o: Operands) -> Any:
    dtype = (SINGLE, np.dtype(np.float64), np.dtype(np.int8))[o.k % 3]
    x = o.values(o.n, o.columns, dtype=dtype)
    got = o.A @ o.put(x)
    yield str(got.dtype), str(result_dtype(o.dtype, dtype))
    yield got, o.a.astype(np.result_type(o.a, widened(x))) @ widened(x)


@call("single")
def tf32(o: Operands) -> Any:
    yield bg.matmul(o.A, o.X, precision="tf32"), o.a @ o.x


@call("single")
def fp8(o: Operands) -> Any:
    s = sample(o.rng, np.float32, (o.R, o.R), (4, 4), False)
    coded = Sample(s.data.astype(FLOAT8).view(np.uint8), s.indices, s.indptr, s.shape)
    x = o.values(s.shape[1], o.columns, dtype=SINGLE)
    X = o.put(x.astype(FLOAT8).view(np.uint8))
    yield bg.matmul(o.place.bsr(coded), X, scale_a=2.0, scale_b=0.5, out_dtype=SINGLE), s.dense @ widened(x)


@call()
def sparse_products(o: Operands) -> Any:
    want = times(o.a, o.b)
    yield o.A @ o.B, want
    plan = bg.plan(o.A, o.B)
    yield "ProductPlan" in repr(plan), True
    yield plan(o.A, o.B), want
    yield plan(o.A, o.B), want


@call("numbers canonical")
def gradients(o: Operands) -> Any:
    y, dy = o.values(o.n, o.columns), o.values(o.n, o.columns)
    Y, dY = o.put(y), o.put(dy)
    yield bg.sddmm(o.X, Y.T, o.A), np.where(o.stored, o.x @ widened(y).T, 0)
    if o.dtype in INEXACT:
        dA, dB = bg.matmul_backward(dY, o.A, o.X)
        yield dA, np.where(o.stored, widened(dy) @ o.x.conj().T, 0)
        yield dB, o.a.conj().T @ widened(dy)
        _, pullback = bg.vjp(bg.matmul, o.A, o.X)
        yield pullback(dY)[1], o.a.conj().T @ widened(dy)
        dX, dY = bg.sddmm_backward(o.A, o.X, Y.T, o.A)
        yield dX, o.a @ widened(y).conj()
        yield dY, o.x.conj().T @ o.a


# ------------------------------------------------------------------------------------------- masks, attention
def mask(o: Operands, S_q: int, S_k: int, block: int) -> tuple[BlockMask, Array]:
    """A mask of one pattern, and what it allows, from the definition."""
    where: dict[str, Any] = {"block": block, "device": o.device}
    place, key = np.arange(S_q)[:, None] + S_k - S_q, np.arange(S_k)[None]
    behind, count, left = place - key, int(o.rng.integers(0, 20)), int(o.rng.integers(0, 40))
    stored = o.rng.random((-(-S_q // block), -(-S_k // block))) < 0.5
    arrays = (o.put(np.append(0, np.cumsum(stored.sum(axis=1)))), o.put(np.nonzero(stored)[1]))
    allowed, chosen = o.rng.random((S_q, S_k)) < 0.3, np.unique(o.rng.integers(0, S_k, 3))
    drawn = BlockMask.random(S_q, S_k, per_row=1, seed=count, **where)
    cuts = np.array([0, min(count, S_q), S_q])
    number = np.searchsorted(cuts, np.arange(S_q), side="right")
    makers: list[Callable[[], tuple[BlockMask, Any]]] = [
        lambda: (BlockMask.full(S_q, S_k, **where), key >= 0),
        lambda: (BlockMask.causal(S_q, S_k, **where), behind >= 0),
        lambda: (BlockMask.window(S_q, S_k, left=left, right=2, **where), (behind <= left) & (behind >= -2)),
        lambda: (BlockMask.sinks(S_q, S_k, count=count, **where), key < count),
        lambda: (BlockMask.prefix(S_q, S_k, length=count, **where), (behind >= 0) | (key < count)),
        lambda: (BlockMask.global_tokens(S_q, S_k, tokens=chosen, **where),
                 np.isin(key, chosen) | np.isin(place, chosen)),
        lambda: (BlockMask.dilated(S_q, S_k, count=count + 1, dilation=3, **where),
                 (behind >= 0) & (behind % 3 == 0) & (behind // 3 <= count)),
        lambda: (drawn, o.place.backend.to_host(drawn.to_dense())),
        lambda: (BlockMask.from_dense(o.put(allowed), block=block), allowed),
        lambda: (BlockMask.from_block_indices(*arrays, shape=(S_q, S_k), block=block),
                 np.repeat(np.repeat(stored, block, 0), block, 1)[:S_q, :S_k]),
        lambda: (BlockMask.documents(cuts, block=block, device=o.device), number[:, None] == number),
    ]  # fmt: skip
    found, want = makers[int(o.rng.integers(len(makers) - (S_q != S_k)))]()
    return found, np.broadcast_to(want, (S_q, S_k))


def combined(o: Operands, S_q: int, S_k: int) -> tuple[BlockMask, Array]:
    """Up to three masks joined by ``&``, ``|`` and ``~``."""
    block = int(o.rng.choice([16, 32, 48]))
    found, allowed = mask(o, S_q, S_k, block)
    for sign in o.rng.choice(["&", "|", "~"], int(o.rng.integers(0, 3))):
        other, also = mask(o, S_q, S_k, block)
        other, also = (~other, ~also) if sign == "~" else (other, also)
        found, allowed = (found | other, allowed | also) if sign == "|" else (found & other, allowed & also)
    return found, allowed


@call()
def masks(o: Operands) -> Any:
    S_q, S_k = (int(n) for n in o.rng.choice([1, 16, 31, 64, 100, 128, 130], 2))
    found, allowed = combined(o, S_q, S_k)
    yield found.to_dense(), allowed
    yield (found.allowed, found.is_empty), (allowed.sum(), not allowed.any())
    yield found.density, allowed.mean(), 4
    again = BlockMask.from_dense(o.put(allowed), block=found.block)
    yield found == again and hash(found) == hash(again), True
    yield found != ~found and "BlockMask" in repr(found) and found.nbytes > 0 and found.device is not None, True
    yield BlockMask.stack([found, ~found]).to_dense(), np.stack([allowed, ~allowed])[None]
    first = min(S_q // found.block[0], 1) * found.block[0]
    yield found[first:, :].to_dense(), allowed[first:]
    yield found.get().to_device(o.device).to_dense(), allowed
    if S_q % found.block[0] == S_k % found.block[1] == 0:
        yield BlockMask.from_bsr(found.to_bsr()).to_dense(), allowed
    if len(kinds := o.place.backend.to_host(found.kinds)):
        yield found.elements(int(kinds[0])).shape, found.block


@dataclass(frozen=True)
class Exact:
    """Attention in float64, its gradients, and the largest element of each, to which what it is off is compared."""

    out: Array
    lse: Array
    gradients: tuple[Array, Array, Array]


def exact(q: Array, k: Array, v: Array, seen: Array, softcap: float | None = None, dout: Array | None = None) -> Exact:
    """Attention of operands (batch, heads, length, dim); `seen` is broadcast to (batch, heads, queries, keys)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    (B, H), group, scale = k.shape[:2], q.shape[1] // k.shape[1], 1 / np.sqrt(q.shape[3])
    many_k, many_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores, slope = scale * (q @ many_k.swapaxes(2, 3)), np.ones(())
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
        slope = 1 - (scores / softcap) ** 2
    seen = np.broadcast_to(seen, scores.shape)
    some = seen.any(axis=3, keepdims=True)
    top = np.where(some, np.where(seen, scores, -np.inf).max(axis=3, keepdims=True, initial=-np.inf), 0)
    weights = np.where(seen, np.exp(np.where(seen, scores, 0) - top), 0)
    total = np.where(some, weights.sum(axis=3, keepdims=True), 1)
    p, lse = weights / total, np.where(some, np.log(total) + top, -np.inf)[..., 0]
    out = p @ many_v
    dout = np.zeros_like(out) if dout is None else dout.astype(np.float64)
    ds = scale * slope * p * (dout @ many_v.swapaxes(2, 3) - (dout * out).sum(axis=3, keepdims=True))
    turned = ((ds.swapaxes(2, 3) @ q), (p.swapaxes(2, 3) @ dout))
    dk, dv = (x.reshape(B, H, group, *x.shape[2:]).sum(axis=2) for x in turned)
    return Exact(out, lse, (ds @ many_k, dk, dv))


def banded(S_q: int, S_k: int, left: int | None) -> tuple[dict[str, Any], Array]:
    """Options of attention, causal with a window, and the keys that are seen."""
    behind = np.arange(S_q)[:, None] + S_k - S_q - np.arange(S_k)
    return {"causal": True, **({} if left is None else {"window": (left, -1)})}, (behind >= 0) & (
        behind <= (S_k if left is None else left)
    )


#: By the name of a dtype, the share of the largest element of the result by which attention may be off here. Tighter
#: bounds are those of tests/attention and tests/gpu; here results of other calls are looked for.
_FAR = {"uint8": 2.0**-3, "bfloat16": 2.0**-5, "float16": 2.0**-8, "float32": 2.0**-15, "float64": 2.0**-40}
_HEADS = ((64, 64), (128, 128), (64, 32), (80, 80), (36, 36))


def near(got: Any, want: Array, dtype: np.dtype[Any]) -> tuple[Any, Array, float]:
    """A result that may be off by a share of the largest element."""
    largest = np.abs(np.where(np.isfinite(want), want, 0)).max(initial=1)
    return got, want, -_FAR[str(dtype)] * float(largest)


def attending(o: Operands) -> tuple[Any, ...]:
    """Operands of attention, the options of a call, and the keys that it sees."""
    D, D_v = _HEADS[int(o.rng.integers(len(_HEADS)))]
    S_q, S_k = (int(n) for n in o.rng.choice([1, 3, 17, 64, 65, 100, 130, 200], 2))
    H, group = int(o.rng.integers(1, 3)), int(o.rng.choice([1, 2, 4]))
    shapes = ((1, H * group, S_q, D), (1, H, S_k, D), (1, H, S_k, D_v), (1, H * group, S_q, D_v))
    options, seen = banded(S_q, S_k, o.rng.choice([None, 5, 40])) if o.k % 2 else ({}, np.ones((S_q, S_k), bool))
    if o.rng.random() < 0.5:
        options["mask"], allowed = combined(o, S_q, S_k)
        seen = seen & allowed
    return [o.normal(*shape, dtype=o.dtype) for shape in shapes], options, seen, o.rng.choice([None, 5.0])


@call("attention")
def attention(o: Operands) -> Any:
    (q, k, v, dout), options, seen, softcap = attending(o)
    there = [o.put(x) for x in (q, k, v)]
    want = exact(q, k, v, seen, softcap, dout)
    for _ in range(2):  # the second call may repeat the launch of the first
        out, lse = bg.attention(*there, softcap=softcap, return_lse=True, **options)
        yield near(out, want.out, o.dtype)
        yield near(lse, want.lse, o.dtype)
    turned = [x.swapaxes(1, 2) for x in there]
    yield near(bg.attention(*turned, layout="bshd", softcap=softcap, **options), want.out.swapaxes(1, 2), o.dtype)
    try:
        grads = bg.attention_backward(o.put(dout), *there, out, lse, softcap=softcap, **options)
    except NotImplementedError:  # some dtypes and head dims, on a card alone
        yield o.place.is_host, False
        return
    for got, exactly in zip(grads, want.gradients, strict=True):
        yield near(got, exactly, o.dtype)


@call("attention")
def merged_attention(o: Operands) -> Any:
    (q, k, v, _), _, _, _ = attending(o)
    Q, K, V = (o.put(x) for x in (q, k, v))
    cut = k.shape[2] // 2
    parts = [bg.attention(Q, K[:, :, s], V[:, :, s], return_lse=True) for s in (slice(cut), slice(cut, None))]
    outs, lses = zip(*parts, strict=True)
    out, lse = bg.merge_states(outs, lses)
    want = exact(q, k, v, np.ones((1, 1), bool))
    yield near(out, want.out, o.dtype)
    yield near(lse, want.lse, o.dtype)
    douts, dlses = bg.merge_states_backward(out, lse, outs, lses)
    for got, part in zip(douts, lses, strict=True):
        weight = np.exp(widened(o.place.backend.to_host(part)) - want.lse)
        yield near(got, weight[..., None] * want.out, o.dtype)
    yield [x.shape for x in dlses], [lse.shape, lse.shape]


@call("attention")
def attention_of_sequences(o: Operands) -> Any:
    lengths = o.rng.integers(0, 60, 3)
    cuts, number = np.append(0, np.cumsum(lengths)), np.repeat(np.arange(3), lengths)
    q, k, v = (o.normal(len(number), 2, 64, dtype=o.dtype) for _ in range(3))
    if len(number):
        out = bg.attention(*(o.put(x) for x in (q, k, v)), cu_seqlens_q=cuts, cu_seqlens_k=cuts)
        want = exact(*(x[None].swapaxes(1, 2) for x in (q, k, v)), number[:, None] == number)
        yield near(out, want.out[0].swapaxes(0, 1), o.dtype)


@call("single attention")
def attention_of_fp8(o: Operands) -> Any:
    coded = [o.normal(1, heads, 100, 64, dtype=FLOAT8) for heads in (4, 2, 2)]
    want = exact(
        *(x.astype(SINGLE) * scale for x, scale in zip(coded, (0.5, 1, 2), strict=True)), np.ones((1, 1), bool)
    )
    got = bg.attention(*(o.put(x.view(np.uint8)) for x in coded), q_scale=0.5, v_scale=2.0)
    yield near(got, want.out, np.dtype(np.uint8))


class Cache:
    """A KV cache and the tokens that it has to hold."""

    def __init__(self, o: Operands, capacity: int = 160) -> None:
        self.B, self.H, self.D = int(o.rng.integers(1, 4)), 2, int(o.rng.choice([64, 96, 128]))
        page = o.rng.choice(np.array([None, 16, 32], object))
        self.ours = bg.KVCache(self.B, self.H, capacity, self.D, dtype=o.dtype, page=page, device=o.device)
        empty = np.zeros((self.H, 0, self.D), o.dtype)
        self.held = [(empty, empty)] * self.B

    def append(self, o: Operands) -> None:
        n = int(o.rng.integers(1, 40))
        k, v = (o.normal(self.B, self.H, n, self.D, dtype=o.dtype) for _ in range(2))
        takes = [
            min(int(t), self.ours.capacity - x.shape[1])
            for t, (x, _) in zip(o.rng.integers(0, n + 1, self.B), self.held, strict=True)
        ]
        self.ours.append(o.put(k), o.put(v), takes)
        self.held = [
            (np.concatenate([x, k[b, :, :t]], 1), np.concatenate([y, v[b, :, :t]], 1))
            for b, (t, (x, y)) in enumerate(zip(takes, self.held, strict=True))
        ]

    def reset(self, o: Operands) -> None:
        b = int(o.rng.integers(self.B))
        self.ours.reset(b)
        self.held[b] = (self.held[b][0][:, :0],) * 2

    def read(self, o: Operands) -> Any:
        """What decode finds for queries at the ends of the sequences."""
        S_q, n = int(o.rng.choice([1, 3])), max(1, *(x.shape[1] for x, _ in self.held))
        q, left = o.normal(self.B, 2 * self.H, S_q, self.D, dtype=o.dtype), o.rng.choice([None, 10])
        k, v = (np.zeros((self.B, self.H, n, self.D), o.dtype) for _ in range(2))
        seen = np.zeros((self.B, 1, S_q, n), bool)
        for b, kept in enumerate(self.held):
            length = kept[0].shape[1]
            k[b, :, :length], v[b, :, :length] = kept
            seen[b, 0, :, :length] = banded(S_q, length, left)[1]
        options: dict[str, Any] = {} if left is None else {"window": (int(left), 0)}
        yield near(bg.attention_decode(o.put(q), self.ours, **options), exact(q, k, v, seen).out, o.dtype)
        yield self.ours.lengths.tolist(), [x.shape[1] for x, _ in self.held]
        for got, kept in zip(self.ours.gathered(0), self.held[0], strict=True):
            yield got, widened(kept)


@call("attention decode")
def decode(o: Operands) -> Any:
    cache = Cache(o)
    cache.ours.reserve(int(o.rng.integers(1, 160)))
    for _ in range(3):
        cache.append(o)
        yield from cache.read(o)
    cache.reset(o)
    yield from cache.read(o)
    yield "KVCache" in repr(cache.ours) and cache.ours.nbytes > 0 and cache.ours.device is not None, True
    yield cache.ours.refused.tolist(), [0] * cache.B
