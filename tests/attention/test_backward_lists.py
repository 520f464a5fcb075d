"""What the kernels for the gradients of attention are given: lists by keys, and which kernel serves what."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

pytest.importorskip("cupy")

from bsrgemm._attention import backward_sm90, mask_tiles
from bsrgemm._attention.backward import BACKWARD, choose, problem_of
from bsrgemm._attention.backward_kernel import NOTHING_CUT, BackwardProblem, Lists
from bsrgemm._attention.backward_sm80 import AttentionDelta, BackwardFused, BackwardSimt, BackwardSm80
from bsrgemm._attention.backward_sm90 import (
    BackwardBegin,
    BackwardEnd,
    BackwardKeysSm90,
    BackwardQueriesSm90,
    BackwardSm90,
)
from bsrgemm._attention.forward import CAPPED, SIGNED
from bsrgemm._backend.registry import host
from bsrgemm._kernels.card import Card, shared_kb
from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES

F16, F32, F64 = (np.dtype(x) for x in ("float16", "float32", "float64"))


def entries(found: mask_tiles.Tiles, patterns: int, tiles: int) -> list[list[tuple[int, int]]]:
    """(column, part) of each tile of each pattern."""
    first = found.first
    assert len(first) == patterns * tiles + 1
    return [
        [
            (int(found.columns[e]), -1 if found.parts is None else int(found.parts[e]))
            for e in range(first[i], first[i + 1])
        ]
        for i in range(patterns * tiles)
    ]


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("tiles", [(64, 128), (64, 64), (32, 64)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (2, 3)], ids=str)
def test_lists_by_keys_have_the_same_entries_as_those_by_queries(block: int, tiles: Any, heads: Any) -> None:
    mask = bg.BlockMask.random(500, 700, per_row=3, block=block, heads=heads, seed=block)
    rows, cols, patterns = -(-500 // tiles[0]), -(-700 // tiles[1]), heads[0] * heads[1]
    by_queries = entries(mask_tiles.tiles(host(), mask, *tiles), patterns, rows)
    found = mask_tiles.by_keys(host(), mask, *tiles)
    by_keys = entries(found, patterns, cols)
    turned: list[list[tuple[int, int]]] = [[] for _ in range(patterns * cols)]
    for i, row in enumerate(by_queries):
        for column, part in row:
            turned[i // rows * cols + column].append((i % rows, part))
    assert by_keys == turned
    for pattern in range(patterns):
        lengths = [len(by_keys[pattern * cols + tile]) for tile in found.order[pattern]]
        assert lengths == sorted(lengths, reverse=True) and sorted(found.order[pattern]) == list(range(cols))


def test_a_mask_without_blocks_has_no_entries_by_keys() -> None:
    mask = bg.BlockMask.from_dense(np.zeros((100, 90), bool), block=32)
    found = mask_tiles.by_keys(host(), mask, 64, 128)
    assert not found.first.any()


@pytest.mark.parametrize("backwards", [False, True])
def test_tiles_of_keys_of_sequences(backwards: bool) -> None:
    k_bounds, q_bounds = np.array([0, 300, 300, 310, 700]), np.array([0, 20, 40, 40, 90])
    sequence, tile = mask_tiles.sequences_by_keys(np, k_bounds, q_bounds, 700, 128, backwards)
    there = [(int(s), int(t)) for s, t in zip(sequence, tile, strict=True) if s >= 0]
    counts = [-(-n // 128) for n in np.diff(k_bounds)]
    assert sorted(there) == [(s, t) for s, n in enumerate(counts) for t in range(n)]
    queries = [int(np.diff(q_bounds)[s]) for s, _ in there]
    assert queries == sorted(queries, reverse=True)
    for s, n in enumerate(counts):
        assert [t for of, t in there if of == s] == list(range(n))[:: -1 if backwards else 1]


EVERY = {x for kernel in BACKWARD for x in kernel.every(DEVICE_DTYPES)}


def problem(**changes: Any) -> BackwardProblem:
    usual = {"arch": "sm_90a", "dtype": F16, "dout_dtype": F16, "acc": F32, "head_dim": 128, "value_dim": 128}
    return BackwardProblem(**{**usual, "scores": SIGNED, **changes})


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({}, "BackwardSm90 BackwardEnd"),
        ({"head_dim": 40, "value_dim": 64, "dtype": BFLOAT16, "dout_dtype": BFLOAT16}, "BackwardSm90 BackwardEnd"),
        ({"scores": CAPPED}, "BackwardSm90 BackwardEnd"),
        ({"scores": CAPPED, "head_dim": 64, "value_dim": 33, "ordered": False}, "BackwardSm90 BackwardEnd"),
        ({"scores": CAPPED, "narrow": True}, "BackwardSm90 BackwardEnd"),
        ({"scores": CAPPED, "steep": True}, "BackwardSm80 BackwardSm80"),
        ({"scores": CAPPED, "arch": "sm_80"}, "BackwardSm80 BackwardSm80"),
        ({"scores": CAPPED, "arch": "sm_80", "head_dim": 129}, "BackwardSm80 BackwardSm80 BackwardSm80"),
        ({"heads": 65535}, "BackwardSm90 BackwardEnd"),
        ({"heads": 65536}, "BackwardSm80 BackwardSm80"),  # more than a grid has rows
        ({"arch": "sm_80"}, "BackwardSm80 BackwardSm80"),
        ({"ordered": False}, "BackwardSm90 BackwardEnd"),
        ({"arch": "sm_80", "ordered": False, "head_dim": 97}, "BackwardFused BackwardEnd"),
        ({"arch": "sm_80", "ordered": False, "value_dim": 96}, "BackwardSm80 BackwardSm80"),
        ({"arch": "sm_80", "ordered": False, "scores": CAPPED}, "BackwardSm80 BackwardSm80"),
        ({"arch": "sm_80", "ordered": False, "heads": 65536}, "BackwardSm80 BackwardSm80"),
        ({"arch": "sm_89", "ordered": False}, "BackwardSm80 BackwardSm80"),  # not enough shared memory
        ({"arch": "sm_120", "head_dim": 256, "value_dim": 256}, "BackwardSm80 BackwardSm80 BackwardSm80"),
        ({"arch": "sm_75"}, "BackwardSimt BackwardSimt"),
        ({"dout_dtype": F32}, "BackwardSimt BackwardSimt"),
        ({"head_dim": 257}, "BackwardSimt BackwardSimt"),
        ({"dtype": F32, "dout_dtype": F32}, "BackwardSimt BackwardSimt"),
        ({"dtype": F64, "dout_dtype": F64, "acc": F64}, "BackwardSimt BackwardSimt"),
    ],
    ids=str,
)
def test_which_kernels_serve_what(changes: dict[str, Any], kernels: str) -> None:
    parts = choose(problem(**changes)).parts()
    assert [type(part).__name__ for part in parts] == kernels.split()
    assert all(part in EVERY for part in parts if "BackwardSimt" not in kernels)


@pytest.mark.parametrize(("dims", "width"), [((129, 129), 192), ((192, 40), 192), ((64, 200), 256)], ids=str)
def test_wide_heads_have_a_launch_for_keys_and_one_for_queries(dims: tuple[int, int], width: int) -> None:
    for ordered, narrow in itertools.product((True, False), (True, False)):
        wide = problem(head_dim=dims[0], value_dim=dims[1], ordered=ordered, narrow=narrow)
        assert choose(wide).parts() == (
            BackwardKeysSm90("f16", width, 64),
            BackwardQueriesSm90("f16", width, 64),
        )


def test_a_kernel_that_cannot_serve_a_problem_says_so() -> None:
    with pytest.raises(ValueError, match="BackwardSm90 cannot compute these gradients"):
        choose(problem(arch="sm_80"), "BackwardSm90")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"])
def test_shared_memory_fits_the_card(arch: str) -> None:
    there = [kernel for kernel in EVERY if kernel.runs_on(arch) and hasattr(kernel, "shared_bytes")]
    assert there
    for kernel in there:
        assert kernel.shared_bytes <= shared_kb(arch) << 10, kernel


def test_plain_cores_have_rows_of_multiples_of_32() -> None:
    for config in choose(problem(arch="sm_75", head_dim=257, value_dim=5)).parts():
        assert (config.head_dim, config.value_dim) == (288, 32)


@pytest.mark.parametrize(("rows", "ctas"), [(0, 1), (1, 1), (32, 1), (33, 2), (10**6, 64)])
def test_statistics_have_a_grid_that_fills_the_card_once(rows: int, ctas: int) -> None:
    assert AttentionDelta.grid(rows, multiprocessors=4) == (ctas,)


def test_where_kernels_run() -> None:
    large, small = (BackwardSm80("f16", 64, 64, SIGNED, 0, large_shared) for large_shared in (True, False))
    archs = ("sm_75", "sm_80", "sm_86", "sm_90a")
    assert [large.runs_on(arch) for arch in archs] == [False, True, False, True]
    assert [small.runs_on(arch) for arch in archs] == [False, False, True, False]
    hopper = BackwardSm90("f16", 64, 128, True), BackwardBegin("f16", 64, 128, "f16", True), BackwardEnd("f16", 64, 128)
    for config in hopper:
        assert [config.runs_on(arch) for arch in archs] == [False, False, False, True]
    fused = BackwardFused("f16", 128, 128), BackwardEnd("f16", 128, 128, lines=True)
    for config in (*fused, BackwardBegin("f16", 128, 128, "f16", False)):
        assert [config.runs_on(arch) for arch in archs] == [False, True, False, True]
    for config in (BackwardSimt("f16", "f16", "f32", 64, 64, SIGNED, 0), AttentionDelta("f16", "f16", "f32")):
        assert all(config.runs_on(arch) for arch in archs)


def test_what_is_compiled_ahead_of_time() -> None:
    usual = (
        BackwardSm90("f16", 128, 128, True),
        BackwardSm90("f16", 128, 64, True),
        BackwardBegin("f16", 128, 128, "f16", True),
        BackwardEnd("f16", 128, 128),
        BackwardSm80("bf16", 64, 64, SIGNED, 0, True),
        BackwardSimt("f32", "f32", "f32", 64, 64, SIGNED, 0),
        AttentionDelta("f32", "f32", "f32"),
    )
    rare = (
        BackwardBegin("f16", 128, 128, "f32", True),
        BackwardSm80("bf16", 64, 128, SIGNED, 0, True),
        BackwardSm80("bf16", 64, 64, CAPPED, 0, True),
        BackwardSimt("f16", "f32", "f32", 64, 64, SIGNED, 0),
        AttentionDelta("f16", "f32", "f32"),
    )
    assert not any(kernel.rare for kernel in usual) and all(kernel.rare for kernel in rare)


@pytest.mark.parametrize("tiles", [5, 2**31 - 1, 2**31, 2**32])
def test_a_grid_has_no_more_ctas_than_a_card_can_start(tiles: int) -> None:
    """A CTA for each tile, but for kernels whose CTAs stay and take several."""
    card = Card("sm_90a", 2)
    lists: Any = SimpleNamespace(tiles=tiles, heads=1, cut=0, shares=1)
    each = min(tiles, 2**31 - 1)
    sm80, simt = BackwardSm80("f16", 64, 64, SIGNED, 0, True), BackwardSimt("f16", "f16", "f32", 64, 64, SIGNED, 0)
    keys = BackwardKeysSm90("f16", 256, 64)
    assert sm80.grid(lists, card) == keys.last().grid(lists, card) == (each,)
    assert simt.grid(lists, card) == (min(tiles, 2 * BackwardSimt.ctas),) and keys.grid(lists, card) == (2,)


@pytest.mark.parametrize(
    ("deterministic", "masked", "band", "ordered"),
    [
        (True, False, (100, 100), True),
        (True, True, (100, 100), True),
        (True, False, (0, 0), True),
        (False, False, (0, 0), True),
        (False, False, (40, 9), True),
        (False, False, (9, 40), True),
        (False, False, (40, 10), False),
        (False, False, (100, 0), False),
        (False, True, (0, 0), False),
        (False, True, (100, 100), False),
    ],
)
def test_sums_are_ordered_where_it_is_asked_for_and_in_narrow_windows(
    deterministic: bool, masked: bool, band: tuple[int, int], ordered: bool
) -> None:
    """Narrow are windows of less than half of the keys."""
    x = np.zeros((1, 1, 100, 64), F16)
    mask = bg.BlockMask.random(100, 100, per_row=1, block=64, seed=0) if masked else None
    call = SimpleNamespace(
        q=x, k=x, v=x, dout=x, acc=F32, scale=0.125, softcap=None, mask=mask, left=band[0], right=band[1],
        deterministic=deterministic,
    )  # fmt: skip
    kernel = choose(problem_of(call, Card("sm_90a", 132)))
    assert isinstance(kernel, BackwardSm90) and kernel.ordered is ordered


# ------------------------------------------------------------------------------------------ tiles that are cut
@pytest.mark.parametrize("ctas", [1, 2, 108, 132, 264])
@pytest.mark.parametrize("longest", [1.0, 1.2, 2.0])
@pytest.mark.parametrize("of", [0, 1, 4, 7])
def test_cut_tiles_are_few_and_shares_have_turns(ctas: int, longest: float, of: int) -> None:
    for tiles, turns in itertools.product(
        (1, 3, 64, 96, 131, 132, 133, 200, 263, 264, 2048, 5000), (0.5, 3.0, 40.0, 500.0)
    ):
        whole, shares = backward_sm90.cut(tiles, ctas, turns, longest, of)
        if shares == 1:
            assert (whole, shares) == NOTHING_CUT
            continue
        assert 0 <= whole < tiles and (longest > 1 or whole % ctas == 0)
        assert (tiles - whole) * shares <= 4 * ctas and shares <= 8 and turns / shares >= 4
        assert not of or of % shares == 0


@pytest.mark.parametrize(
    ("changes", "options", "ordered", "wanted"),
    [
        ({}, {}, True, (1980, 7)),  # 16 heads of 128 tiles, as many turns each
        ({}, {"right": 0}, False, None),  # causal: many tiles, the longest first
        ({"heads": 32, "kv_heads": 8, "length": 8192}, {"right": 0}, True, (380, 4)),  # the longest last
        ({"heads": 8, "kv_heads": 2, "length": 4096}, {"right": 0}, True, (0, 4)),
        ({"heads": 8, "kv_heads": 2, "length": 4096}, {"right": 0}, False, (0, 4)),
        ({"heads": 32, "kv_heads": 8, "length": 4096}, {"right": 0}, True, (124, 4)),
        ({"heads": 32, "kv_heads": 8, "length": 4096}, {"right": 0}, False, None),
        ({"heads": 2, "kv_heads": 2, "length": 4096}, {"right": 0}, True, None),  # a share would wait for others
        ({"heads": 8, "kv_heads": 1}, {"left": 1024, "right": 0}, True, None),  # a window: as many turns, nearly
    ],
    ids=str,
)
def test_which_tiles_are_cut(
    changes: dict[str, int], options: dict[str, int], ordered: bool, wanted: tuple[int, int] | None
) -> None:
    card = Card("sm_90a", 132)
    sizes = {"heads": 16, "kv_heads": 16, "length": 16384} | changes
    shape = [(1, sizes[name], sizes["length"], 128) for name in ("heads", "kv_heads")]
    q, k = (SimpleNamespace(shape=x, itemsize=2) for x in shape)
    band = {"left": 16384, "right": 16384} | options
    call: Any = SimpleNamespace(q=q, k=k, v=k, mask=None, bounds=None, **band)
    lists = Lists(call, BackwardSm90("f16", 128, 128, ordered), card)
    assert (lists.whole, lists.shares) == (wanted or NOTHING_CUT)
    assert lists.cut == (lists.tiles * lists.heads - lists.whole if wanted else 0)
    other = Lists(call, BackwardFused("f16", 128, 128), card)
    assert (other.whole, other.shares) == NOTHING_CUT
