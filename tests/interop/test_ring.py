"""Attention over several ranks: the same as on one, forward and backward; nothing is sent that nobody sees."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm.interop import mpi
from bsrgemm.interop.mpi import ring, ring_plan

from .. import fake_cupy
from .ranks import outcomes_of, run

pytestmark = pytest.mark.fake

ROOT = Path(__file__).resolve().parents[2]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SIZES = (1, 2, 3, 4)


def numbers(shape: tuple[int, ...], seed: int, dtype: Any = np.float64) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def operands(S_q: int, S_k: int, heads: tuple[int, int] = (4, 2), dtype: Any = np.float64) -> list[Any]:
    """q, k, v, dout and dlse of the whole sequence."""
    shapes = ((2, heads[0], S_q, 8), (2, heads[1], S_k, 8), (2, heads[1], S_k, 6), (2, heads[0], S_q, 6))
    dlse = numbers((2, heads[0], S_q), 5, np.float64 if dtype == np.float64 else np.float32)
    return [*(numbers(shape, i, dtype) for i, shape in enumerate(shapes)), dlse]


def on_ranks(size: int, whole: list[Any], multiple: int = 1, place: Any = None, **options: Any) -> list[Any]:
    """out, lse, dq, dk and dv of the ring, joined from all ranks."""
    q, k, v, dout, dlse = whole
    axis = 1 if options.get("layout") == "bshd" else 2

    def program(comm: Any) -> list[Any]:
        def part(x: Any, axis: int = axis) -> Any:
            found = mpi.zigzag_split(x, comm.rank, comm.size, axis=axis, multiple=multiple)
            return found if place is None else place.from_host(found)

        rules: dict[str, Any] = {"comm": comm, "multiple": multiple, **options}
        some = [part(x) for x in (q, k, v)]
        out, lse = mpi.ring_attention(*some, return_lse=True, **rules)
        gradients = mpi.ring_attention_backward(part(dout), *some, out, lse, dlse=part(dlse, 2), **rules)
        found = [out, lse, *gradients]
        return found if place is None else [x.get() for x in found]

    found = run(size, program)
    axes = (axis, 2, axis, axis, axis)
    return [
        mpi.zigzag_join(parts, axis=a, multiple=multiple)
        for parts, a in zip(zip(*found, strict=True), axes, strict=True)
    ]


def alone(whole: list[Any], **options: Any) -> list[Any]:
    """The same on one rank, by `attention`."""
    q, k, v, dout, dlse = whole
    out, lse = bg.attention(q, k, v, return_lse=True, **options)
    return [out, lse, *bg.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)]


def check(
    size: int, whole: list[Any], multiple: int = 1, atol: float = 1e-12, place: Any = None, **options: Any
) -> None:
    want = alone(whole, **options)
    if place is not None and options.get("mask") is not None:
        options["mask"] = options["mask"].to_device(place.name)
    got = on_ranks(size, whole, multiple, place, **options)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=0, atol=atol, err_msg=name)


# ----------------------------------------------------------------------------------------------- sequences
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("length", "multiple"), [(48, 1), (48, 2), (47, 1), (100, 16), (5, 1), (0, 1), (17, 16)])
def test_sequences_are_split_and_joined(size: int, length: int, multiple: int) -> None:
    positions = [mpi.zigzag_positions(length, rank, size, multiple=multiple) for rank in range(size)]
    assert sorted(np.concatenate(positions).tolist()) == list(range(length))
    x = numbers((3, length, 2), 0)
    parts = [mpi.zigzag_split(x, rank, size, multiple=multiple) for rank in range(size)]
    for own, part in zip(positions, parts, strict=True):
        np.testing.assert_array_equal(part, x[:, own])
        starts = own[np.append(True, np.diff(own) != 1)] if len(own) else own
        assert len(starts) <= 2 and not (starts % multiple).any()
    np.testing.assert_array_equal(mpi.zigzag_join(parts, multiple=multiple), x)


def test_causal_work_is_the_same_on_all_ranks() -> None:
    for size in (2, 3, 8):
        work = [(mpi.zigzag_positions(64 * size, rank, size) + 1).sum() for rank in range(size)]
        assert len(set(work)) == 1


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_other_axes_and_devices(layout: str) -> None:
    place = fake_cupy.backend()
    axis = 2 if layout == "bhsd" else 1
    x = numbers((2, 12, 12, 3), 0)
    parts = [mpi.zigzag_split(place.from_host(x), rank, 3, axis=axis) for rank in range(3)]
    np.testing.assert_array_equal(parts[1].get(), x.take([2, 3, 8, 9], axis=axis))
    np.testing.assert_array_equal(mpi.zigzag_join(parts, axis=axis).get(), x)


# ----------------------------------------------------------------------------------------------- equal to one rank
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (5, 3)},
        {"window": (13, 0)},
        {"window": (0, 0)},
        {"window": (40, -1)},
        {"window": (-1, 9)},
        {"window": (30, 100), "causal": True},
        {"causal": True, "softcap": 1.5, "scale": 0.7},
    ],
    ids=str,
)
def test_bands(size: int, options: dict[str, Any]) -> None:
    check(size, operands(48, 48), **options)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lengths", [(48, 96), (96, 48), (31, 47), (7, 5), (1, 3), (0, 8), (8, 0)], ids=str)
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_lengths_that_differ_or_do_not_divide(size: int, lengths: tuple[int, int], align: str) -> None:
    for options in ({}, {"causal": True}, {"window": (6, 4)}):
        check(size, operands(*lengths), align=align, **options)


@pytest.mark.parametrize("heads", [(1, 1), (6, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_groups_of_heads_and_layouts(heads: tuple[int, int], layout: str) -> None:
    whole = operands(40, 40, heads)
    if layout == "bshd":
        whole = [*(x.swapaxes(1, 2) for x in whole[:4]), whole[4]]
    check(3, whole, layout=layout, causal=True)


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32"], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_dtypes(dtype: Any, size: int) -> None:
    whole = operands(48, 48, dtype=np.dtype(dtype))
    exact = alone([x.astype(np.float64) for x in whole], causal=True)
    got = on_ranks(size, whole, causal=True)
    unit = float(ml_dtypes.finfo(dtype).eps)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, exact, strict=True):
        assert x.dtype == (np.float32 if name == "lse" else dtype)
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=4 * unit * max(1, abs(y).max()), err_msg=name)


def test_results_of_steps_are_rounded_once() -> None:
    whole = operands(48, 48, dtype=np.float16)
    out = on_ranks(4, whole)[0]
    wide = on_ranks(4, [x.astype(np.float32) for x in whole])[0]
    np.testing.assert_array_equal(out, wide.astype(np.float16))


MASKS: dict[str, Callable[[], BlockMask]] = {
    "full": lambda: BlockMask.full(200, block=16, device="cpu"),
    "causal": lambda: BlockMask.causal(200, block=16, device="cpu"),
    "window": lambda: BlockMask.window(200, left=30, right=5, block=16, device="cpu"),
    "documents": lambda: BlockMask.documents([0, 30, 31, 120, 200], block=16, device="cpu"),
    "sinks": lambda: (
        BlockMask.sinks(200, count=3, block=16, device="cpu")
        | BlockMask.window(200, left=20, right=0, block=16, device="cpu")
    ),
    "random": lambda: BlockMask.random(200, per_row=2, block=16, device="cpu"),
    "per head": lambda: BlockMask.random(200, per_row=2, heads=(1, 4), block=16, device="cpu"),
    "per batch and head of keys": lambda: BlockMask.random(200, per_row=1, heads=(2, 2), block=16, device="cpu"),
    "elements": lambda: BlockMask.from_dense(np.random.default_rng(0).random((200, 200)) < 0.05, block=16),
    "nothing": lambda: BlockMask.from_dense(np.zeros((200, 200), bool), block=16),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MASKS)
def test_masks(size: int, name: str) -> None:
    whole = operands(200, 200)
    for options in ({}, {"causal": True}, {"window": (25, 40)}):
        check(size, whole, multiple=16, mask=MASKS[name](), **options)


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_masks_with_oblong_blocks_and_other_lengths(align: str) -> None:
    mask = BlockMask.from_dense(np.random.default_rng(0).random((150, 200)) < 0.05, block=(16, 32))
    for options in ({}, {"causal": True}):
        check(3, operands(150, 200), multiple=32, mask=mask, align=align, **options)


@pytest.mark.parametrize("name", ["causal", "per head", None])
def test_the_code_runs_on_a_device(name: str | None) -> None:
    options: dict[str, Any] = {"mask": MASKS[name]()} if name else {"window": (40, 0)}
    some = operands(200, 200, dtype=np.float16)
    check(3, some, multiple=16, atol=3e-2, place=fake_cupy.backend(), **options)


def test_a_query_that_sees_nothing_and_numbers_that_are_not_finite() -> None:
    q, k, v, dout, dlse = operands(64, 64)
    allowed = np.random.default_rng(0).random((64, 64)) < 0.3
    allowed[[3, 50]] = False
    mask = BlockMask.from_dense(allowed, block=16)
    v[0, 0, 20], k[1, 1, 40] = np.nan, np.inf
    want = alone([q, k, v, dout, dlse], mask=mask)
    got = on_ranks(2, [q, k, v, dout, dlse], 16, mask=mask)
    assert not got[0][:, :, [3, 50]].any() and (got[1][:, :, [3, 50]] == -np.inf).all()
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=name)
        np.testing.assert_allclose(x, y, atol=1e-12, err_msg=name)


def test_the_same_call_returns_the_same_bits() -> None:
    whole = operands(96, 96, dtype=np.float32)
    first, again = on_ranks(4, whole, causal=True), on_ranks(4, whole, causal=True)
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)


# ----------------------------------------------------------------------------------------------- what is sent
def sent(size: int, length: int, backward: bool = False, **options: Any) -> list[int]:
    """Positions whose keys and values each rank sends; with `backward`, also those whose gradients it sends."""
    whole = operands(length, length)
    multiple = options.pop("multiple", 1)

    def program(comm: Any) -> int:
        q, k, v, dout, _ = (mpi.zigzag_split(x, comm.rank, size, axis=2, multiple=multiple) for x in whole)
        out, lse = mpi.ring_attention(q, k, v, comm=comm, return_lse=True, multiple=multiple, **options)
        if backward:
            comm.sent = 0
            mpi.ring_attention_backward(dout, q, k, v, out, lse, comm=comm, multiple=multiple, **options)
        row = k[:, :, :1].nbytes + v[:, :, :1].nbytes
        assert comm.sent % row == 0
        return comm.sent // row

    return run(size, program)


def seen_positions(size: int, allowed: Any, multiple: int = 1) -> int:
    """Positions of keys that must come from another rank, each rank's chunks apart: the least that can be sent."""
    length = len(allowed)
    count = 0
    for rank, owner in itertools.permutations(range(size), 2):
        queries = mpi.zigzag_positions(length, rank, size, multiple=multiple)
        for a, b in ring_plan.ranges(length, owner, size, multiple):
            keys = np.flatnonzero(allowed[queries, a:b].any(axis=0))
            count += int(keys[-1] + 1 - keys[0]) if len(keys) else 0
    return count


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (5, 0)}, {"window": (3, 2)}, {"window": (0, 0)}], ids=str
)
def test_only_keys_that_are_seen_are_sent(size: int, options: dict[str, Any]) -> None:
    length = 24 * size
    distance = np.arange(length) - np.arange(length)[:, None]
    left, right = options.get("window", (length, length))
    allowed = (distance >= -left) & (distance <= (0 if options.get("causal") else right))
    assert sum(sent(size, length, **options)) == seen_positions(size, allowed)
    # Going back, the same keys travel, and gradients of them in the other direction.
    assert sum(sent(size, length, backward=True, **options)) == 2 * seen_positions(size, allowed)


