"""Any sequence of calls gives what NumPy gives: a state machine over the public surface, on the CPU and on a card.

Everything that a call keeps for the next one (work lists, launches by address, repeated calls, canonical flags) is
under suspicion here. ``BSRGEMM_LONG=1 python -m pytest -n 0 tests/soak --hypothesis-seed=3`` goes on for long.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import bsrgemm as bg
from bsrgemm._attention.mask_ops import Combinations

from ..conftest import LONG
from ..strategies import Place, assert_values, each_place, eps, quietly, random_values, widened
from .calls import CALLS, DTYPES, SIDES, Cache, Operands, Pair, combined, exact, near, sample, times

#: The largest element that a matrix keeps: sums of products of larger ones may not be exact any more.
_MOST = 8
_THREADS = 4


def compared(place: Place, name: str, got: Any, want: Any, off: float) -> None:
    """AssertionError unless a result is what it has to be: within so many roundings, or, below 0, within ``-off``."""
    if isinstance(want, tuple | list | str | bool | type) or want is None:
        if isinstance(want, tuple) and want and isinstance(want[0], np.ndarray):
            for x, y in zip(got, want, strict=True):
                compared(place, name, x, y, off)
            return
        assert got == want, f"{name}: got {got}, wanted {want}"
        return
    if isinstance(got, bg.bsr_array | bg.bsr_matrix):
        got = place.blocks(got).dense.astype(got.dtype)
    elif place.backend.is_sparse(got):
        got = (got if place.is_host else got.get()).toarray()
    got = np.asarray(place.backend.to_host(got) if place.backend.is_dense(got) else got)
    want = np.asarray(want).reshape(got.shape) if np.size(want) == got.size else np.asarray(want)
    if off >= 0:
        want = widened(want.astype(got.dtype))
    bound = -off if off < 0 else off * eps(got.dtype) * (1 + np.abs(np.where(np.isfinite(want), want, 0)))
    try:
        assert_values(got, want, bound)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def checked(place: Place, name: str, results: Any) -> list[tuple[Any, Any]]:
    """Compare what a call returns as it comes: what it returned before may change after."""
    found = []
    with quietly():
        for got, want, *off in results:
            compared(place, name, got, want, off[0] if off else 0.0)
            found.append((got, want))
    return found


class Machine(RuleBasedStateMachine):
    """Matrices of one shape, a KV cache, and all calls on them."""

    place: Place
    matrices = Bundle("matrices")

    @initialize(target=matrices, dtype=st.sampled_from(DTYPES), side=st.sampled_from(SIDES), blocks=st.integers(1, 5))
    def begin(self, dtype: np.dtype[Any], side: int, blocks: int) -> Pair:
        self.dtype, self.side, self.blocks, self.cache = dtype, side, blocks, None
        return self.made(0, False)

    @rule(target=matrices, seed=st.integers(0, 999), messy=st.booleans())
    def made(self, seed: int, messy: bool) -> Pair:
        """Another matrix; memory that was freed is taken again."""
        rng, grid = np.random.default_rng(seed), (self.blocks, self.blocks)
        return Pair(self.place, sample(rng, self.dtype, (self.side, self.side), grid, messy))

    def operands(self, A: Pair, B: Pair, seed: int) -> Operands:
        return Operands(self.place, np.random.default_rng(seed), A, B)

    @rule(target=matrices, A=matrices, B=matrices, name=st.sampled_from(sorted(CALLS)), seed=st.integers(0, 999))
    def called(self, A: Pair, B: Pair, name: str, seed: int) -> Any:
        """One of the calls; a result of the same kind is a matrix for the next ones."""
        o = self.operands(A, B, seed)
        if not CALLS[name].able(o):
            return A
        for got, want in checked(self.place, name, CALLS[name].run(o)):
            if isinstance(got, bg.bsr_array) and (got.shape, got.blocksize, got.dtype) == A.form:
                found = A if got is A.ours else Pair.__new__(Pair)
                found.ours, found.form = got if got is A.ours else got.copy(), A.form  # a view sees what is written
                if not np.abs(want).max(initial=0) <= _MOST or (2 * want != np.round(2 * want)).any():
                    found.ours.data[...] = self.place.put(random_values(o.rng, got.data.shape, self.dtype))
                found.read(self.place)
                return found
        return A

    @rule(A=matrices, seed=st.integers(0, 999), how=st.sampled_from(["values", "array", "indices"]))
    def written(self, A: Pair, seed: int, how: str) -> None:
        """New values in the same array, a new array, or other columns in the index array."""
        data = random_values(np.random.default_rng(seed), A.ours.data.shape, self.dtype)
        if how == "values":
            A.ours.data[...] = self.place.put(data)
        elif how == "array":
            A.ours.data = self.place.put(data)
        elif A.ours.has_canonical_format:
            counts, rng = np.diff(self.place.backend.to_host(A.ours.indptr)), np.random.default_rng(seed)
            columns = [np.sort(rng.permutation(self.blocks)[:count]) for count in counts]
            A.ours.indices[...] = self.place.put(np.concatenate(columns).astype(A.ours.indices.dtype))
        A.read(self.place)

    # ---------------------------------------------------------------------------------------------- decode
    @rule(A=matrices, seed=st.integers(0, 999), step=st.sampled_from(["append", "append", "reset"]))
    def decoded(self, A: Pair, seed: int, step: str) -> None:
        """A cache that grows and loses sequences, and is read after each step."""
        o = self.operands(A, A, seed)
        if not CALLS["decode"].able(o):
            return
        self.cache = self.cache or Cache(o)
        getattr(self.cache, step)(o)
        checked(self.place, f"decode after {step}", self.cache.read(o))

    # ----------------------------------------------------------------------------------- threads and graphs
    @rule(A=matrices, seed=st.integers(0, 999))
    def threads(self, A: Pair, seed: int) -> None:
        """Threads, each on a stream of its own, take products of matrices that all share."""
        errors: list[BaseException] = []
        start, streams = threading.Barrier(_THREADS), [contextlib.nullcontext()] * _THREADS
        if not self.place.is_host:
            import cupy

            streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(_THREADS)]
            cupy.cuda.Device().synchronize()

        def run(number: int) -> None:
            try:
                start.wait(60)
                with streams[number]:
                    for name in ("products", "sparse_products", "rectangular_products"):
                        checked(self.place, f"{name} in a thread", CALLS[name].run(self.operands(A, A, seed + number)))
            except BaseException as error:  # reported by the thread that waits
                errors.append(error)

        made = [threading.Thread(target=run, args=(number,)) for number in range(_THREADS)]
        for thread in made:
            thread.start()
        for thread in made:
            thread.join()
        if errors:
            raise errors[0]

    @precondition(lambda self: self.place.name == "cuda" and not self.place.is_fake)
    @rule(A=matrices, seed=st.integers(0, 999))
    def replayed(self, A: Pair, seed: int) -> None:
        """A graph of a product and an attention is captured once and replayed after all values have changed."""
        import cupy

        o, dtype = self.operands(A, A, seed), np.dtype(np.float16)
        out, seen = o.A @ o.X, o.put(np.zeros((1, 2, 64, 64), dtype))
        q, k, v = (o.put(o.normal(1, 2, 64, 64, dtype=dtype)) for _ in range(3))
        found, allowed = combined(o, 64, 64)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            for step in range(2):  # the first makes what all calls share
                if step:
                    stream.begin_capture()
                bg.matmul(o.A, o.X, out=out)
                bg.attention(q, k, v, mask=found, out=seen)
            graph = stream.end_capture()
            for _ in range(2):
                o.A.data[...] = o.put(o.values(*o.A.data.shape))
                q[...] = o.put(o.normal(*q.shape, dtype=dtype))
                graph.launch(stream)
                stream.synchronize()
                A.read(self.place)
                compared(self.place, "the product of a graph", out, times(A.dense, o.x), 0)
                want = exact(q.get(), k.get(), v.get(), allowed).out
                compared(self.place, "the attention of a graph", *near(seen, want, dtype))


@each_place
def test_any_sequence_of_calls_gives_what_numpy_gives(place: Place) -> None:
    class Here(Machine):
        pass

    Here.place = place
    few = {"max_examples": 4} if place.is_fake and not LONG else {}  # whose kernels are emulated
    size: dict[str, Any] = (
        {"max_examples": 2000, "stateful_step_count": 50} if LONG else {"max_examples": 25, "stateful_step_count": 15}
    )
    run_state_machine_as_test(Here, settings=settings(**(size | few)))


@each_place
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_gives_what_numpy_gives(name: str, place: Place) -> None:
    """Each call with a few dtypes and blocks, so that each is made in every run."""
    for number, dtype in enumerate(DTYPES):
        rng, side = np.random.default_rng(number), SIDES[number % 5]
        A, B = (Pair(place, sample(rng, dtype, (side, side), (4, 4), messy)) for messy in (number % 2 > 0, False))
        if CALLS[name].able(o := Operands(place, rng, A, B)):
            checked(place, f"{name} {dtype} {side}", CALLS[name].run(o))


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (Combinations, "__or__", Combinations.__and__),
        (bg.bsr_array, "transpose", lambda self, *_, **__: self),
        (bg.bsr_array, "select_blocks", lambda self, *_: self),
        (bg.KVCache, "reset", lambda self, *_: None),
    ],
)
def test_a_call_that_does_something_else_is_found(where: Any, name: str, broken: Any, monkeypatch: Any) -> None:
    """A union that is a cut, a transpose that turns nothing, a selection of all, a cache that keeps its tokens."""
    monkeypatch.setattr(where, name, broken)
    asked = {"__or__": "masks", "transpose": "A.transpose()", "reset": "decode"}.get(
        name, "A.select_blocks([0, -1], slice(None, None, 2))"
    )
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(60):
            rng, dtype = np.random.default_rng(seed), np.dtype(np.float16)
            A = Pair(Place("cpu"), sample(rng, dtype, (2, 2), (4, 4), True))
            checked(Place("cpu"), asked, CALLS[asked].run(Operands(Place("cpu"), rng, A, A)))


# ---------------------------------------------------------------------------------------------- the surface
_PACKAGE = str(Path(bg.__file__).parent)
#: Names that no call has, and why.
EXPLAINED = {
    "tune": "measures kernels on a card, and computes nothing",
    "info": "describes the machine",
    "bsr_array.spy": "draws a picture",
    "BlockMask.plot": "draws a picture",
    "bsr_array.__iter__": "is always refused",
    "BlockMask.__rand__": "is always refused",
    "BlockMask.__ror__": "is always refused",
}
#: Methods by which Python itself makes and destroys objects and classes.
_OF_PYTHON = ("__init_subclass__", "__subclasshook__", "__new__", "__init__", "__getstate__", "__setstate__")


def public() -> dict[Any, str]:
    """The code of every public function, method and property, with its name."""
    found: dict[Any, str] = {}
    named = [(name, getattr(bg, name)) for name in bg.__all__ if inspect.isfunction(getattr(bg, name))]
    for cls in (bg.bsr_matrix, bg.bsr_array, bg.BlockMask, bg.KVCache, bg.ProductPlan):
        named += [(f"{cls.__name__}.{name}", inspect.getattr_static(cls, name)) for name in dir(cls)
                  if name not in _OF_PYTHON and (name[0] != "_" or name.endswith("__"))
                  and (cls is not bg.bsr_matrix or not hasattr(bg.bsr_array, name))]  # fmt: skip
    for name, value in named:
        value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
        if (code := getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)) is not None:
            found[code] = name
    return found


def test_calls_have_the_whole_public_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name counts if code outside of the package calls it."""
    names, called = public(), set[str]()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names:
            back = frame.f_back
            if back.f_code.co_filename.endswith("recording.py"):  # wraps a method, and calls it
                back = back.f_back
            if not back.f_code.co_filename.startswith(_PACKAGE):
                called.add(names[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        for number, dtype in enumerate(map(np.dtype, ("float32", "float64", "int32", *40 * ("bool",)))):
            for name, one in CALLS.items():
                rng = np.random.default_rng(number)
                A = Pair(Place("cpu"), sample(rng, dtype, (2, 2), (4, 4), False))
                if (number < 3 or name == "masks") and one.able(o := Operands(Place("cpu"), rng, A, A)):
                    checked(Place("cpu"), name, one.run(o))
    finally:
        sys.setprofile(before)
    assert set(names.values()) - called == set(EXPLAINED)
