"""All that is promised of vector_steps: the steps of conjugate gradients, beside the backend of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._backend import registry
from bsrgemm._backend.array_kernels import VECTOR_DTYPES, VectorSteps, vector_step
from bsrgemm._backend.base import ConjugateVectors
from bsrgemm._backend.cupy_backend import VectorCall
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm.dtypes import DEVICE_DTYPES

from ..devices import Device
from .products import few_ctas

DTYPES = [pytest.param(dtype, id=str(dtype)) for dtype in VECTOR_DTYPES]
#: A vector and the one beside it.
PAIRS = [pytest.param(a, b, id=f"{a}-{b}") for a, others in VECTOR_DTYPES.items() for b in others]
SIZES = (0, 1, 31, 1000, 4096, 9001)
#: More chunks than CTAs, whatever the dtype.
LONG = 40_003


@pytest.fixture
def put(device: Device) -> Callable[[Any], Any]:
    device.needs("sm_75")
    return device.asarray


@pytest.fixture
def shifted(put: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same elements behind another one, so that no load of 16 bytes fits them; single numbers are not moved."""
    return lambda x: put(np.concatenate([x[:1], x]))[1:] if x.size > 3 else put(x)


def whole(rng: np.random.Generator, shape: Any, dtype: Any) -> Any:
    """Small whole numbers: no sum or product of them is rounded."""
    found = rng.integers(-3, 4, shape)
    return np.asarray(found + 1j * rng.integers(-3, 4, shape) if np.dtype(dtype).kind == "c" else found, dtype)


def numbers(rng: np.random.Generator, shape: Any, dtype: Any) -> Any:
    found = rng.standard_normal(shape)
    return np.asarray(found + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else found, dtype)


def on_host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else np.array(x)


def inner(u: Any, v: Any) -> Any:
    """The inner product on the card, of shape ()."""
    got = registry.cuda().inner_product(u, v)
    assert got.shape == () and got.dtype == u.dtype
    return got.get()


def direction(y: Any, a: Any, b: Any, x: Any) -> Any:
    """y = a / b * y + x on the card."""
    registry.cuda().multiply_by_ratio_and_add(y, a, b, x)
    return y.get()


def advanced(backend: Any, place: Callable[[Any], Any], given: list[Any], rz: Any, pq: Any) -> list[Any]:
    """What `advance` leaves of x, r, p, q, the number before and the three numbers."""
    vectors = ConjugateVectors(*(place(x.copy()) for x in given))
    dtype = given[0].dtype
    before, told = place(np.array(77, dtype)), place(np.full(3, 77, np.empty(0, dtype).real.dtype))
    backend.advance(vectors, place(rz), place(pq), before, told, place(np.empty_like(given[0])))
    return [on_host(x) for x in (*vectors, before, told)]


@pytest.mark.races
@pytest.mark.before
@pytest.mark.parametrize(("dtype", "other"), PAIRS)
def test_inner_products_of_every_length(
    dtype: Any, other: Any, rng: np.random.Generator, put: Any, shifted: Any
) -> None:
    for n in SIZES:
        u, v = whole(rng, n, dtype), whole(rng, n, other)
        for place in (put, shifted):
            np.testing.assert_array_equal(inner(place(u), place(v)), np.vdot(u, v), str(n))


@pytest.mark.races
@pytest.mark.before
@pytest.mark.parametrize(("dtype", "other"), PAIRS)
def test_directions_of_every_length(dtype: Any, other: Any, rng: np.random.Generator, put: Any, shifted: Any) -> None:
    for n in SIZES:
        y, x = whole(rng, n, dtype), whole(rng, n, other)
        for place in (put, shifted):
            got = direction(place(y), put(np.array(6, dtype)), put(np.array(-2, dtype)), place(x))
            np.testing.assert_array_equal(got, -3 * y + x, str(n))