def test_a_window_sends_as_much_as_it_sees_and_documents_of_one_rank_nothing() -> None:
    assert sum(sent(4, 4 * 64, window=(10, 0))) == 6 * 10  # chunks 4 and 5 are neighbours on the same rank
    cuts = [0, 64, 128, 192, 256]  # four chunks: rank 0 has the first and the last, rank 1 those between
    assert sent(2, 256, mask=BlockMask.documents(cuts, block=16, device="cpu"), multiple=16) == [0, 0]
    joined = BlockMask.documents([0, 64, 192, 256], block=16, device="cpu")
    assert sent(2, 256, mask=joined, multiple=16) == [0, 0]
    across = BlockMask.documents([0, 80, 256], block=16, device="cpu")
    assert sent(2, 256, mask=across, multiple=16) == [64 + 64, 16 + 64 + 48]


def test_steps_that_see_nothing_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    real = bg.attention

    def counted(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append((q.shape[2], k.shape[2]))
        return real(q, k, v, **options)

    monkeypatch.setattr(ring, "attention", counted)
    on_ranks(4, operands(64, 64), window=(0, 0))
    assert sorted(calls) == [(8, 8)] * 8  # two chunks of each rank, with themselves
    calls.clear()
    on_ranks(4, operands(64, 64), causal=True)
    # One call for the rank's own keys, one for each other rank: both chunks see the first chunk of a lower rank, and
    # the second chunk sees both of a higher one.
    assert sorted(calls) == sorted([(16, 16)] * 4 + [(16, 8)] * 6 + [(8, 16)] * 6)
    calls.clear()
    on_ranks(2, operands(64, 64))
    assert calls == [(32, 32)] * 4
    calls.clear()
    documents = BlockMask.documents(range(0, 129, 16), block=16, device="cpu")
    on_ranks(4, operands(128, 128), 16, mask=documents)
    assert calls == [(32, 32)] * 4  # each chunk is a document


@pytest.mark.parametrize("backward", [False, True])
def test_the_next_keys_travel_while_a_step_is_computed(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()

    def noted(function: Callable[..., Any], event: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            own.events.append(event)
            return function(*args, **options)

        return call

    monkeypatch.setattr(ring, "attention", noted(bg.attention, "compute"))
    monkeypatch.setattr(ring, "attention_backward", noted(bg.attention_backward, "compute"))

    def program(comm: Any) -> str:
        exchange = comm.exchange

        def start(sends: Any, receives: Any) -> Any:
            own.events.append("start")
            messages = exchange(sends, receives)
            messages.wait = noted(messages.wait, "wait")
            return messages

        comm.exchange = start
        q, k, v, dout, _ = (mpi.zigzag_split(x, comm.rank, 3, axis=2) for x in operands(48, 48))
        own.events = []
        out, lse = mpi.ring_attention(q, k, v, comm=comm, return_lse=True)
        if backward:
            own.events = []
            mpi.ring_attention_backward(dout, q, k, v, out, lse, comm=comm)
        return " ".join(own.events)

    want = "start compute wait start compute wait compute"
    if backward:  # gradients travel back while the next step is computed, which the last ones cannot
        want = "start compute wait start compute start wait compute wait start wait"
    assert run(3, program) == [want] * 3


# ----------------------------------------------------------------------------------------------- plans
def test_plans_with_a_mask_are_kept_on_it_and_not_copied() -> None:
    mask = MASKS["random"]()
    whole = ring_plan.Ring(200, 200, 2, 16, 1 << 30, 1 << 30, 0)
    plan = ring_plan.plan_of(whole, 0, mask)
    assert ring_plan.plan_of(whole, 0, mask) is plan
    assert ring_plan.plan_of(whole._replace(right=0), 0, mask) is not plan
    assert ring_plan.plan_of(whole, 0, mask) is plan  # both are kept
    assert "_plans" not in pickle.loads(pickle.dumps(mask)).__dict__
    for right in range(40):
        ring_plan.plan_of(whole._replace(right=right), 1, mask)
    assert len(mask.__dict__["_plans"]) <= ring_plan._MOST_PLANS


def test_neighbouring_keys_are_sent_without_a_copy() -> None:
    whole = ring_plan.Ring(64, 64, 2, 1, 1 << 30, 1 << 30, 0)
    needs = ring_plan.plan_of(whole, 0, None).needs
    assert ring_plan.parts_of(needs, 1, whole) == [slice(0, 32)]
    needs[1] = 0, 10
    assert ring_plan.parts_of(needs, 1, whole) == [slice(0, 10), slice(16, 32)]
    ring_plan._band_plan.cache_clear()


# ----------------------------------------------------------------------------------------------- bad input
def refused(error: type[Exception], said: str, change: Callable[[int, dict[str, Any]], None], **options: Any) -> None:
    """All ranks refuse what `change` does to the arguments of one of them."""
    whole = operands(64, 64)

    def program(comm: Any) -> None:
        part = [mpi.zigzag_split(x, comm.rank, 2) for x in whole[:3]]
        given = {"q": part[0], "k": part[1], "v": part[2], "comm": comm, **options}
        change(comm.rank, given)
        mpi.ring_attention(**given)

    for outcome in outcomes_of(2, program):
        assert type(outcome) is error and said in str(outcome), repr(outcome)


def on_rank_1(name: str, make: Callable[[Any], Any]) -> Callable[[int, dict[str, Any]], None]:
    def change(rank: int, given: dict[str, Any]) -> None:
        if rank == 1:
            given[name] = make(given.get(name))

    return change


def test_ranks_that_differ_are_refused_by_all() -> None:
    same = "wanted the same on all ranks, got float64"
    refused(ValueError, "window (1073741824, 0)", on_rank_1("causal", lambda _: True))
    refused(ValueError, same, on_rank_1("scale", lambda _: 2.0))
    refused(ValueError, same, on_rank_1("multiple", lambda _: 2))
    refused(TypeError, "k: wanted float64 as q has, got float32 [on rank 1]", on_rank_1("k", lambda x: x.astype("f4")))
    refused(ValueError, "k: wanted head dim 8 as q has, got 7 [on rank 1]", on_rank_1("k", lambda x: x[..., :7]))
    refused(ValueError, "layout: wanted 'bhsd' or 'bshd', got 'x' [on rank 1]", on_rank_1("layout", lambda _: "x"))
    shorter = "q: wanted length 31 on rank 0, two chunks of 62 positions on 2 ranks with multiple=1, got 32"
    refused(ValueError, shorter, on_rank_1("q", lambda x: x[:, :, :30]))
    mask = BlockMask.causal(64, block=16, device="cpu")
    refused(ValueError, "mask ((64, 64), (16, 16), (1, 1))", on_rank_1("mask", lambda _: mask))


def test_masks_that_do_not_fit_are_refused() -> None:
    def nothing(rank: int, given: dict[str, Any]) -> None:
        pass

    wrong = BlockMask.causal(32, block=16, device="cpu")
    refused(ValueError, "mask: wanted shape (64, 64), queries and keys, got (32, 32)", nothing, mask=wrong)
    refused(TypeError, "mask: wanted a BlockMask, got int", nothing, mask=3)
    coarse = BlockMask.causal(64, block=32, device="cpu")
    refused(ValueError, "multiple: wanted a multiple of the block of the mask, (32, 32)", nothing, mask=coarse)
    refused(ValueError, "multiple: wanted an integer from 1 on, got 0", nothing, multiple=0)
    heads = BlockMask.random(64, per_row=1, heads=(1, 3), block=16, device="cpu")
    refused(ValueError, "mask: wanted 1 or 2 or 4 patterns along the heads, got 3", nothing, mask=heads)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: mpi.zigzag_positions(-1, 0, 1), ValueError, "length: wanted an integer from 0 on, got -1"),
        (lambda: mpi.zigzag_positions(4, 2, 2), ValueError, "rank: wanted 0 to 1, got 2"),
        (lambda: mpi.zigzag_positions(4, 0, True), ValueError, "size: wanted an integer from 1 on, got True"),
        (lambda: mpi.zigzag_split([1, 2], 0, 1), TypeError, "x: wanted a NumPy or CuPy array, got a list"),
        (lambda: mpi.zigzag_split(np.ones(3), 0, 1), ValueError, "axis: wanted an integer from -1 to 0, got -2"),
        (lambda: mpi.zigzag_join([]), ValueError, "parts: wanted those of at least one rank, got none"),
        (
            lambda: mpi.zigzag_join([np.ones((4, 1)), np.ones((2, 1))]),
            ValueError,
            r"parts\[0\]: wanted float64 of shape",
        ),
        (lambda: mpi.ring_attention(*[np.ones((1, 1, 2, 4))] * 3, comm=3), TypeError, "comm: wanted None, a communic"),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("dout", np.ones((1, 1, 2, 5)), ValueError, "dout: wanted float64 of shape"),
        ("out", np.ones((1, 1, 2, 4), np.float32), TypeError, "out: wanted float64 of shape .* got float32"),
        ("lse", None, TypeError, "lse: wanted a dense array"),
        ("dlse", np.ones((1, 2)), ValueError, "dlse: wanted float64 of shape"),
        ("deterministic", 3, TypeError, "deterministic: wanted True or False"),
    ],
)
def test_refusals_going_back(name: str, value: Any, error: type[Exception], said: str) -> None:
    x, lse = np.ones((1, 1, 2, 4)), np.ones((1, 1, 2))
    given = {"dout": x, "q": x, "k": x, "v": x, "out": x, "lse": lse, "comm": None, name: value}
    with pytest.raises(error, match=said):
        mpi.ring_attention_backward(**given)


