"""What an attention on the GPU remembers of its operands, on kernels that only write down what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import decode_config, decode_launch
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.arguments import DECODE
from bsrgemm._attention.call import DecodeCall
from bsrgemm._attention.heuristics import AttentionShort, AttentionSm80
from bsrgemm._attention.host import ENGINE
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import device, graphs, jit, workspace
from bsrgemm.dtypes import BFLOAT16

from ..emulator import emulator
from ..emulator.emulator import Array, put

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


class Kernel:
    """Starts nothing, and keeps its name, its launch and its argument."""

    def __init__(self, name: str, started: list[Any]) -> None:
        self.name, self.started = name, started

    def __call__(self, grid: Any, threads: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
        self.started.append((self.name, grid, threads, shared_mem, *(x.tobytes() for x in args)))


@pytest.fixture(params=["sm_75", "sm_80", "sm_90a"])
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    found: list[Any] = []
    with (
        emulator.emulated(tmp_path, arch=request.param),
        patch.object(jit, "load", lambda spec, arch: Kernel(str(spec), found)),
    ):
        yield found


COPIES = put(np.zeros(1 << 22, np.uint8))
#: Operands that begin at the same places lie here.
ROOM = {name: put(np.zeros(1 << 20, np.uint8)) for name in ("q", "k", "v", "out", "lse")}


def lying(
    name: str, shape: tuple[int, ...], dtype: Any = F16, gap: int = 0, order: str = "bhsd", skip: int = 0
) -> Array:
    """An array (batch, heads, length, columns) in its memory, `gap` elements between rows, stored in that order."""
    batch, heads, length, columns = shape
    stored = {"b": batch, "h": heads, "s": length, "d": columns + gap}
    sizes = [stored[letter] for letter in order]
    flat = ROOM[name][skip:].view(dtype)[: int(np.prod(sizes))]
    wide = flat.reshape(sizes).transpose([order.index(letter) for letter in "bhsd"])
    return wide[..., :columns]


SHAPE = (2, 4, 128, 64)


def usual(**changes: Any) -> dict[str, Any]:
    operands = {name: lying(name, SHAPE) for name in ("q", "k", "v", "out")}
    return {**operands, "options": {}, **changes}


def ask(call: dict[str, Any]) -> None:
    """The call as `bsrgemm.attention` makes it, for arrays of the emulator."""
    arrays = {name: call[name] for name in ("q", "k", "v", "out")}

    def forward(made: Any) -> None:
        operands = {name: getattr(made, name).view(Array) for name in ("q", "k", "v", "out")}
        attention_launch.forward(HOST, replace(made, **operands))

    at = 0

    def empty(shape: tuple[int, ...], dtype: Any) -> Array:
        """Copies of operands lie at the same places in each call."""
        nonlocal at
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        at += -(-size // 256) * 256
        return COPIES[at - -(-size // 256) * 256 :][:size].view(dtype).reshape(shape)

    with patch.object(ENGINE, "forward", forward), patch.object(attention_launch.cupy, "empty", empty):
        bg.attention(arrays["q"], arrays["k"], arrays["v"], out=arrays["out"], **call["options"])


#: Each beside what is usual.
CHANGES: dict[str, dict[str, Any]] = {
    **{f"rows of {name}": {name: lying(name, SHAPE, gap=64)} for name in ("q", "k", "v", "out")},
    **{f"order of {name}": {name: lying(name, SHAPE, order="bshd")} for name in ("q", "k", "v", "out")},
    **{f"place of {name}": {name: lying(name, SHAPE, skip=256)} for name in ("q", "k", "v", "out")},
    **{f"alignment of {name}": {name: lying(name, SHAPE, skip=2)} for name in ("q", "k", "v", "out")},
    "batches": {name: lying(name, (1, *SHAPE[1:])) for name in ("q", "k", "v", "out")},
    "heads": {name: lying(name, (2, 2, 128, 64)) for name in ("q", "k", "v", "out")},
    "heads that share keys": {name: lying(name, (2, 2, 128, 64)) for name in ("k", "v")},
    "queries": {name: lying(name, (2, 4, 64, 64)) for name in ("q", "out")},
    "keys": {name: lying(name, (2, 4, 64, 64)) for name in ("k", "v")},
    "head dim": {name: lying(name, (2, 4, 128, 32)) for name in ("q", "k")},
    "value dim": {name: lying(name, (2, 4, 128, 32)) for name in ("v", "out")},
    "dtype": {name: lying(name, SHAPE, F32) for name in ("q", "k", "v", "out")},
    "causal": {"options": {"causal": True}},
    "window": {"options": {"window": (5, 3)}},
    "align": {"options": {"window": (5, 3), "align": "top-left"}},
    "softcap": {"options": {"softcap": 2.0}},
    "scale": {"options": {"scale": 0.7}},
}


def fp8(out: Any = F16, **options: Any) -> dict[str, Any]:
    """Numbers of fp8, of which a result may have several dtypes."""
    operands = {name: lying(name, SHAPE, np.uint8) for name in ("q", "k", "v")}
    return {**operands, "out": lying("out", SHAPE, out), "options": {"q_scale": 1.0, "out_dtype": out, **options}}


@pytest.mark.parametrize(
    "other", [fp8(BFLOAT16), fp8(F16, v_scale=2.0), fp8(F16, causal=True)], ids=["dtype", "scale", "causal"]
)
def test_a_launch_of_fp8_is_remembered_for_its_result_and_scales_only(
    other: dict[str, Any], started: list[Any]
) -> None:
    names = []
    for call in (fp8(), other, fp8()):
        started.clear()
        ask(call)
        remembered = [x[:4] for x in started]
        attention_launch._plans.clear()
        started.clear()
        ask(call)
        assert remembered == [x[:4] for x in started]
        ask(fp8())  # what the next call may find
        names.append(remembered[-1][0])
    assert names[0] == names[2]
    assert (names[0] != names[1]) == ("BFLOAT16" in str(other["out"].dtype).upper())


@pytest.mark.parametrize("change", CHANGES)
def test_a_launch_is_remembered_for_its_operands_only(change: str, started: list[Any]) -> None:
    """What a kernel is given is the same whether other launches are remembered or none."""
    calls = [usual(), usual(**CHANGES[change]), usual()]
    remembered, fresh = [], []
    for call in calls:
        started.clear()
        ask(call)
        remembered.append(list(started))
    for call in calls:
        attention_launch._plans.clear()
        started.clear()
        ask(call)
        fresh.append(list(started))
    assert remembered == fresh
    assert remembered[0] == remembered[2] != remembered[1]


# ------------------------------------------------------------ patterns of masks
@pytest.mark.skipif(emulator.COMPILER is None, reason="there is neither g++ nor clang++ on the PATH")
def test_as_many_ctas_as_a_card_can_start_where_each_has_one_tile(started: list[Any]) -> None:
    ask(usual())
    (plan,) = attention_launch._plans.values()
    if isinstance(plan.config, AttentionShort):
        assert started[0][1] == (plan.tiles, 4, 2)  # heads and batches
    else:
        one_each = isinstance(plan.config, AttentionSm80)
        assert started and plan.ctas == (2**31 - 1 if one_each else device.multiprocessors() * plan.config.ctas)


def test_patterns_per_batch_and_kv_head_are_those_of_the_heads_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four query heads on two KV heads in two batches; a mask with a pattern for each KV head of each batch."""
    S, rng = 18, np.random.default_rng(4)
    q = rng.standard_normal((2, 4, S, 4))
    k, v = (rng.standard_normal((2, 2, S, 4)) for _ in range(2))
    mask = bg.BlockMask.random(S, per_row=1, block=16, heads=(2, 2), seed=1)
    assert len({x.tobytes() for x in mask.to_dense().reshape(4, S, S)}) > 2  # so that heads can be told apart
    want = bg.attention(q, k, v, mask=mask)
    out = np.full_like(want, 77)
    with emulator.emulated(emulator.builds()), monkeypatch.context() as patched:
        patched.setattr(ENGINE, "forward", emulator.run_attention)
        bg.attention(q, k, v, mask=mask, out=out)
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------ decode
def cache(batch: int = 3, heads: int = 2, capacity: int = 4096, dim: int = 64) -> Any:
    """What a launch reads of a KVCache, its sequences full."""
    k, v = (put(np.zeros((batch, heads, 16, dim), F16)) for _ in range(2))
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
    return SimpleNamespace(
        _backend=SimpleNamespace(xp=SimpleNamespace(cuda=cuda)),
        kv_heads=heads, capacity=capacity, table=None, dtype=F16, value_dim=dim, head_dim=dim, batch=batch, pages=batch,
        page=None, k=k, v=v, _longest=capacity, _total=batch * capacity, _device_lengths=put(np.zeros(batch, np.int32)),
        _captured=False,
    )  # fmt: skip


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Launches of decode, and how much scratch memory they asked for."""
    found = SimpleNamespace(started=[], counters=[], floats=[])

    def load(spec: Any, arch: str) -> Kernel:
        return Kernel(str(spec), found.started)

    def scratch(size: int, count: int) -> tuple[Any, int, int]:
        found.floats.append(size // 4)
        found.counters.append(count)
        memory = put(np.zeros(size // 4, np.float32)), put(np.zeros(count, np.int32))
        return memory, memory[0].data.ptr, memory[1].data.ptr

    monkeypatch.setattr(decode_launch, "_plans", {})
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    monkeypatch.setattr(decode_launch.cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(jit, "device_target", lambda: "sm_90a")
    monkeypatch.setattr(workspace, "scratch", scratch)
    monkeypatch.setattr(graphs, "current", lambda: None)
    yield found


def decode(one: Any, blocks: Any = None, heads: int = 4, queries: int = 1) -> None:
    q, out = (put(np.zeros((one.batch, heads, queries, one.head_dim), F16)) for _ in range(2))
    decode_launch.decode(DecodeCall(q, one, out, None, 0.125, None, one.capacity, blocks, 16))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("rows", [1, 40], ids="{} query heads each".format)
def test_pieces_have_a_counter_and_room_for_every_tile_of_rows(
    batch: int, heads: int, rows: int, decoding: Any
) -> None:
    one = cache(batch, heads)
    decode(one, heads=rows * heads)
    ((_, (pieces, tiles, sequences), *_),) = decoding.started
    assert pieces > 1 and sequences == batch and tiles % heads == 0
    config = decode_config.decode_config(F16, 64, 64, rows)
    assert tiles // heads == -(-rows // config.rows)
    (count,), (floats,) = decoding.counters, decoding.floats
    assert count >= tiles * batch
    assert floats >= tiles * batch * pieces * config.rows * (64 + 2)  # sums, their largest score and their weight


@pytest.mark.parametrize(("batch", "more"), [(1, False), (24, True)])
def test_lengths_that_only_the_gpu_knows_are_divided_by_the_capacity(batch: int, more: bool, decoding: Any) -> None:
    """A sequence of any length then has as many pieces as the grid, if each has at least 128 keys."""
    full, short, captured = cache(batch), cache(batch), cache(batch)
    for one in (short, captured):
        one._longest = one._total = 1
    captured._captured = True
    for one in (full, short, captured):
        decode(one)
    grids = [grid for _, grid, *_ in decoding.started]
    assert grids[0] == grids[2] and grids[0][0] > 1 and grids[1][0] == 1
    tiles = [int(np.frombuffer(x[-1], np.int32, 1, DECODE.offsets["piece_tiles"])[0]) for x in decoding.started]
    assert tiles[2] == 8 and (tiles[0] > 8 if more else tiles[0] == 8)


def test_a_decode_of_the_same_arrays_is_not_packed_again(decoding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, pack = list[int](), jit.argument
    monkeypatch.setattr(jit, "argument", lambda data: packed.append(len(data)) or pack(data))
    one, kept = cache(capacity=64), dict[Any, Any]()
    arrays = [[put(np.zeros((one.batch, 4, 1, one.head_dim), F16)) for _ in range(2)] for _ in range(2)]
    for numbers, made in (((0, 0), 1), ((0, 0), 0), ((1, 0), 1), ((1, 0), 0), ((1, 1), 1), ((0, 0), 1)):
        q, out = (arrays[n][i] for i, n in enumerate(numbers))
        decode_launch.decode(DecodeCall(q, one, out, None, 0.125, None, one.capacity, None, 0, kept))
        assert len(packed) == made
        packed.clear()
    calls = [argument for *_, argument in decoding.started]
    assert calls[0] == calls[1] == calls[5] and calls[2] == calls[3]
    assert len({calls[0], calls[2], calls[4]}) == 3


@pytest.mark.parametrize(("batch", "heads"), [(24, 2), (2, 24)])
def test_few_heads_of_many_sequences_have_other_pieces_than_many_heads_of_few(
    batch: int, heads: int, decoding: Any
) -> None:
    decode(cache(batch, heads), heads=2 * heads)
    config = decode_config.decode_config(F16, 64, 64, 2)
    tiles, slots = 4096 // 16, 132 * config.ctas("sm_90a")
    pieces = decode_config.pieces_of(tiles, batch * tiles, batch, heads, slots)[0]
    assert decoding.started[0][1] == (pieces, heads, batch)
    assert pieces != decode_config.pieces_of(tiles, batch * tiles, heads, batch, slots)[0]


def test_one_piece_needs_no_scratch_memory(decoding: Any) -> None:
    decode(cache(capacity=64))
    assert decoding.started[0][1][0] == 1 and not decoding.counters and not decoding.floats


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 2])
def test_one_list_of_blocks_stands_still(batch: int, heads: int, decoding: Any) -> None:
    """Lists for each sequence and head are walked by their strides, one for all is read by all."""
    wide = put(np.zeros((batch, heads, 2 * 7), np.int32))[:, :, ::2]
    batch_step, head_step, entry = decode_launch._block_strides(wide)
    assert batch_step == (heads * 14 if batch > 1 else 0)
    assert head_step == (14 if heads > 1 else 0) and entry == 2
    decode(cache(3, 2), blocks=wide)
    (*_, argument) = decoding.started[0]
    first = DECODE.offsets["blocks_batch"]
    assert tuple(np.frombuffer(argument, np.int64, 3, first)) == (batch_step, head_step, entry)
