"""A mask by tiles against dense booleans, the tiles of sequences, and the argument and the memory of the kernels."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("cupy")

from bsrgemm import BlockMask
from bsrgemm._attention import arguments, forward, mask_tiles
from bsrgemm._attention.attention_sm80 import AttentionSimt, AttentionSm80
from bsrgemm._attention.attention_sm90 import AttentionSm90
from bsrgemm._attention.choose import FORWARD, choose
from bsrgemm._attention.mask import FULL
from bsrgemm._attention.mask_tiles import NOTHING, Tiles
from bsrgemm._backend.registry import Backend
from bsrgemm._kernels import jit
from bsrgemm._kernels.structs import Struct
from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES

from ..conftest import BACKENDS, LONG

quickly = settings(max_examples=200 if LONG else 12, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: Tiles of the kernels.
CONFIGS = [config for kernel in FORWARD for config in kernel.every(DEVICE_DTYPES)]
TILES = sorted({(config.tile_q, config.tile_k) for config in CONFIGS})
SIDES = (16, 32, 48, 64, 80, 96, 128, 160, 240, 256)
#: Bytes of shared memory on Hopper: of a CTA, and of a multiprocessor, which takes 1 KB of each CTA for itself.
MOST_SHARED, MOST_OF_ALL = 232448, 233472


# ------------------------------------------------------------------------------------------------- masks
def some_mask(rng: np.random.Generator, shape: tuple[int, int], block: tuple[int, int], heads: tuple[int, int]) -> Any:
    """Booleans (batches, heads, queries, keys) of blocks that are empty, whole or random."""
    grid = (*heads, *(-(-n // b) for n, b in zip(shape, block, strict=True)))
    fill = rng.choice([0.0, 0.0, 0.3, 1.0, 1.0], grid).repeat(block[0], axis=2).repeat(block[1], axis=3)
    return rng.random((*heads, *shape)) < fill[:, :, : shape[0], : shape[1]]


def seen_in(mask: BlockMask, kind: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """What the elements of the blocks at these places allow."""
    if kind in (FULL, NOTHING):
        return np.full((len(rows), len(keys)), kind == FULL)
    elements = mask._backend.to_host(mask.elements(kind))
    return elements[np.ix_(rows % mask.block[0], keys % mask.block[1])]


def parts_of(backend: Backend, found: Tiles) -> np.ndarray:
    """The parts of all entries: none if all of every tile is seen."""
    return np.full(len(found.columns), -1, np.int32) if found.parts is None else backend.to_host(found.parts)


def dense(mask: BlockMask, found: Tiles, tile: tuple[int, int]) -> np.ndarray:
    """What the entries say, read as a kernel reads them, as booleans (patterns, queries, keys)."""
    (S_q, S_k), (bq, bk) = mask.shape, mask.block
    arrays = (found.first, found.columns, found.kinds, found.order)
    first, columns, kinds, order = map(mask._backend.to_host, arrays)
    parts = parts_of(mask._backend, found)
    patterns, count = mask.heads[0] * mask.heads[1], -(-S_q // tile[0])
    assert len(first) == patterns * count + 1
    assert len(columns) == len(parts) and len(kinds) == len(parts) * found.parts_q * found.parts_k
    assert all(x.dtype == np.int32 for x in (first, columns, parts, kinds, order))
    out = np.zeros((patterns, S_q, S_k), bool)
    for pattern, row in itertools.product(range(patterns), range(count)):
        entries = range(first[pattern * count + row], first[pattern * count + row + 1])
        assert list(columns[entries]) == sorted(set(columns[entries]))  # the kernel leaves out both ends
        for e in entries:
            rows = np.arange(row * tile[0], min(S_q, (row + 1) * tile[0]))
            keys = np.arange(columns[e] * tile[1], min(S_k, (columns[e] + 1) * tile[1]))
            part = out[pattern, rows[0] : rows[-1] + 1, keys[0] : keys[-1] + 1]
            if parts[e] < 0:
                part[...] = True
                continue
            for i, j in itertools.product(np.unique(rows // bq), np.unique(keys // bk)):
                at = (i - rows[0] // bq) * found.parts_k + j - keys[0] // bk
                assert 0 <= at < found.parts_q * found.parts_k
                mine = np.ix_(rows // bq == i, keys // bk == j)
                kind = kinds.reshape(len(parts), -1)[parts[e], at]
                part[mine] = seen_in(mask, kind, rows[rows // bq == i], keys[keys // bk == j])
    return out


def check(backend: Backend, allowed: np.ndarray, block: tuple[int, int], tile: tuple[int, int]) -> Tiles:
    mask = BlockMask.from_dense(backend.from_host(allowed), block=block)
    found = mask_tiles.tiles(backend, mask, *tile)
    np.testing.assert_array_equal(dense(mask, found, tile), allowed.reshape(-1, *allowed.shape[-2:]))
    first, order = (backend.to_host(x) for x in (found.first, found.order))
    count = -(-allowed.shape[-2] // tile[0])
    for lengths, places in zip(np.diff(first).reshape(-1, count), order, strict=True):
        assert sorted(places) == list(range(count))
        assert (np.diff(lengths[places]) <= 0).all()  # longest first
    return found


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@quickly
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    block=st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES)),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]),
)
def test_entries_allow_what_the_mask_allows(backend: Backend, tile: tuple[int, int], seed, shape, block, heads) -> None:
    check(backend, some_mask(np.random.default_rng(seed), shape, block, heads), block, tile)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("block", [(b, b) for b in SIDES] + [(48, 80), (256, 64), (32, 128), (16, 256)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_every_block_size_at_the_edges_of_tiles(
    backend: Backend, block: tuple[int, int], tile: tuple[int, int]
) -> None:
    rng = np.random.default_rng(sum(block))
    for shape in [(1, 1), (127, 129), (128, 128), (256, 192), (129, 300), (385, 64)]:
        check(backend, some_mask(rng, shape, block, (1, 2)), block, tile)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("block", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_whole_tiles_need_no_bits_and_nothing_needs_no_entry(
    backend: Backend, block: int, tile: tuple[int, int]
) -> None:
    S = 333
    whole = mask_tiles.tiles(backend, BlockMask.full(S, block=block, device=backend.name), *tile)
    stored = int(whole.first[-1])
    assert stored == -(-S // tile[0]) * -(-S // tile[1])
    assert (parts_of(backend, whole)[:stored] == -1).all()
    nothing = mask_tiles.tiles(backend, ~BlockMask.full(S, block=block, device=backend.name), *tile)
    assert not backend.to_host(nothing.first).any()


def test_a_long_window_becomes_few_entries() -> None:
    mask = BlockMask.window(1 << 19, left=2047, right=0, block=64, device="cpu")
    found = mask_tiles.tiles(mask._backend, mask, 128, 128)
    assert found.first[-1] <= 17 * (1 << 19) // 128
    assert sum(x.nbytes for x in found[:5]) < 16 << 20


def of_many_blocks(blocks: int, side: int, heads: tuple[int, int], queries: int) -> BlockMask:
    """A mask of so many blocks, all of which are one in memory."""
    indices = np.broadcast_to(np.int32(0), blocks)
    bits = np.zeros((0, side, -(-side // 32)), np.uint32)
    host = BlockMask.full(side, block=side, device="cpu")._backend
    return BlockMask(host, (queries, side), (side, side), heads, np.zeros(1, np.int32), indices, indices, bits)


def test_more_tiles_than_int32_can_number_are_refused_before_anything_is_made() -> None:
    many = of_many_blocks(2**27, 256, (1, 1), 2**35)  # a block of 256 x 256 is in 16 tiles of 64 x 64
    with pytest.raises(ValueError, match=r"^mask: 134217728 blocks of 256 x 256 in 1 patterns have 2147483648 pairs of "
                       r"a block and a tile of 64 x 64, wanted less than 2\*\*31; .* mask\[q0:q1, :\]"):  # fmt: skip
        mask_tiles.tiles(many._backend, many, 64, 64)
    with pytest.raises(ValueError, match=r"2147483648 tiles of queries of 64 x 64, wanted less than 2\*\*31"):
        mask_tiles.tiles(many._backend, of_many_blocks(0, 256, (2**15, 2**15), 128), 64, 64)
    with pytest.raises(ValueError, match=r"4294967296 tiles of keys of 64 x 64, wanted less than 2\*\*31"):
        mask_tiles.by_keys(many._backend, of_many_blocks(0, 256, (2**15, 2**15), 64), 64, 64)


# ------------------------------------------------------------------------------------------------- sequences
lengths = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=9)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@quickly
@given(lengths=lengths, causal=st.booleans(), index=st.sampled_from([np.int32, np.int64]))
def test_every_tile_of_every_sequence_comes_once(backend: Backend, lengths: Any, causal: bool, index: Any) -> None:
    queries, keys = (np.array(side) for side in zip(*lengths, strict=True))
    bounds = [backend.from_host(np.append(0, np.cumsum(x)).astype(index)) for x in (queries, keys)]
    sequence, tile = map(backend.to_host, mask_tiles.sequences(backend.xp, *bounds, int(queries.sum()), 128, causal))
    there = sequence >= 0
    got = list(zip(sequence[there].tolist(), tile[there].tolist(), strict=True))
    assert sorted(got) == [(s, t) for s, n in enumerate(queries) for t in range(-(-n // 128))]
    work = [min(keys[s], keys[s] - queries[s] + (t + 1) * 128) if causal else keys[s] for s, t in got]
    assert (np.diff(work) <= 0).all()


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_bounds_that_are_garbage_become_some_numbers(backend: Backend) -> None:
    top = np.iinfo(np.int32).max
    for bounds in ([5, 3, 900], [0, top, -top - 1], [-7, -7, -7], [top, 0, top], [0, 0, 0]):
        x = backend.from_host(np.array(bounds, np.int32))
        for causal, total in itertools.product((False, True), (0, 1, 300)):
            sequence, tile = mask_tiles.sequences(backend.xp, x, x, total, 128, causal)
            assert sequence.shape == tile.shape == (total // 128 + 2,)
            assert ((backend.to_host(sequence) >= -1) & (backend.to_host(sequence) < 2)).all()


# ------------------------------------------------------------------------------------------------- argument and memory
def body(source: str, name: str) -> str:
    """The fields of a struct of cuda/, without comments."""
    text = re.sub(r"//.*", "", jit.gather(source)[source])
    found = re.search(rf"struct (?:alignas\(\d+\) )?{name} {{(.*?)}};", text, re.DOTALL)
    assert found, name
    return found[1]


@cache
def fields(source: str, name: str) -> list[tuple[str, str]]:
    """(type, declarator) of every field, in order: ("int", "*order") or ("u64", "q_full[kQueries]")."""
    found = []
    for statement in filter(None, map(str.strip, body(source, name).split(";"))):
        parts = re.fullmatch(r"(?:const )?(\w+)\b\s*(.+)", statement, re.DOTALL)
        assert parts, statement
        found += [(parts[1], declarator.strip()) for declarator in parts[2].split(",")]
    return found


def c_types(acc: str) -> dict[str, str]:
    return {"i64": "q", "int": "i", "Sum": acc}


@pytest.mark.parametrize(("acc", "code"), [("f32", "f"), ("f64", "d")])
def test_the_argument_has_the_fields_of_the_kernels(acc: str, code: str) -> None:
    """The compiler asserts offsets; that fields of one type are not exchanged is seen by their names."""
    declared = fields("common/attention.cuh", "Attention")
    kinds = {"Strides": arguments.STRIDES, **c_types(code)}
    want = [(name.lstrip("* "), "P" if "*" in name else kinds[kind]) for kind, name in declared]
    assert list(arguments.attention(acc).fields) == want


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("attention_values.cu", arguments.ATTENTION_VALUES),
        ("decode.cu", arguments.DECODE),
        ("common/attention.cuh", arguments.STRIDES),
    ],
)
def test_other_arguments_have_the_fields_of_their_kernels(source: str, layout: Struct) -> None:
    kinds = c_types("f") | {"f32": "f"}
    declared = fields(source, layout.name)
    assert list(layout.fields) == [(n.lstrip("* "), "P" if "*" in n else kinds[kind]) for kind, n in declared]


SIZES = {"f32": 4, "u8": 1, "u32": 4, "int": 4, "u64": 8}
#: Where attention_sm90 declares its shared memory.
PRODUCERS = "common/attention_sm90_producers.cuh"


@cache
def constant(name: str) -> int:
    """A number that attention_sm90.cu sets itself."""
    found = re.search(rf"\b{name} = (\d+)", jit.gather("attention_sm90.cu")[PRODUCERS])
    assert found, name
    return int(found[1])


def shared_bytes(config: AttentionSm90) -> int:
    """The size of struct Shared, from its declaration."""
    slabs = {"kQuerySlabs": -(-config.head_dim // config.slab_columns), "kOutSlabs": -(-config.value_dim // 64)}
    values = config.value_dim * config.tile_k if config.fp8 else slabs["kOutSlabs"] * config.tile_k * 128
    constants = {
        **{"kTiles": constant("kTiles"), "kConsumers": config.consumers},
        **{
            "kStages": config.stages,
            "kQueries": config.queries,
            "kTileQ": config.tile_q,
            "kWords": config.tile_k // 32,
        },
        "kValueBytes": values,
        "kKept": config.tile_q * config.value_dim if config.fp8 and config.value_dim <= 128 else 1,
        **{**slabs, "kSlabs": max(slabs.values()), "kSlabQ": config.tile_q * 128, "kSlabK": config.tile_k * 128},
    }
    own = {
        "Tile": 4 * len(fields("common/attention.cuh", "Tile")),
        "MaskedEntry": 4 * len(fields(PRODUCERS, "MaskedEntry")),
    }
    total = 0
    for kind, declarator in fields(PRODUCERS, "Shared"):
        count = math.prod(eval(d, {}, constants) for d in re.findall(r"\[(.*?)\]", declarator))
        total = -(-total // 8) * 8 + count * (SIZES | own)[kind]
    return total


def test_shared_memory_holds_the_struct_and_fits_the_card() -> None:
    configs = list(AttentionSm90.every(DEVICE_DTYPES))
    assert len({(c.head_dim, c.value_dim) for c in configs}) == 36
    for config in configs:
        assert shared_bytes(config) <= config.shared_bytes <= MOST_SHARED, config
        assert config.ctas * (config.shared_bytes + 1024) <= MOST_OF_ALL, config
        assert config.tile_q == 64 * config.consumers and config.threads == 128 + 2 * config.tile_q


F16, F32, F64 = (np.dtype(x) for x in ("float16", "float32", "float64"))


def config_for(
    dtype: Any = F16, out: Any = F16, acc: Any = F32, dims: tuple[int, int] = (128, 128), **changes: Any
) -> Any:
    options = {"arch": "sm_90a", "scores": forward.PLAIN, "reads": True, "writes": True}
    options |= {"rows": 10**5, "keys": 4096} | changes
    return choose(forward.Problem(dtype=dtype, out_dtype=out, acc=acc, head_dim=dims[0], value_dim=dims[1], **options))


def test_the_kernel_follows_from_the_problem() -> None:
    listed = set(CONFIGS)
    for dtype, out in itertools.product((F16, BFLOAT16), (F16, BFLOAT16, F32)):
        for d, d_v in itertools.product((1, 8, 64, 72, 130, 256), repeat=2):
            config = config_for(dtype, out, dims=(d, d_v))
            assert isinstance(config, AttentionSm90)
            assert config.head_dim >= d and config.value_dim >= d_v
            assert config.store_tiles == (dtype == out)
            assert not config_for(dtype, out, dims=(d, d_v), writes=False).store_tiles
            for rows, keys, fine in itertools.product((1, 10**6), (1, 10**6), (False, True)):
                assert config_for(dtype, out, dims=(d, d_v), rows=rows, keys=keys, fine=fine) in listed
            for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
                portable = config_for(dtype, out, dims=(d, d_v), arch=arch)
                assert isinstance(portable, AttentionSm80)
                assert portable in listed
                assert portable.runs_on(arch)
    for other in (
        config_for(F32, F32),
        config_for(F64, F64, F64),
        config_for(dims=(257, 64)),
        config_for(dims=(64, 300)),
        config_for(dims=(0, 64)),
        config_for(reads=False),
        config_for(arch="sm_75"),
    ):
        assert isinstance(other, AttentionSimt)
        assert other.head_dim % 32 == other.value_dim % 32 == 0


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
def test_what_is_computed_in_float64_does_not_run_on_tensor_cores(dtype: Any) -> None:
    config = config_for(dtype, F64, F64)
    assert isinstance(config, AttentionSimt)
    assert (config.element_o, config.sum) == ("f64", "f64")


def test_scores_that_are_hidden_stay_finite_and_weigh_nothing() -> None:
    lowest = np.float32(-(2.0**127))  # kHidden of attention_sm90.cu
    for scale in (0.0, 2e-38, 1e-36, 1e-30, 0.088, 0.69, 0.7, 1.0, 1e30, -0.1, -1.0):
        how, factor, _ = forward.scores(scale, None)
        assert how in (forward.PLAIN, forward.SIGNED)
        if how == forward.PLAIN:  # the kernel scales hidden scores with the others
            assert factor > 0
            assert -np.inf < lowest * np.float32(factor) < -1000
    assert forward.scores(0.1, 30.0)[0] == forward.CAPPED


def test_sections_share_the_cache() -> None:
    for heads, group, keys, width in itertools.product((1, 7, 96), (1, 8), (0, 1, 4096, 1 << 20), (32, 1024)):
        section = forward.section(heads, group, keys, width)
        assert 1 <= section <= heads
