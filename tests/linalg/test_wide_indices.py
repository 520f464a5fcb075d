"""Index arrays of 64 bits on a device: no place in them is put into 32 bits, which hold no more than 2^31 blocks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from bsrgemm import linalg
from bsrgemm._backend.base import Blocks
from bsrgemm.linalg import aggregation, constraints, multigrid, ordering, triangular

from .. import fake_cupy
from .problems import hermitian, numbers

pytestmark = pytest.mark.fake

ROOMS = ("/bsrgemm/linalg/", "/bsrgemm/interop/", "/bsrgemm/_batch.py")


def _checks(dtype: Any, other: Any) -> None:
    """Refuse integers of 64 bits where 32 are to hold them, if code of these rooms asks for it."""
    asking = sys._getframe(2).f_code.co_filename
    if any(room in asking for room in ROOMS):
        assert not (np.dtype(dtype) == np.int64 and np.dtype(other) == np.int32), "64 bits become 32"


def widening(place: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that gives a matrix index arrays of 64 bits; on a fake card they are watched."""
    fake = fake_cupy.backend()
    kind = fake_cupy.ndarray
    astype, setitem, cumsum = kind.astype, kind.__setitem__, fake.xp.cumsum

    def watched_astype(self: Any, dtype: Any, *args: Any, **options: Any) -> Any:
        _checks(self.dtype, dtype)
        return astype(self, dtype, *args, **options)

    def watched_setitem(self: Any, key: Any, value: Any) -> None:
        if isinstance(value, kind):
            _checks(value.dtype, self.dtype)
        setitem(self, key, value)

    def watched_cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        if out is not None:
            _checks(np.int64, out.dtype)
        return cumsum(a, axis, dtype, out)

    monkeypatch.setattr(kind, "astype", watched_astype)
    monkeypatch.setattr(kind, "__setitem__", watched_setitem)
    monkeypatch.setattr(fake.xp, "cumsum", watched_cumsum)

    def make(A: Any) -> Any:
        A = A.to_device(place)
        data, indices, indptr = A._canonical()
        return A._new(Blocks(data, indices.astype(np.int64), indptr.astype(np.int64)), canonical=True)

    return make


@pytest.fixture(params=["cuda", "cpu"])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return widening(request.param, monkeypatch)


def on_host(x: Any) -> Any:
    return x.get() if isinstance(x, fake_cupy.ndarray) else x


def test_nodes_are_counted_in_64_bits(wide: Any) -> None:
    A = wide(hermitian(24))
    backend = A._backend
    indices, indptr, coupled = aggregation.strong_connections(A, 0.0)
    assert indices.dtype == indptr.dtype == np.int64
    assert aggregation._counts(backend.xp, coupled).dtype == np.int64
    number, count = aggregation.aggregates(backend, indices, indptr, coupled)
    assert number.dtype == np.int64
    for numbers_of in (number, backend.xp.where(number == 0, -1, number)):
        T, _ = aggregation.tentative(A, numbers_of, count, backend.from_host(np.ones((24, 1))))
        assert T.indices.dtype == T.indptr.dtype == np.int64
    T, _ = aggregation.tentative(A, 0 * number - 1, 0, backend.from_host(np.ones((24, 1))))
    assert T.indices.dtype == T.indptr.dtype == np.int64


def test_groups_and_pivots_have_places_of_64_bits(wide: Any) -> None:
    A = wide(hermitian(24))
    inverse = A.block_diagonal()
    for order in (ordering.colours, ordering.levels, lambda A: ordering.levels(A, False)):
        number, count = order(A)
        assert number.dtype == np.int64
        found = ordering.groups(A, number, count, inverse)
        sides = [side for group in found.several for side in (group.before, group.after) if side is not None]
        for side in (found.inverse, *sides):
            assert side.indices.dtype == side.indptr.dtype == np.int64
        factored, _ = triangular._factored(A, number, count)
        assert factored.indices.dtype == factored.indptr.dtype == np.int64
    b = numbers(24)
    found = linalg.ilu0(A) @ A._backend.from_host(b)
    np.testing.assert_allclose(on_host(found), linalg.ilu0(hermitian(24)) @ b)


def test_places_of_blocks_have_64_bits(wide: Any) -> None:
    P = wide(hermitian(24))
    xp = P._backend.xp
    columns = xp.arange(12)
    found = multigrid._place_of_columns(P, columns)
    assert found.dtype == np.int64
    row = np.repeat(np.arange(12), np.diff(on_host(P.indptr)))
    assert on_host(found).tolist() == np.flatnonzero(row == on_host(P.indices)).tolist()
    fixed, _ = linalg.constrain(P, P._backend.from_host(np.ones(24)), [3, 4])
    assert fixed.indices.dtype == fixed.indptr.dtype == np.int64
    for given in ([3, 4], np.array([3], np.uint8), [], np.array([], np.int32)):
        assert constraints._places(P, given).dtype == np.int64
