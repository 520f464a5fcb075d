"""What solvers do with vectors in one launch: the numbers of NumPy, in place, and zeros where they divide by 0."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bsrgemm import linalg
from bsrgemm._backend.base import Backend, ConjugateVectors
from bsrgemm._backend.registry import by_name, host

from .linalg_graph_cases import graphs_on_a_card, problem  # noqa: F401  (a fixture)
from .marks import some_under_memcheck

pytestmark = pytest.mark.gpu

#: Shapes of vectors, and of a factor for each of their columns or systems.
SHAPES = [((1_001,), ()), ((501, 3), (3,)), ((4, 250), (4, 1)), ((0,), ()), ((1, 1), (1,))]


DTYPES = ["float32", "float64", "complex64", "complex128"]
#: A vector and the one beside it.
PAIRS = [*((dtype, dtype) for dtype in DTYPES), ("float64", "float32"), ("complex128", "complex64")]
SIZES = (0, 1, 31, 1000, 100_003)


def numbers(shape: tuple[int, ...], dtype: str) -> Any:
    rng = np.random.default_rng(len(shape))
    found = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else 0)
    return np.asarray(found, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize(("shape", "factors"), SHAPES, ids=str)
def test_multiples_of_vectors_are_added_in_place(shape: tuple[int, ...], factors: tuple[int, ...], dtype: str) -> None:
    card = by_name("cuda")
    x, y, factor = numbers(shape, dtype), numbers(shape, dtype)[::-1].copy(), numbers(factors, dtype)
    scale = np.finfo(dtype).eps * 8
    for name, wanted in (
        ("add_multiple", y + factor * x),
        ("subtract_multiple", y - factor * x),
        ("multiply_and_add", factor * y + x),
    ):
        there, work = (card.from_host(a.copy()) for a in (y, x))
        operands = [there, card.from_host(factor), card.from_host(x)] + [work] * (name != "multiply_and_add")
        getattr(card, name)(*operands)
        np.testing.assert_allclose(card.to_host(there), wanted, rtol=scale, atol=scale)
        assert there.dtype == np.dtype(dtype)


def test_vectors_of_a_narrower_dtype_are_widened() -> None:
    card = by_name("cuda")
    x, y = numbers((100,), "float32"), numbers((100,), "complex128")
    there = card.from_host(y.copy())
    card.add_multiple(there, card.from_host(np.array(1.5)), card.from_host(x), there)
    np.testing.assert_allclose(card.to_host(there), y + 1.5 * x.astype("float64"), rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_a_ratio_is_zero_where_it_would_divide_by_zero(dtype: str) -> None:
    card = by_name("cuda")
    for shape in ((), (5,), (4, 3)):
        a, b = numbers(shape, dtype), numbers(shape, dtype)[...].copy()
        b.reshape(-1)[::2] = 0
        found = card.to_host(card.safe_ratio(card.from_host(a), card.from_host(b)))
        zero = b == 0
        np.testing.assert_allclose(found, np.where(zero, 0, a / np.where(zero, 1, b)), rtol=1e-6)
        assert found.dtype == np.dtype(dtype) and found.shape == shape
    real = np.array([2.0, 0.0])
    a = numbers((3, 2), "complex128")
    found = card.to_host(card.safe_ratio(card.from_host(a), card.from_host(real)))
    np.testing.assert_allclose(found, np.stack([a[:, 0] / 2, np.zeros(3)], axis=1))


# ---------------------------------------------------------------------------------------- inner products and steps
def drawn(rng: np.random.Generator, shape: Any, dtype: str) -> Any:
    found = rng.standard_normal(shape)
    return np.asarray(found + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else found, dtype)


def placed(x: Any, first: int) -> Any:
    """A vector on the card; with 1, behind another element, so that no load of 16 bytes fits it."""
    card = by_name("cuda")
    return card.from_host(np.concatenate([np.ones(first, x.dtype), x]))[first:]


def advanced(backend: Backend, place: Callable[[Any], Any], given: list[Any], rz: Any, pq: Any) -> list[Any]:
    """What `advance` leaves of x, r, p, q, the number before and the three numbers, where the backend is."""
    dtype = given[0].dtype
    vectors = ConjugateVectors(*(place(x.copy()) for x in given))
    factors = [backend.from_host(np.array(x, dtype)) for x in (rz, pq, 77)]
    told = backend.from_host(np.full(3, 77, np.empty(0, dtype).real.dtype))
    backend.advance(vectors, *factors, told, place(given[0].copy()))
    return [*vectors, factors[-1], told]


@pytest.mark.parametrize("dtypes", some_under_memcheck(PAIRS, PAIRS[1:5:3]))
@pytest.mark.parametrize("first", [0, 1])
def test_inner_products_are_those_of_numpy(first: int, dtypes: tuple[str, str], rng: Any) -> None:
    card, (dtype, other) = by_name("cuda"), dtypes
    for n in SIZES:
        u, v = drawn(rng, n, dtype), drawn(rng, n, other)
        got = card.inner_product(placed(u, first), placed(v, first))
        assert got.shape == () and got.dtype == np.dtype(dtype)
        wide = u.astype("complex128"), v.astype("complex128")
        error = abs(complex(card.to_host(got)) - np.vdot(*wide))
        # the longest chain has fewer than 64 additions at these sizes
        assert error <= 64 * np.finfo(dtype).eps * float(abs(u) @ abs(v))


@pytest.mark.parametrize("dtypes", some_under_memcheck(PAIRS, PAIRS[1:5:3]))
@pytest.mark.parametrize("first", [0, 1])
def test_a_direction_takes_its_ratio_from_a_card(first: int, dtypes: tuple[str, str], rng: Any) -> None:
    card, (dtype, other) = by_name("cuda"), dtypes
    close = 16 * float(np.finfo(dtype).eps)
    for n in SIZES:
        y, x, a, b = drawn(rng, n, dtype), drawn(rng, n, other), drawn(rng, (), dtype), drawn(rng, (), dtype)
        for below in (b, np.zeros((), dtype)):
            there = placed(y, first)
            card.multiply_by_ratio_and_add(there, card.from_host(a), card.from_host(below), placed(x, first))
            wanted = y.copy()
            host().multiply_by_ratio_and_add(wanted, a, below, x)
            scale = 1 + abs(host().safe_ratio(a, below))
            np.testing.assert_allclose(card.to_host(there), wanted, rtol=close, atol=close * scale * 4)


@pytest.mark.parametrize("dtype", some_under_memcheck(DTYPES, ["float64"]))
@pytest.mark.parametrize("first", [0, 1])
def test_an_advance_is_that_of_numpy(first: int, dtype: str, rng: Any) -> None:
    card, close = by_name("cuda"), 64 * float(np.finfo(dtype).eps)
    for n in SIZES:
        given = [drawn(rng, n, dtype) for _ in range(4)]
        rz, pq = drawn(rng, (), dtype), drawn(rng, (), dtype)
        for below in (pq, np.zeros((), dtype)):
            want = advanced(host(), lambda x: x, given, rz, below)
            got = advanced(card, lambda x: placed(x, first), given, rz, below)
            scale = 1 + abs(host().safe_ratio(rz, below))
            for mine, wanted in zip(got, want, strict=True):
                np.testing.assert_allclose(card.to_host(mine), wanted, rtol=close, atol=close * scale * 4)
            assert card.to_host(got[4]) == rz and tuple(card.to_host(got[5])[1:]) == (below.real, rz.real)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_reach_the_sums(bad: float, rng: Any) -> None:
    card = by_name("cuda")
    for n, place in ((1, 0), (1000, 999), (100_003, 50_000)):
        u = drawn(rng, n, "float64")
        u[place] = bad
        assert not np.isfinite(card.to_host(card.inner_product(card.from_host(u), card.from_host(np.ones(n)))))
        given = [np.ones(n), u, np.ones(n), np.ones(n)]
        x, r, _, _, _, told = map(card.to_host, advanced(card, card.from_host, given, 1.0, 2.0))
        assert (x == 1.5).all() and (np.isfinite(r) == (np.arange(n) != place)).all()
        assert not np.isfinite(told[0]) and tuple(told[1:]) == (2, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_have_the_same_bits_every_time_and_at_every_place(dtype: str, rng: Any) -> None:
    card = by_name("cuda")
    for n in (1000, 100_003, 3_000_017):
        u, v = drawn(rng, n, dtype), drawn(rng, n, dtype)
        seen = set()
        for k in range(50):
            if k in (0, 25):
                there = [placed(x, k % 2) for x in (u, v)]
            seen.add(card.to_host(card.inner_product(*there)).tobytes())
        given, kept = [u, v, v[::-1].copy(), u[::-1].copy()], set()
        for k in range(4):
            moved = advanced(card, lambda x, k=k: placed(x, k % 2), given, 1.25, 0.75)
            kept.add(tuple(card.to_host(x).tobytes() for x in moved))
        assert len(seen) == len(kept) == 1


def test_steps_of_a_captured_graph_have_the_bits_of_launched_ones(graphs_on_a_card: None, rng: Any) -> None:  # noqa: F811
    import cupy

    card, n = by_name("cuda"), 100_003
    u, v, x, p = (card.from_host(drawn(rng, n, "float64")) for _ in range(4))
    state = [a.copy() for a in (u, x)]
    before, told = cupy.zeros(()), cupy.zeros(3)
    found: list[Any] = []

    def steps() -> None:
        rz = card.inner_product(u, v)
        card.multiply_by_ratio_and_add(p, rz, before, v)
        pq = card.inner_product(p, p)
        card.advance(ConjugateVectors(x, u, p, v), rz, pq, before, told, x)
        found[:] = rz, pq

    def outcome() -> list[bytes]:
        return [card.to_host(a).tobytes() for a in (u, x, p, before, told, *found)]

    def begin() -> None:
        u[...], x[...], before[...] = *state, 0
        p.fill(0)

    begin()
    wanted = []
    for _ in range(3):
        steps()
        wanted.append(outcome())
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        steps()
        graph = stream.end_capture()
    begin()
    cupy.cuda.get_current_stream().synchronize()
    for want in wanted:
        graph.launch(stream)
        stream.synchronize()
        assert outcome() == want


def test_streams_and_threads_do_not_meet(rng: Any) -> None:
    import cupy

    card = by_name("cuda")
    vectors = [drawn(rng, 200_003, "float64") for _ in range(4)]
    wanted = [card.to_host(card.inner_product(*[card.from_host(u)] * 2)) for u in vectors]
    wrong: list[int] = []

    def work(k: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            u = card.from_host(vectors[k])
            sums = [card.inner_product(u, u) for _ in range(200)]
            stream.synchronize()
            wrong.extend(k for x in sums if card.to_host(x) != wanted[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_conjugate_gradients_end_where_array_operations_end(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bsrgemm._backend.cupy_backend import VectorCall

    A, _, b = problem("plate", 3000, dtype)
    M, rtol = linalg.block_jacobi(A), 1e-4 if dtype in ("float32", "complex64") else 1e-10
    made: list[int] = []
    found = []
    for supported in (True, False):
        monkeypatch.setattr(VectorCall, "supported", lambda call, supported=supported: supported)
        steps: list[int] = []
        x, info = linalg.cg(A, b, M=M, rtol=rtol, callback=lambda x, steps=steps: steps.append(1))
        assert info == 0
        made.append(len(steps))
        found.append(by_name("cuda").to_host(x))
    assert abs(made[0] - made[1]) <= 1 + made[1] // 100
    np.testing.assert_allclose(*found, atol=1e3 * rtol * float(abs(found[1]).max()))


def test_an_iteration_makes_four_launches_beside_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from bsrgemm._backend import cupy_backend
    from bsrgemm.linalg import krylov, steps

    A, _, b = problem("plate", 3000)
    launch, made = cupy_backend.launch_vector_step, list[str]()

    def refuse(*_: Any) -> None:
        raise AssertionError("an operation of arrays")

    def counted(call: Any) -> None:
        made.append(call.operation)
        launch(call)

    def iterate(step: Any) -> None:
        with monkeypatch.context() as patches:
            for name in ("safe_ratio", "add_multiple", "subtract_multiple", "multiply_and_add"):
                patches.setattr(cupy_backend.CupyBackend, name, refuse)
            patches.setattr(cupy_backend, "launch_vector_step", counted)
            call(step)

    call = steps.Conjugate.__call__
    monkeypatch.setattr(krylov, "capturable", lambda *_: False)
    monkeypatch.setattr(steps.Conjugate, "__call__", iterate)
    _, info = linalg.cg(A, b, rtol=1e-6)
    assert info == 0
    one = ["kInnerProduct", "kDirection", "kInnerProduct", "kAdvance"]
    assert made == one * (len(made) // 4) and len(made) > 40
