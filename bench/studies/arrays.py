"""Array operations beside the csr arrays of cupyx, or of scipy on a CPU: 30 operations on 5 matrices.

A time is that of the whole call, on the host and on the card: until the card is done, the least of several runs.
Results are checked first: vectors and numbers are compared, and matrices by their products with a random vector. A peer
that has no such operation, or none for a dtype, is left out.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

import bsrgemm as bg

from ..measure import Row, Run, reason_of
from ..place import Place
from ..report import Column, duration, rate, times
from ..study import Study

#: name: (block rows, side of a block, blocks in a row, dtype)
MATRICES = {
    "tiny 3x3": (200, 3, 9, "float64"),
    "mid 3x3": (20_000, 3, 27, "float64"),
    "large 3x3": (300_000, 3, 27, "float64"),
    "tiny 64x64": (16, 64, 4, "float32"),
    "mid 64x64": (256, 64, 14, "float32"),
}
#: What a quick run measures, and what a CPU does in a few seconds
_QUICK, _FOR_A_CPU = ("tiny 3x3", "tiny 64x64"), ("tiny 3x3", "mid 3x3", "tiny 64x64", "mid 64x64")
#: Runs of each, seconds after which no further run is begun, and seconds of a run: shorter calls are repeated
_RUNS, _MOST_SECONDS, _LEAST_RUN = 7, 0.5, 2e-3
#: A cell is slow if ours takes more than this many times as long
SLOW = 1.2

#: The operands of one library: A, a copy A2 of it, B with another pattern, and `of`, the functions of the library
Case = Any
#: what: the call. Each case makes what it needs of its own library.
OPERATIONS: dict[str, Callable[[Case], Any]] = {
    "A + A2": lambda c: c.A + c.A2,
    "A + B": lambda c: c.A + c.B,
    "A - B": lambda c: c.A - c.B,
    "A.multiply(B)": lambda c: c.A.multiply(c.B),
    "A.maximum(B)": lambda c: c.A.maximum(c.B),
    "A != B": lambda c: c.A != c.B,
    "A * 2": lambda c: c.A * 2.0,
    "-A": lambda c: -c.A,
    "abs(A)": lambda c: abs(c.A),
    "A.copy()": lambda c: c.A.copy(),
    "A.astype": lambda c: c.A.astype(c.other),
    "A.T.copy()": lambda c: c.A.T.copy(),
    "A.sum()": lambda c: c.A.sum(),
    "A.sum(0)": lambda c: c.A.sum(0),
    "A.sum(1)": lambda c: c.A.sum(1),
    "A.max()": lambda c: c.A.max(),
    "A.max(0)": lambda c: c.A.max(axis=0),
    "A.max(1)": lambda c: c.A.max(axis=1),
    "A.count_nonzero()": lambda c: c.A.count_nonzero(),
    "A.diagonal()": lambda c: c.A.diagonal(),
    "A.diagonal(1)": lambda c: c.A.diagonal(1),
    "setdiag": lambda c: _after(c.A2, c.A2.setdiag(2.0)),
    "A[: half]": lambda c: c.A[: c.half],
    "vstack": lambda c: c.of.vstack([c.A, c.B]),
    "A.tocsr()": lambda c: c.A.tocsr() if c.ours else c.A.copy(),
    "A.tocoo()": lambda c: c.A.tocoo(),
    "A.toarray()": lambda c: c.A.toarray(),
    "from csr": lambda c: bg.bsr_array(c.csr, blocksize=c.block) if c.ours else c.csr.tocoo(),
    "from arrays": lambda c: c.make((c.A.data, c.A.indices, c.A.indptr), shape=c.A.shape),
    "sum_duplicates": lambda c: _after(c.A2, c.A2.sum_duplicates()),
}
#: Results that take too much memory
_WITHOUT = {("mid 3x3", "A.toarray()"), ("large 3x3", "A.toarray()")}


def _after(A: Any, nothing: None) -> Any:
    """A matrix that a call has changed in place."""
    return A


def _matrix(place: Place, name: str, seed: int) -> Any:
    """Random values in a band, in a random pattern with at least the diagonal."""
    rows, side, each, dtype = MATRICES[name]
    rng = np.random.default_rng(seed)
    columns = np.arange(rows)[:, None] + np.sort(rng.permutation(4 * each)[:each])[None, :] - 2 * each
    columns[:, 0] = np.arange(rows)
    columns = np.sort(columns % rows, axis=1)
    kept = np.concatenate([np.ones((rows, 1), bool), columns[:, 1:] != columns[:, :-1]], axis=1)
    indptr = np.concatenate([[0], np.cumsum(kept.sum(1))]).astype(np.int32)
    data = rng.standard_normal((int(indptr[-1]), side, side)).astype(dtype)
    arrays = data, columns[kept].astype(np.int32), indptr
    return bg.bsr_array(tuple(map(place.xp.asarray, arrays)), shape=(rows * side,) * 2)


def operands(place: Place, name: str) -> tuple[Case, Case]:
    """The operands for us and for the peer."""
    if place.on_gpu:
        import cupyx.scipy.sparse as sparse
    else:
        import scipy.sparse as sparse
    rows, side, _, dtype = MATRICES[name]
    A, B = (_matrix(place, name, seed) for seed in (0, 1))
    csr = A.tocsr()
    common = {"block": (side, side), "half": rows // 2 * side, "other": {"d": "f", "f": "d"}[np.dtype(dtype).char]}
    common |= {"csr": csr, "x": place.xp.asarray(np.random.default_rng(2).standard_normal(rows * side).astype(dtype))}
    return (
        SimpleNamespace(A=A, A2=A.copy(), B=B, of=bg, make=bg.bsr_array, ours=True, **common),
        SimpleNamespace(A=csr, A2=csr.copy(), B=B.tocsr(), of=sparse, make=sparse.csr_array, ours=False, **common),
    )


def agree(place: Place, x: Any, ours: Any, theirs: Any) -> bool:
    """Whether two results are equal, but for the order of sums."""
    numbers: list[Any] = []
    for found in (ours, theirs):
        if hasattr(found, "tocsr"):
            if found.ndim == 1:
                found = found.toarray()
            else:
                plain = found.astype(x.dtype) if found.dtype == np.bool_ else found
                found = (plain @ x[: found.shape[1]]) if found.shape[1] == len(x) else found.toarray()
        numbers.append(np.asarray(found.get() if hasattr(found, "get") else found).reshape(-1))
    tolerance = 1e-3 if x.dtype == np.float32 or numbers[0].dtype == np.float32 else 1e-8
    scale = float(np.abs(numbers[1]).max(initial=1.0))
    one, other = numbers
    return one.shape == other.shape and np.allclose(one, other, rtol=0, atol=tolerance * scale)


def seconds(place: Place, call: Callable[[], Any]) -> float:
    """The least time of a call, until the card is done."""
    call()
    place.synchronize()
    begin = time.perf_counter()
    call()
    place.synchronize()
    repeats = max(1, int(_LEAST_RUN / max(time.perf_counter() - begin, 1e-7)))
    least, spent = float("inf"), 0.0
    for number in range(_RUNS):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
            place.synchronize()
        run = time.perf_counter() - begin
        least, spent = min(least, run / repeats), spent + run
        if spent > _MOST_SECONDS and number >= 2:
            break
    return least


def _cell(place: Place, call: Callable[[Case], Any], pair: tuple[Case, Case]) -> dict[str, Any]:
    ours, theirs = pair
    try:
        first = call(ours)
    except Exception as error:
        return {"failed": reason_of(error)}
    try:
        right = agree(place, ours.x, first, call(theirs))
    except (NotImplementedError, TypeError, ValueError, AttributeError) as error:
        return {"seconds": seconds(place, lambda: call(ours)), "without": reason_of(error)}
    if not right:
        return {"wrong": True}
    times = [seconds(place, lambda case=case: call(case)) for case in pair]  # type: ignore[misc]
    return {"seconds": times[0], "peer": times[1], "ratio": times[0] / times[1]}


def arrays(run: Run) -> Iterator[Row]:
    """All operations, each on every matrix; a quick run has the two tiny ones."""
    names = run.place.some(list(MATRICES if run.place.on_gpu else _FOR_A_CPU), list(_QUICK))
    pairs = {name: operands(run.place, name) for name in names}
    slow, cells = 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, call in OPERATIONS.items():
            run.say(what)
            row: Row = {"what": what}
            for name in names:
                if (name, what) not in _WITHOUT:
                    row[name] = _cell(run.place, call, pairs[name])
                    cells += "ratio" in row[name]
                    slow += row[name].get("ratio", 0) > SLOW
            if any(cell.get("wrong") for cell in row.values() if isinstance(cell, dict)):
                row["wrong"] = True
            yield row
    yield {"what": f"slower than {SLOW} x: {slow} of {cells}"}


def _seconds(name: str) -> Column:
    def cell(row: Row) -> str:
        found = row.get(name, {})
        if "seconds" in found:
            return duration(found["seconds"])
        return "wrong" if "wrong" in found else str(found.get("failed", ""))

    return Column(name, cell)


def _factor(name: str) -> Column:
    """How many times as long as the peer ours takes."""
    return Column("/ csr", lambda row: times(row[name]["ratio"]) if "ratio" in row.get(name, {}) else "")


def _sources(place: Place, name: str) -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Matrices to convert: what: (the same matrix in another form, the call)."""
    ours, _ = operands(place, name)
    xp, A, csr, block = place.xp, ours.A, ours.csr, ours.block
    coo = csr.tocoo()
    rng = np.random.default_rng(3)
    order, kept = (xp.asarray(x) for x in (rng.permutation(csr.nnz), rng.random(csr.nnz) < 0.9))
    holes = type(coo)((coo.data[kept], (coo.row[kept], coo.col[kept])), shape=coo.shape).tocsr()
    arrays = (coo.data, (coo.row, coo.col))
    mixed = (coo.data[order], (coo.row[order], coo.col[order]))
    twice = (2 * block[0], 2 * block[1])
    return {
        "csr -> blocks, all full": (csr, lambda: bg.bsr_array(csr, blocksize=block)),
        "csr -> blocks, one element in ten missing": (holes, lambda: bg.bsr_array(holes, blocksize=block)),
        "csr -> blocks, size to be guessed": (csr, lambda: bg.bsr_array(csr)),
        "coo in order -> blocks": (csr, lambda: bg.bsr_array(arrays, shape=A.shape, blocksize=block)),
        "coo in any order -> blocks": (csr, lambda: bg.bsr_array(mixed, shape=A.shape, blocksize=block)),
        "blocks -> twice as high and wide": (csr, lambda: A.tobsr(twice)),
        "blocks -> csr": (csr, A.tocsr),
        "blocks -> coo": (csr, A.tocoo),
        "elements that are not zero": (csr.nnz, A.count_nonzero),
    }


