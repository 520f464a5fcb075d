"""What an attention on the GPU remembers of its operands, on kernels that only write down what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.heuristics import AttentionShort, AttentionSm80
from bsrgemm._attention.host import ENGINE
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import device, jit
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
