"""Products that are started again without checks: they start the same, or fail in the same way, as with all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._array.leaves import leaf
from bsrgemm._backend.base import Blocks
from bsrgemm._backend.index_arrays import watched_class
from bsrgemm._kernels import forced_kernel, graphs, jit, movable, workspace
from bsrgemm._products import matrix_cache, measured
from bsrgemm._products.engine import ENGINES
from bsrgemm.dtypes import BFLOAT16

from ..emulator.emulator import Array, put
from .test_launch import (  # noqa: F401
    F16,
    F32,
    LEAF,
    Card,
    CardProducts,
    Matrix,
    answer,
    dense,
    matrix,
    plain,
    started,
    unchecked,
)

#: Memory for operands and for all results, from which the same address comes each time, as from a pool.
ROOM, ROOM_2, RESULTS = (dense(1024) for _ in range(3))


def lying(shape: tuple[int, ...] = (128, 64), dtype: Any = F16, skip: int = 0, pitch: int = 0, room: Any = ROOM) -> Any:
    """An array from byte `skip` on, whose rows are `pitch` elements longer than its columns."""
    whole = (*shape[:-1], shape[-1] + pitch)
    size = int(np.prod(whole)) * np.dtype(dtype).itemsize
    flat = room.reshape(-1).view(np.uint8)[skip : skip + size].view(dtype)
    return flat.reshape(whole)[..., : shape[-1]]


def allocated(shape: Any, dtype: Any) -> Any:
    """Memory for a result; work lists have one dimension, and memory of their own."""
    return lying(shape, dtype, room=RESULTS) if isinstance(shape, tuple) else np.empty(shape, dtype)


class Module:
    """NumPy, with memory for results from one place."""

    empty = staticmethod(allocated)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.fixture(autouse=True)
def allocating() -> Iterator[None]:
    with patch.object(Card, "xp", Module()):
        yield


def usual(A: Any) -> Any:
    return A @ lying()


#: Calls without `out` beside the usual one, each with one difference.
CALLS: dict[str, Callable[[Any], Any]] = {
    "address": lambda A: A @ lying(skip=4096),
    "address that is not aligned": lambda A: A @ lying(skip=8),
    "columns": lambda A: A @ lying((128, 128)),
    "batch": lambda A: A @ lying((2, 128, 64)),
    "a vector": lambda A: A @ lying((128,)),
    "a scalar": lambda A: A @ lying((1,))[0],
    "four dimensions": lambda A: A @ lying((1, 1, 128, 64)),
    "rows": lambda A: A @ lying((64, 64)),
    "pitch": lambda A: A @ lying(pitch=64),
    "order": lambda A: A @ lying((64, 128)).T,
    "dtype": lambda A: A @ lying(dtype=BFLOAT16),
    "integers": lambda A: A @ lying(dtype=np.int16),
    "an array of the host": lambda A: A @ np.ones((128, 64), F16),
    "other side": lambda A: lying((64, 128)) @ A,
    "transpose": lambda A: A.T @ lying(),
    "into out": lambda A: bg.matmul(A, lying(), out=lying(room=ROOM_2)),
    "into out elsewhere": lambda A: bg.matmul(A, lying(), out=lying(room=ROOM_2, skip=4096)),
    "into the operand": lambda A: bg.matmul(A, lying(), out=lying()),
    "beta without out": lambda A: bg.matmul(A, lying(), beta=1),
    "alpha": lambda A: bg.matmul(A, lying(), alpha=2),
    "complex alpha": lambda A: bg.matmul(A, lying(), alpha=2j),
    "out_dtype": lambda A: bg.matmul(A, lying(), out_dtype=np.float32),
    "precision": lambda A: bg.matmul(A, lying(), precision="tf32"),
    "scale": lambda A: bg.matmul(A, lying(), scale_a=2),
}


def forgetful(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The call with nothing remembered before."""

    def run(A: Any) -> Any:
        if A._matrix_cache is not None:
            A._matrix_cache.repeats.clear()
            A._matrix_cache.launches.clear()
        return call(A)

    return run