# ----------------------------------------------------------------------------------------------- MPI
PROGRAM = """
import numpy as np
from mpi4py import MPI
import bsrgemm as bg
from bsrgemm.interop import mpi

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
whole = [np.random.default_rng(i).standard_normal((1, 2, 4096, 16)).astype("float32") for i in range(4)]
q, k, v, dout = (mpi.zigzag_split(x, rank, size, multiple=64) for x in whole)
documents = bg.BlockMask.documents([0, 1000, 3000, 4096], block=64, device="cpu")
for options in ({"causal": True}, {"window": (700, 0)}, {"mask": documents, "causal": True}):
    out, lse = mpi.ring_attention(q, k, v, comm=comm, multiple=64, return_lse=True, **options)
    got = out, *mpi.ring_attention_backward(dout, q, k, v, out, lse, comm=comm, multiple=64, **options)
    want, lse = bg.attention(*whole[:3], return_lse=True, **options)
    want = want, *bg.attention_backward(whole[3], *whole[:3], want, lse, **options)
    for x, y in zip(got, want):
        y = mpi.zigzag_split(y, rank, size, multiple=64)
        assert abs(x - y).max() < 2e-5 * max(1, abs(y).max()), options
print(f"rank {rank} of {size} is right", flush=True)
"""


@pytest.mark.long
def test_two_ranks_of_mpi() -> None:
    pytest.importorskip("mpi4py")
    command = Path(sys.executable).with_name("mpiexec")
    if not command.exists():
        pytest.skip("mpiexec is not installed")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [command, "-n", "2", sys.executable, "-c", PROGRAM],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of 2 is right") == 2