@pytest.mark.races
@pytest.mark.before
@pytest.mark.parametrize("dtype", DTYPES)
def test_advances_of_every_length(dtype: Any, rng: np.random.Generator, put: Any, shifted: Any) -> None:
    for n in SIZES:
        given = [whole(rng, n, dtype) for _ in range(4)]
        rz, pq = np.array(4, dtype), np.array(2, dtype)
        want = advanced(HOST, lambda x: x, given, rz, pq)
        np.testing.assert_array_equal(want[1], given[1] - 2 * given[3])
        for place in (put, shifted):
            for got, wanted in zip(advanced(registry.cuda(), place, given, rz, pq), want, strict=True):
                np.testing.assert_array_equal(got, wanted, str(n))


@pytest.mark.parametrize("dtype", DTYPES)
def test_complex_factors_are_divided_as_numpy_divides(dtype: Any, rng: np.random.Generator, put: Any) -> None:
    n = 100
    y, x, given = numbers(rng, n, dtype), numbers(rng, n, dtype), [numbers(rng, n, dtype) for _ in range(4)]
    close = {"rtol": 50 * np.finfo(dtype).eps, "atol": 50 * np.finfo(dtype).eps}
    large = np.finfo(dtype).max / 16
    for a, b in ((1, 1), (1, large), (large, large), (1, 0), (0, 1)):
        a, b = (np.asarray(numbers(rng, (), dtype) * np.asarray(k, dtype), dtype) for k in (a, b))
        there = direction(put(y), put(a), put(b), put(x))
        wanted = x if b == 0 else np.asarray(a / b, dtype) * y + x
        np.testing.assert_allclose(there, wanted, **close)
        want = advanced(HOST, lambda x: x, given, a, b)
        for got, wanted in zip(advanced(registry.cuda(), put, given, a, b), want, strict=True):
            np.testing.assert_allclose(got, wanted, **close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_the_numbers_alone(
    dtype: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, put: Any, shifted: Any
) -> None:
    """Neither on the place of the vectors nor on the order of threads."""
    u, v = numbers(rng, LONG, dtype), numbers(rng, LONG, dtype)
    assert vector_step("kInnerProduct", dtype, dtype).grid(LONG)[0] > 4
    given = [u, v, numbers(rng, LONG, dtype), numbers(rng, LONG, dtype)]
    rz, pq = numbers(rng, (), dtype), numbers(rng, (), dtype)
    seen = set()
    for place, seed in ((put, "1"), (put, "2"), (shifted, "3"), (put, "4")):
        monkeypatch.setenv("BSRGEMM_EMULATOR_SEED", seed)
        total = inner(place(u), place(v))
        moved = advanced(registry.cuda(), place, given, rz, pq)
        seen.add((total.tobytes(), *(x.tobytes() for x in moved)))
    assert len(seen) == 1
    exact = np.vdot(u.astype("D"), v.astype("D"))
    assert abs(total - exact) <= 30 * np.finfo(dtype).eps * np.vdot(abs(u), abs(v)).real


@pytest.mark.races
@pytest.mark.emulated
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_ctas_go_on_until_nothing_is_left(dtype: Any, rng: np.random.Generator, put: Any) -> None:
    u, v, y = (whole(rng, LONG, dtype) for _ in range(3))
    given = [whole(rng, LONG, dtype) for _ in range(4)]
    rz, pq = np.array(4, dtype), np.array(2, dtype)
    with few_ctas(2):
        np.testing.assert_array_equal(inner(put(u), put(v)), np.vdot(u, v))
        there = direction(put(y), put(rz), put(pq), put(v))
        np.testing.assert_array_equal(there, 2 * y + v)
        got, want = advanced(registry.cuda(), put, given, rz, pq), advanced(HOST, lambda x: x, given, rz, pq)
        for mine, wanted in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_the_sums_and_nothing_else(
    bad: float, dtype: Any, rng: np.random.Generator, put: Any
) -> None:
    for n in (1, 1000, 9001):
        u, v = whole(rng, n, dtype), np.ones(n, dtype)
        u[n // 2] = bad
        assert not np.isfinite(inner(put(u), put(v)))
        given = [whole(rng, n, dtype) for _ in range(3)]
        given.insert(1, u)
        x, r, _, _, before, told = advanced(registry.cuda(), put, given, np.array(1, dtype), np.array(1, dtype))
        assert np.isfinite(x).all() and (np.isfinite(r) == (np.arange(n) != n // 2)).all()
        assert not np.isfinite(told[0]) and (told[1:] == 1).all() and before == 1
    # An infinite step leaves an infinite residual: what lies after the end of the vectors is not counted.
    ones = [np.ones(3, np.float64) for _ in range(4)]
    *_, told = advanced(registry.cuda(), put, ones, np.array(np.inf), np.array(1.0))
    assert told[0] == np.inf


def test_a_vector_may_stand_on_both_sides(rng: np.random.Generator, put: Any) -> None:
    """Without a preconditioner z is r, and the matrix may return its operand."""
    u = put(whole(rng, 3001, "D"))
    assert inner(u, u) == np.vdot(on_host(u), on_host(u))
    p, one, two = put(whole(rng, 3001, "d")), put(np.array(1.0)), put(np.array(2.0))
    x, r, told = put(np.zeros(3001)), p.copy(), put(np.zeros(3))
    registry.cuda().advance(ConjugateVectors(x, r, p, p), two, one, put(np.zeros(())), told, x)
    np.testing.assert_array_equal(on_host(x), 2 * on_host(p))
    np.testing.assert_array_equal(on_host(r), -on_host(p))


def test_other_arrays_are_left_to_array_operations(rng: np.random.Generator, put: Any) -> None:
    f64, f32 = np.dtype("d"), np.dtype("f")
    fine = put(np.ones(8))
    assert VectorCall("kInnerProduct", fine, fine).supported()
    half = put(np.ones(33, np.uint8))[1:].view(np.float32)
    others = {
        "strides": (put(np.ones(16))[::2], fine),
        "columns": (put(np.ones((8, 1))), put(np.ones((8, 1)))),
        "dtypes": (put(np.ones(8, np.float16)), put(np.ones(8, np.float16))),
        "a wider second vector": (put(np.ones(8, f32)), fine),
        "real and complex": (put(np.ones(8, "D")), fine),
        "a place between elements": (half, half),
        "lengths": (fine, put(np.ones(1))),
    }
    for name, (u, v) in others.items():
        assert not VectorCall("kInnerProduct", u, v).supported(), name
    one = put(np.array(1.0))
    assert VectorCall("kAdvance", fine, fine, fine, fine, one, one, one).supported()
    assert not VectorCall("kAdvance", fine, put(np.ones(8, f32)), fine, fine, one, one, one).supported()
    assert not VectorCall("kAdvance", fine, fine, put(np.ones(8, f32)), fine, one, one, one).supported()
    assert not VectorCall("kDirection", fine, fine, a=put(np.array(1, f32)), b=one).supported()
    assert not VectorCall("kDirection", fine, fine, a=put(np.ones(1)), b=one).supported()
    assert registry.cuda().inner_product(put(np.arange(8.0, dtype=f32)), fine).dtype == f64
    assert float(registry.cuda().inner_product(put(np.arange(16.0))[::2], fine)) == 56


def test_grids_follow_from_the_length_and_the_types() -> None:
    step = vector_step("kInnerProduct", np.dtype("d"), np.dtype("d"))
    assert [step.grid(n)[0] for n in (0, 1, 2048, 2049, 10**6, 10**9)] == [1, 1, 1, 2, 489, 512]
    assert vector_step("kAdvance", np.dtype("d"), np.dtype("d")).grid(2049) == (3,)


def test_all_that_is_launched_is_listed() -> None:
    listed = set(VectorSteps.every(DEVICE_DTYPES))
    pairs = [(a, b) for a, others in VECTOR_DTYPES.items() for b in others]
    steps = {vector_step(step, a, b) for step in ("kInnerProduct", "kDirection") for a, b in pairs}
    assert listed == steps | {vector_step("kAdvance", a, a) for a in VECTOR_DTYPES}
