"""kv_append.cu as it is, launched as it is, on the CPU, beside the engine of the host.

Every array ends where reading or writing ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsrgemm._attention import append_host, append_launch
from bsrgemm._attention.append import AppendCall
from bsrgemm._attention.decode_config import KvAppend
from bsrgemm._kernels import workspace
from bsrgemm.dtypes import BFLOAT16

from . import emulator
from .emulator import Array, guarded

F16 = np.dtype(np.float16)


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder, guarded, arch="sm_75"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(23)


def call_of(
    rng: np.random.Generator, lengths: list[int], n: int, dims: tuple[int, int] = (64, 64), page: int = 0,
    heads: int = 2, dtype: Any = F16, takes: Any = None, capacity: int = 64,
) -> AppendCall:  # fmt: skip
    batch = len(lengths)
    per = -(-capacity // page) if page else 1
    pages = batch * per
    table = guarded(rng.permutation(pages).reshape(batch, per).astype(np.int32)) if page else None
    new = [rng.standard_normal((batch, heads, n, d)).astype(dtype) for d in dims]
    memory = [guarded(np.full((pages, heads, page or capacity, d), 77, dtype)) for d in dims]
    numbers = [guarded(np.array(x, np.int32)) for x in (lengths, [0] * batch)]
    taken = None if takes is None else guarded(np.array(takes, np.int32))
    return AppendCall(*map(guarded, new), *memory, *numbers, capacity, table, takes=taken)  # type: ignore[arg-type]


def check(call: AppendCall) -> None:
    """The kernel leaves what the host's engine leaves, and the counters at zero."""
    names = ("to_k", "to_v", "lengths", "refused", "table")
    want = replace(call, **{name: None if (x := getattr(call, name)) is None else x.copy() for name in names})
    append_host.ENGINE.append(want)
    append_launch.ENGINE.append(call)
    for name in names:
        x = getattr(call, name)
        if x is not None:
            np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(getattr(want, name)).view(np.uint8))
    assert not any(counters.any() for counters in workspace._zeroed.values())


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(("dims", "dtype"), [((64, 64), F16), ((80, 16), BFLOAT16), ((9, 5), F16)], ids=str)
def test_tokens_follow_those_that_are_there(dims: tuple[int, int], dtype: Any, page: int, rng: Any) -> None:
    check(call_of(rng, [0, 17, 40], 21, dims, page, dtype=dtype))
    check(call_of(rng, [0, 17, 40], 1, dims, page, dtype=dtype))


@pytest.mark.parametrize("page", [0, 16])
def test_sequences_without_room_take_nothing(page: int, rng: np.random.Generator) -> None:
    call = call_of(rng, [60, 61, 64, 65, -1, 2**31 - 1], 4, page=page)
    check(call)
    assert np.asarray(call.refused).tolist() == [0, 4, 4, 4, 4, 4]
    assert np.asarray(call.lengths).tolist() == [64, 61, 64, 65, -1, 2**31 - 1]
    check(call_of(rng, [0, 1, 2], 5, page=page, takes=[-3, 2, 9]))


def test_pages_that_a_sequence_does_not_have_are_not_written(rng: np.random.Generator) -> None:
    call = call_of(rng, [14, 14, 14, 16], 3, page=16)
    assert call.table is not None
    call.table[:3, 1] = [-1, 16, 2**31 - 1]
    check(call)
    assert np.asarray(call.refused).tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize("wide", [True, False])
def test_operands_of_any_strides(wide: bool, rng: np.random.Generator) -> None:
    call = call_of(rng, [3, 8], 6)
    both = guarded(rng.standard_normal((2, 6, 2, 136 if wide else 131)).astype(F16))  # layout bshd, side by side
    k, v = (x.swapaxes(1, 2).view(Array) for x in (both[..., :64], both[..., 64:128]))
    assert append_launch._is_wide(k) is wide and append_launch._is_wide(v) is wide
    check(replace(call, k=k, v=v))
    backwards = replace(call, k=call.k[..., ::-1].view(Array), v=call.v[:, :, ::-1].view(Array))
    check(backwards)


@pytest.mark.races
@pytest.mark.parametrize("most", [1, 2])
def test_few_ctas_do_all_of_the_work(most: int, rng: np.random.Generator) -> None:
    with emulator.few_ctas(most):
        check(call_of(rng, [5, 0, 30], 9, page=16, heads=3))


def test_many_rows_are_shared_by_ctas_that_count_themselves(rng: np.random.Generator) -> None:
    assert KvAppend("f16").grid(2 * 21, 3, 132)[0] > 1
    call = call_of(rng, [0, 17, 60], 21)
    check(call)
    assert np.asarray(call.lengths).tolist() == [21, 38, 60]


def test_new_pages_are_in_the_table_before_tokens_are_written(rng: np.random.Generator) -> None:
    call = call_of(rng, [14, 16], 3, page=16)
    assert call.table is not None
    pages = np.array(call.table)
    call.table[:, 1] = -1
    check(replace(call, new_table=guarded(pages)))
    np.testing.assert_array_equal(call.table, pages)
    assert np.asarray(call.lengths).tolist() == [17, 19] and not np.asarray(call.refused).any()


def test_the_table_stays_if_there_is_no_memory_for_counters(rng: np.random.Generator, monkeypatch: Any) -> None:
    def refuse(count: int) -> Array:
        raise MemoryError

    monkeypatch.setattr(workspace, "counters", refuse)
    call = call_of(rng, [0, 0, 0], 21, page=16)
    assert call.table is not None
    before = np.array(call.table)
    with pytest.raises(MemoryError):
        append_launch.ENGINE.append(replace(call, new_table=guarded(before[:, ::-1].copy())))
    np.testing.assert_array_equal(call.table, before)


def test_a_sequence_of_one_cta_needs_no_counters(rng: np.random.Generator, monkeypatch: Any) -> None:
    monkeypatch.setattr(workspace, "counters", None)
    assert KvAppend("f16").grid(2 * 1, 3, 132)[0] == 1
    check(call_of(rng, [0, 17, 40], 1))
