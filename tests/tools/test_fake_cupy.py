"""The fake CuPy behaves as CuPy does where a test depends on it, and notices what CuPy would let pass."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._products import cuda as products_cuda

from ..emulator import emulator
from ..emulator.forked import forked
from ..fake_cupy import Bystanders, Card, CUDARuntimeError, Policy, driver, installed

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="there is neither g++ nor clang++ on the PATH")


@pytest.fixture
def card() -> Card:
    return Card()


@pytest.fixture
def cupy(card: Card) -> Iterator[Any]:
    with installed(card) as found:
        yield found


def product(cupy: Any) -> tuple[Any, Any, Any]:
    """A matrix of one block, a vector and their product."""
    A = bg.bsr_array(cupy.asarray(np.arange(9.0).reshape(3, 3)), blocksize=(3, 3))
    return A, cupy.asarray(np.ones(3)), cupy.zeros(3)


def test_the_library_finds_it_everywhere_and_has_cupy_back_afterwards(card: Card) -> None:
    real = sys.modules["cupy"]
    with installed(card) as cupy:
        assert sys.modules["cupy"] is products_cuda.cupy is cupy is not real
        A, x, _ = product(cupy)
        assert (A.data.device.id, (A @ x).device.id) == (card.number, card.number)
        assert bg.get_array_module(A) is cupy
    assert sys.modules["cupy"] is products_cuda.cupy is real


def test_cards_remember_nothing_of_each_other() -> None:
    for arch, entry in (("sm_90a", "gemm_sm90"), ("sm_80", "gemm_sm80")):
        card = Card(arch)
        with installed(card) as cupy:
            A = bg.bsr_array(cupy.asarray(np.ones((64, 64), np.float16)), blocksize=(64, 64))
            np.testing.assert_array_equal((A @ cupy.asarray(np.ones((64, 64), np.float16))).get(), 64)
            assert card.launches[-1].entry == entry


def test_arrays_refuse_to_become_numpy_by_themselves(cupy: Any) -> None:
    x = cupy.zeros(3)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(x)
    with pytest.raises(TypeError):
        x + np.ones(3)
    assert x.get().tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("before", [False, True])
def test_a_page_beside_each_allocation_ends_the_process(before: bool) -> None:
    with installed(Card(before=before)) as cupy:
        x = cupy.zeros(32, np.uint8)
        assert ctypes.string_at(x.data.ptr, 32) == bytes(32)
        outside = x.data.ptr - 1 if before else x.data.ptr + 32
        status, _ = forked(lambda: ctypes.string_at(outside, 1))
        assert status < 0


def test_new_and_freed_memory_holds_nan_and_goes_to_the_next_who_asks(cupy: Any) -> None:
    x = cupy.empty(100, np.float32)
    assert np.isnan(x.get()).all()
    x[...] = 1
    view, address = x[50:], x.data.ptr
    del x
    assert (view.get() == 1).all()  # a view keeps the memory
    del view
    y = cupy.empty(100, np.float32)
    assert y.data.ptr == address and np.isnan(y.get()).all()


def test_memory_of_a_pool_is_given_to_others_when_the_pool_is_gone(cupy: Any) -> None:
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        address = cupy.zeros(100).data.ptr
    others = [cupy.zeros(100) for _ in range(3)]
    assert address not in [x.data.ptr for x in others]
    del pool
    gc.collect()
    assert cupy.zeros(100).data.ptr == address


def test_a_pool_of_a_closed_card_gives_no_memory() -> None:
    """Somebody who keeps it beyond its test is told so, and does not end the process."""
    with installed(Card()) as cupy:
        pool = cupy.cuda.MemoryPool()
        pool.malloc(64)  # is free again, and is not mapped any more when the card is closed
    with pytest.raises(RuntimeError, match=r"64 bytes are wanted of card \d+, which is closed"):
        pool.malloc(64)


def test_bystanders_notice_who_writes_into_freed_memory(cupy: Any, card: Card) -> None:
    address = cupy.zeros(100).data.ptr
    others = Bystanders(card.heap)
    assert others.intact()
    ctypes.memset(address + 8, 1, 1)
    assert not others.intact()


def test_elements_that_an_index_names_twice_are_garbage(cupy: Any) -> None:
    x = cupy.zeros(4)
    x[cupy.asarray([1, 2, 1])] = cupy.asarray([5.0, 6.0, 7.0])
    np.testing.assert_array_equal(x.get(), [0, np.nan, 6, 0])


# ------------------------------------------------------------------------------- streams and graphs
def captured(cupy: Any, call: Any) -> Any:
    with cupy.cuda.Stream() as stream:
        stream.begin_capture()
        call()
        return stream.end_capture()


def test_a_graph_repeats_kernels_and_the_work_of_arrays(cupy: Any) -> None:
    A, x, out = product(cupy)
    bg.matmul(A, x, out=out)

    def call() -> None:
        nonlocal total
        x[...] = x + 1
        bg.matmul(A, x, out=out)
        total = cupy.sum(out)

    total = None
    out[...] = 0
    graph = captured(cupy, call)
    assert x.get().tolist() == [1, 1, 1] and out.get().tolist() == [0, 0, 0]  # nothing was done
    assert np.isnan(total.get())
    for times in (2, 3):
        graph.launch()
        np.testing.assert_array_equal(out.get(), times * np.arange(9.0).reshape(3, 3).sum(axis=1))
        assert float(total) == times * 36


def test_a_graph_keeps_no_array(cupy: Any) -> None:
    some, y = [cupy.zeros(50)], cupy.zeros(50)
    graph = captured(cupy, lambda: some[0].fill(3))
    address = some.pop().data.ptr
    z = cupy.zeros(50)
    assert z.data.ptr == address  # others have the memory now
    graph.launch()
    assert (z.get() == 3).all() and (y.get() == 0).all()


@pytest.mark.parametrize("wait", ["get", "item", "__float__", "__bool__"])
def test_nobody_waits_in_a_capture(wait: str, cupy: Any) -> None:
    x = cupy.zeros(())
    with cupy.cuda.Stream() as stream:
        stream.begin_capture()
        for call in (getattr(x, wait), stream.synchronize, cupy.cuda.Device().synchronize, partial(cupy.nonzero, x)):
            with pytest.raises(CUDARuntimeError, match="is being captured"):
                call()
        stream.end_capture()
    getattr(x, wait)()


def test_what_the_driver_keeps_for_a_graph_ends_with_it(cupy: Any) -> None:
    ended: list[int] = []
    destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ended.append)
    made = []

    def call() -> None:
        number, graph, status, found = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
        stream = ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)
        ask = driver.cuStreamGetCaptureInfo_v2
        assert ask(stream, ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None) == 0
        made.append((status.value, number.value))
        pointer = ctypes.cast(destroy, ctypes.c_void_p)
        driver.cuUserObjectCreate(ctypes.byref(found), ctypes.c_void_p(77), pointer, 1, 1)
        driver.cuGraphRetainUserObject(graph, found, 1, 1)

    graph = captured(cupy, call)
    assert made[0][0] == 1 and made[0][1] > 0 and not ended
    del graph
    gc.collect()
    assert ended == [77]


# ------------------------------------------------------------------------------- launches
@pytest.mark.parametrize("policy", [Policy.RECORD, Policy.NOTHING])
def test_launches_are_noted_or_not_and_do_not_run(policy: Policy) -> None:
    card = Card(policy=policy)
    with installed(card) as cupy:
        A, x, out = product(cupy)
        bg.matmul(A, x, out=out)
        assert out.get().tolist() == [0, 0, 0]
        noted = [(found.entry, found.threads) for found in card.launches]
        assert noted[-1:] == ([("spmv_small", (1024,))] if policy is Policy.RECORD else [])
        if noted:
            addresses = np.array([a.data.ptr for a in (A.data, x, out)], np.uint64)
            assert all(address.tobytes() in card.launches[-1].arguments[0] for address in addresses)


def test_launches_that_cuda_refuses_are_refused(cupy: Any, card: Card) -> None:
    A, x, out = product(cupy)
    bg.matmul(A, x, out=out)
    kernel = card.load(card.launches[-1].spec, card.arch)
    for grid, threads, shared in (((0,), 32, 0), ((1, 1 << 16), 32, 0), ((1,), 2048, 0), ((1,), 32, 50 << 10)):
        with pytest.raises(CUDARuntimeError, match="cudaErrorInvalidValue"):
            kernel(grid, (threads,), (), shared_mem=shared)
    kernel.max_dynamic_shared_size_bytes = 200 << 10
    with pytest.raises(CUDARuntimeError, match="cudaErrorInvalidValue"):  # this card has less
        kernel((1,), (32,), (), shared_mem=170 << 10)