@pytest.mark.parametrize("change", CALLS)
def test_a_call_is_known_by_its_operands_and_options(change: str, started: Any) -> None:  # noqa: F811
    A, other = matrix(), CALLS[change]
    for _ in range(3):
        usual(A)
    calls = (usual, other, other, other, usual)
    found = [answer(started, A, call) for call in calls]
    assert all(found) and found[0] == found[-1]
    assert found == [answer(started, A, forgetful(call)) for call in calls]


KINDS: dict[str, tuple[int, Any, Callable[[int], Any]]] = {
    "gemm_sm90": (64, F16, lambda skip: lying(skip=skip)),
    "batch": (64, F16, lambda skip: lying((2, 128, 64), skip=skip)),
    "columns": (64, F16, lambda skip: lying((64, 128), skip=skip).T),
    "spmv": (3, F32, lambda skip: lying((6,), F32, skip=skip)),
    "simt": (3, F32, lambda skip: lying((6, 40), F32, skip=skip)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["A @ x", "A.T @ x", "x @ A"])
def test_operands_at_new_addresses_are_started_at_once_as_if_checked(
    kind: str,
    side: str,
    started: Any,  # noqa: F811
    unchecked: Callable[[], None],  # noqa: F811
) -> None:
    block, dtype, at = KINDS[kind]
    A = matrix(block, dtype)
    call = {
        "A @ x": lambda A, x: A @ x,
        "A.T @ x": lambda A, x: A.T @ x,
        "x @ A": lambda A, x: x @ A if x.ndim == 1 else x.swapaxes(-2, -1) @ A,
    }[side]
    places = (0, 4096, 64, 8192, 4096)
    want = []
    for skip in places:
        forgetful(lambda A, skip=skip: call(A, at(skip)))(A)
        want.append(started[-1])
    for _ in range(2):
        result = call(A, at(0))
    unchecked()
    started.clear()
    for skip in places:
        again = call(A, at(skip))
        assert (again.shape, again.strides, again.dtype) == (result.shape, result.strides, result.dtype)
        assert again.data.ptr == result.data.ptr
    assert started == want and len(set(map(str, want))) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_operands_at_new_addresses_have_the_factors_and_counters_of_their_call(
    kind: str,
    started: Any,  # noqa: F811
    unchecked: Callable[[], None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal integers are not written again; what floats have overwritten is."""
    block, dtype, at = KINDS[kind]
    A, want = matrix(block, dtype), []
    counters = [put(np.zeros(1024, np.int32)) for _ in range(2)]
    calls = [(1, 0), (2, 0), (2, 0), (2.5, 0), (2, 0), (1, 0), (1, 1), (1.0, 0), (1, 0)]

    def call(number: int, alpha: Any, stream: int) -> Any:
        monkeypatch.setattr(workspace, "scratch", lambda size, count: (None, 0, counters[stream].data.ptr))
        return bg.matmul(A, at(64 * number), alpha=alpha)

    for number, (alpha, stream) in enumerate(calls):
        forgetful(lambda A, x=(number, alpha, stream): call(*x))(A)
        want.append(started[-1])
    for _ in range(2):
        call(20, 1, 0)
    unchecked()
    for _ in range(3):  # new addresses, those that come again, and those that have a launch of their own
        started.clear()
        for number, (alpha, stream) in enumerate(calls):
            call(number, alpha, stream)
        assert started == want


def test_an_out_at_a_new_address_is_checked_for_overlaps_alone(started: Any, unchecked: Any) -> None:  # noqa: F811
    A, x = matrix(), lying()
    for _ in range(2):
        bg.matmul(A, x, out=lying(room=ROOM_2))
    forgetful(lambda A: bg.matmul(A, x, out=lying(room=ROOM_2, skip=4096)))(A)
    want = started[-1]
    for _ in range(2):
        bg.matmul(A, x, out=lying(room=ROOM_2))
    with pytest.raises(ValueError, match="out: overlaps B"):
        bg.matmul(A, x, out=lying(skip=4096))
    unchecked()
    out = lying(room=ROOM_2, skip=4096)
    assert bg.matmul(A, x, out=out) is out and started[-1] == want


def test_a_plan_that_is_dropped_is_made_anew_for_every_address(started: Any, monkeypatch: Any) -> None:  # noqa: F811
    A = matrix()
    for skip in (0, 0, 0, 4096):
        _ = A @ lying(skip=skip)
    A._matrix_cache.plans.clear()  # as `tune` does
    monkeypatch.setattr(measured, "choice", plain)
    for skip in (0, 4096, 8192):
        _ = A @ lying(skip=skip)
    names = [name.split(":")[1].split()[0] for name, *_ in started]
    assert names == [*["gemm_sm90"] * 4, *["gemm_simt"] * 3]


def test_a_launch_of_operands_that_are_not_aligned_serves_no_others(started: Any) -> None:  # noqa: F811
    """Tensor maps and copies of 16 bytes want operands at multiples of 16 bytes."""
    A = matrix()
    skips = (8, 8, 8, 0, 24, 4096, 8)
    for skip in skips:
        _ = A @ lying(skip=skip)
    want = list(started)
    started.clear()
    for skip in skips:
        forgetful(lambda A, skip=skip: A @ lying(skip=skip))(A)
    assert started == want and ["gemm_sm90" in name for name, *_ in started] == [not skip % 16 for skip in skips]


def test_another_kernel_that_is_forced_counts_at_once(started: Any) -> None:  # noqa: F811
    A = matrix()
    for _ in range(3):
        usual(A)
    with forced_kernel.force_kernel("GemmSimt"), patch.object(measured, "choice", plain):
        usual(A)
    usual(A)
    assert ["gemm_simt" in name for name, *_ in started] == [False] * 3 + [True, False]


def test_few_kinds_and_few_addresses_are_remembered(started: Any, monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setattr(movable, "MOST_PLACES", 3)
    monkeypatch.setattr(matrix_cache, "MOST_REPEATS", 2)
    A = matrix()
    for columns in (64, 128, 192, 64):
        for skip in range(0, 16 * 8, 16):
            for _ in range(3):
                _ = A @ lying((128, columns), skip=skip)
        cache = A._matrix_cache
        assert 0 < len(cache.repeats) <= 2
        launches = [repeat.launches for repeat in cache.repeats.values()]
        assert all(0 < len(x.kept) <= 3 and len(x._came_once) <= 3 and len(x._spare) <= 1 for x in launches)


def test_a_subclass_of_the_array_goes_the_usual_way(started: Any) -> None:  # noqa: F811
    class Other(Array):
        pass

    A, asked = matrix(), []
    for _ in range(3):
        usual(A)
    long_way = CardProducts.multiply_dense
    with patch.object(CardProducts, "multiply_dense", lambda *args: asked.append(args) or long_way(*args)):
        usual(A)
        assert not asked
        _ = A @ lying().view(Other)
        assert len(asked) == 1


# ----------------------------------------------------------------------------------------------- sampled products
class Watching(Card):
    """A backend whose index arrays count writes, as those on the GPU do."""

    name = "watching card"
    index_class = watched_class(Array, lambda x: x.ctypes.data)


WATCHING = Watching()
ENGINES.register(WATCHING.name, CardProducts(WATCHING))
WATCHED = leaf(WATCHING, True)


def pattern(canonical: bool | None = True) -> Any:
    A = Matrix()
    return object.__new__(WATCHED)._set(Blocks(A.data, A.indices, A.indptr), A._shape, canonical=canonical)


def sample(P: Any) -> Any:
    return bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2), P)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of results come from the same address each time."""
    from bsrgemm._products import block_products

    monkeypatch.setattr(block_products.cupy, "empty", lambda *args: allocated(*args))


SAMPLED: dict[str, Callable[[Any], Any]] = {
    "address of X": lambda P: bg.sddmm(lying((128, 64), skip=4096), lying((64, 128), room=ROOM_2), P),
    "address of Y": lambda P: bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2, skip=4096), P),
    "pitch of X": lambda P: bg.sddmm(lying((128, 64), pitch=64), lying((64, 128), room=ROOM_2), P),
    "order of Y": lambda P: bg.sddmm(lying((128, 64)), lying((128, 64), room=ROOM_2).T, P),
    "depth": lambda P: bg.sddmm(lying((128, 128)), lying((128, 128), room=ROOM_2), P),
    "other depths": lambda P: bg.sddmm(lying((128, 128)), lying((64, 128), room=ROOM_2), P),
    "dtypes": lambda P: bg.sddmm(lying((128, 64), BFLOAT16), lying((64, 128), BFLOAT16, room=ROOM_2), P),
    "alpha that is no number": lambda P: bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2), P, alpha="2"),
    "beta": lambda P: bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2), P, beta=1),
    "precision": lambda P: bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2), P, precision="tf32"),
    "no precision": lambda P: bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2), P, precision=["tf32"]),
    "three dimensions": lambda P: bg.sddmm(lying((1, 128, 64)), lying((64, 128), room=ROOM_2), P),
    "an array of the host": lambda P: bg.sddmm(np.ones((128, 64), F16), lying((64, 128), room=ROOM_2), P),
    "out": lambda P: bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2), P, out=P),
    "out that is dense": lambda P: bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2), P, out=lying((128, 128))),
    "out of integers": lambda P: bg.sddmm(
        lying((128, 64)), lying((64, 128), room=ROOM_2), P, out=P._with_data(put(np.ones((4, 64, 64), np.int16)))
    ),
    "out of another structure": lambda P: bg.sddmm(
        lying((128, 64)), lying((64, 128), room=ROOM_2), P, out=P._new(Blocks(P.data, P.indices[::-1], P.indptr))
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", SAMPLED)
def test_a_sampled_product_is_known_by_its_operands_and_options(change: str, started: Any, blocks: None) -> None:  # noqa: F811
    P, other = pattern(), SAMPLED[change]
    for _ in range(2):
        sample(P)
    calls = (sample, other, other, sample)
    found = [answer(started, P, call) for call in calls]
    assert all(found) and found[0] == found[-1]
    assert found == [answer(started, P, forgetful(call)) for call in calls]


@pytest.mark.parametrize(("make", "call"), [(matrix, usual), (pattern, sample)], ids=["matmul", "sddmm"])
def test_another_device_has_kernels_of_its_own(make: Any, call: Any, started: Any, blocks: None) -> None:  # noqa: F811
    A, loaded, load, runtime = make(), [], jit.load, matrix_cache.cupy.cuda.runtime
    with patch.object(jit, "load", lambda *args: loaded.append(runtime.getDevice()) or load(*args)):
        for device in ("emulated", "another", "emulated"):
            with patch.object(runtime, "getDevice", lambda device=device: device):
                for _ in range(2):
                    call(A)
    assert set(loaded) == {"emulated", "another"} and len(started) == 6


def test_a_sampled_product_made_before_is_started_at_once(started: Any, blocks: None, monkeypatch: Any) -> None:  # noqa: F811
    P, want = pattern(), []
    places = (0, 4096, 16, 4096)

    def call(skip: int) -> Any:
        return bg.sddmm(lying((128, 64), skip=skip), lying((64, 128), room=ROOM_2, skip=2 * skip), P)

    for skip in places:
        forgetful(lambda P, skip=skip: call(skip))(P)
        want.append(started[-1])
    first = call(0)
    started.clear()
    for name in ("sampled", "sampled_launch"):
        monkeypatch.setattr(CardProducts, name, None)
    for skip in places:
        found = call(skip)
        assert type(found) is type(P) and found.shape == P.shape and found.dtype == F16
        assert found._known_canonical and found._has_sorted_indices == first._has_sorted_indices
        np.testing.assert_array_equal(found._blocks.indices, P._blocks.indices)
    assert started == want


def test_results_for_a_pattern_share_index_arrays_until_one_is_written_to(started: Any) -> None:  # noqa: F811
    P = pattern()
    first, second = sample(P), sample(P)
    assert first.indices is second.indices and first.indptr is second.indptr
    assert first.indices is not P.indices and not np.shares_memory(first.indices, P.indices)
    before = P.indices.get()
    second.indices[0] = 1
    third = sample(P)
    assert third.indices is not first.indices and not third._blocks.indices[0] and not second._known_canonical
    np.testing.assert_array_equal(third._blocks.indices, before)
    np.testing.assert_array_equal(P._blocks.indices, before)
    assert third.has_canonical_format and sample(P).indices is third.indices
    third.indptr[1] = 1
    assert sample(P).indptr is not third.indptr and P._blocks.indptr[1] == 2


def test_copies_that_a_graph_makes_are_not_shared(started: Any, monkeypatch: Any) -> None:  # noqa: F811
    P = pattern()
    monkeypatch.setattr(graphs, "is_capturing", lambda: True)
    captured = [sample(P) for _ in range(2)]
    assert captured[0].indices is not captured[1].indices
    monkeypatch.setattr(graphs, "is_capturing", lambda: False)
    shared = sample(P)
    assert all(shared.indices is not x.indices for x in captured)
    monkeypatch.setattr(graphs, "is_capturing", lambda: True)
    assert sample(P).indices is shared.indices


def test_a_pattern_that_is_written_to_is_checked_again(started: Any) -> None:  # noqa: F811
    P = pattern()
    for _ in range(2):
        sample(P)
    cache = P._matrix_cache
    P.indices[:2] = [1, 1]
    with patch.object(WATCHED, "_has_duplicates", PropertyMock(return_value=False)) as asked:
        found = sample(P)
        assert asked.call_count and P._matrix_cache is not cache
        np.testing.assert_array_equal(found._blocks.indices, P._blocks.indices)
        asked.reset_mock()
        sample(P)
        assert not asked.call_count


def test_an_earlier_result_is_an_out_that_need_not_be_compared(started: Any, monkeypatch: Any) -> None:  # noqa: F811
    P = pattern()
    out = sample(P)
    compared: list[Any] = []
    equal = Array.__eq__
    monkeypatch.setattr(Array, "__eq__", lambda x, y: compared.append(x) or equal(x, y), raising=False)
    for _ in range(2):
        assert bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2), P, out=out) is out
    assert not compared
    out.indices[0] = 1
    with pytest.raises(ValueError, match="out: wanted the blocks of the pattern, got other indices"):
        bg.sddmm(lying((128, 64)), lying((64, 128), room=ROOM_2), P, out=out)
    assert compared


def test_operands_that_are_copied_stay_alive_until_the_kernel_starts(started: Any, monkeypatch: Any) -> None:  # noqa: F811
    """Their copies are made for each call; the memory of the result must not be taken from them."""
    from bsrgemm._products import block_products

    made: list[Any] = []
    copied = block_products.cupy.ascontiguousarray
    monkeypatch.setattr(block_products.cupy, "ascontiguousarray", lambda x: made.append(copied(x)) or made[-1])
    alive: list[int] = []
    start = block_products.BlockLaunch.start
    monkeypatch.setattr(
        block_products.BlockLaunch, "start", lambda self, x: (alive.append(len(self.copies)), start(self, x))[1]
    )
    P, X, Y = pattern(), lying((64, 128)).T, lying((64, 128), room=ROOM_2)
    for _ in range(3):
        bg.sddmm(X, Y, P)
    assert len(made) == 3 and alive == [1, 1, 1] and not P._matrix_cache.repeats