def formats(run: Run) -> Iterator[Row]:
    """Every conversion of every matrix, with the bytes of values and columns that it reads and writes at least."""
    names = run.place.some(list(MATRICES if run.place.on_gpu else _FOR_A_CPU), list(_QUICK))
    for name in names:
        x = run.place.xp.asarray(np.random.default_rng(2).standard_normal(MATRICES[name][0] * MATRICES[name][1]))
        for what, (same, call) in _sources(run.place, name).items():
            run.say(f"{name} {what}")
            found = call()
            wrong = found != same if isinstance(same, int) else not agree(run.place, x, found, same)
            took = seconds(run.place, call)
            size = found.nnz * found.dtype.itemsize * 2 if hasattr(found, "nnz") else 0
            yield {"what": f"{name}: {what}", "seconds": took, "rate": size / took or None, "wrong": wrong or None}


STUDIES = (
    Study("arrays", "array operations on the device, as multiples of cupyx's or scipy's csr", arrays,
          tuple(make(name) for name in MATRICES for make in (_seconds, _factor))),
    Study("formats", "conversions of matrices between blocks, CSR and COO, and the rate at which values move",
          formats,
          (Column("time", lambda row: "wrong" if row.get("wrong") else duration(row.get("seconds"))),
           Column("values", lambda row: rate(row.get("rate"), "B/s")))),
)  # fmt: skip
