"""Which kernel serves attention and decode, with which tiles, for a spread of problems; and the tiles of the CPU.

choices.txt has a line for each problem, or a digest of many. A rule that was changed on purpose writes it anew, and the
difference shows what the change does: ``python -m tests.attention.test_choices``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bsrgemm import BlockMask, attention
from bsrgemm._attention import choose, decode_kernel, host_tiles
from bsrgemm._attention import forward as forward_kernels
from bsrgemm._attention.attention_sm80 import AttentionSimt
from bsrgemm._attention.attention_sm90 import AttentionSm90, AttentionValues
from bsrgemm._attention.forward import CAPPED, PLAIN, SIGNED, Problem
from bsrgemm._kernels.jit import MAX_GRID_X, MAX_GRID_YZ
from bsrgemm.dtypes import BFLOAT16

from .. import written_lists

PATH = Path(__file__).with_name("choices.txt")
F16, F32, F64, U8 = (np.dtype(x) for x in ("float16", "float32", "float64", "uint8"))
DTYPES = (F16, BFLOAT16, F32, F64, U8)
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
_USUAL = Problem("sm_90a", F16, F16, F32, 64, 64, PLAIN, True, True, 10**5, 4096)


def written(x: Any) -> str:
    """A problem on a line: what differs from the usual one."""
    changes = {f.name: getattr(x, f.name) for f in fields(x) if getattr(x, f.name) != getattr(_USUAL, f.name)}
    return " ".join(f"{k}={'bfloat16' if v == BFLOAT16 else v}" for k, v in changes.items()) or "usual"


def constants(config: Any) -> str:
    """A config with all that follows from it."""
    names = ("threads", "tile_q", "tile_k", "ctas", "stages", "queries", "slab_columns", "shared_bytes", "warps")
    more = [f"{name}={getattr(config, name)}" for name in names if hasattr(config, name)]
    return " ".join([str(config), *more])


def problems() -> Iterator[Problem]:
    sizes = (1, 32, 63, 64, 65, 80, 96, 97, 128, 129, 192, 193, 256, 257)
    for D, D_v, score in islice(product(sizes, sizes, (PLAIN, SIGNED, CAPPED)), 0, None, 11):
        yield replace(_USUAL, head_dim=D, value_dim=D_v, scores=score)
        yield replace(_USUAL, head_dim=D, value_dim=D_v, scores=score, dtype=U8, fp8=True, out_dtype=BFLOAT16)
    few = 66 * 128
    for D, rows, keys, fine in product((64, 80, 128, 192), (few - 1, few), (1023, 1024, 1025), (False, True)):
        yield replace(_USUAL, head_dim=D, rows=rows, keys=keys, fine=fine)
        yield replace(_USUAL, head_dim=D, rows=rows, keys=keys, fine=fine, fp8=True, dtype=U8)
    for D, piece in product((64, 128, 192), (16, 32, 64)):
        yield replace(_USUAL, head_dim=D, value_dim=D, piece=piece)
        yield replace(_USUAL, head_dim=D, value_dim=D, piece=piece, out_dtype=F32)
    for D, keys, tiles in product((64, 128), (64, 65, 256, 257, 512, 513), (132, 133, 264, 265, 792, 793, 1056, 1057)):
        short = replace(_USUAL, head_dim=D, value_dim=D, rows=tiles * 60, queries=60, keys=keys, alike=True, full=True)
        yield from (short, replace(short, scores=CAPPED), replace(short, full=False))
    for D, few, keys, heads in product((64, 128, 192), (0, 16, 17, 32, 33, 64, 65), (256, 257), (48, 49)):
        sizes = {"head_dim": D, "value_dim": D, "keys": keys, "rows": heads * few, "queries": few}
        yield from (replace(_USUAL, **sizes, few=few, arch=arch) for arch in ("sm_75", "sm_80", "sm_90a"))
    for heads, queries in product((1, 2**16 - 1, 2**16), (60, 2**22)):
        yield replace(_USUAL, rows=heads * queries, queries=queries, keys=60, alike=True)
    for D, arch in product((64, 96, 128, 192, 256), ARCHS):
        yield replace(_USUAL, head_dim=D, arch=arch)
        yield replace(_USUAL, value_dim=D, arch=arch, reads=D != 96)
    for dtype, out, writes in product((F16, BFLOAT16, F32, F64), (F16, BFLOAT16, F32), (True, False)):
        yield replace(_USUAL, dtype=dtype, out_dtype=out, writes=writes)
        yield replace(_USUAL, dtype=U8, fp8=True, out_dtype=out, writes=writes)
        yield replace(_USUAL, dtype=dtype, acc=F64, out_dtype=F64)
    for change in ({"head_dim": 0}, {"value_dim": 0}, {"reads": False}, {"fp8": True, "reads": False, "dtype": U8}):
        yield replace(_USUAL, **change)
        yield replace(_USUAL, arch="sm_80", **change)
        yield replace(_USUAL, head_dim=300, **{k: v for k, v in change.items() if k != "head_dim"})


def forward() -> Iterator[tuple[str, str]]:
    for one in problems():
        found = list(choose.candidates(one))
        assert choose.choose(one) == found[0]
        text = f"{[type(x).__name__ for x in found]} {constants(found[0])} copies={choose.wants_copies(one)}"
        yield written(one), text


def ahead_of_time() -> Iterator[tuple[str, str]]:
    """All configs by kernel and type: how many, how many are skipped, on which cards they run; and their digest."""
    found: dict[str, list[Any]] = {}
    for kernel in (x for family in choose.ATTENTION for x in family.every(DTYPES)):
        found.setdefault(f"{type(kernel).__name__} {getattr(kernel, 'element', 'e4m3')}", []).append(kernel)
    for name, some in found.items():
        skipped = [x.rare for x in some]
        running = [[x.runs_on(arch) for x in some] for arch in ARCHS]
        counts = " ".join(str(sum(x)) for x in (skipped, *running))
        texts = [f"{constants(x)} {spec.source} {spec.entry} {spec.defines}" for x in some for spec in [x.spec()]]
        yield name, f"{len(some)} {counts} {written_lists.digest([*texts, str(skipped), str(running)])}"


def decoding() -> Iterator[tuple[str, str]]:
    dims = decode_kernel.HEAD_DIMS
    for D, D_v, rows in product(dims, dims, (1, 16, 17, 32, 33)):
        config = decode_kernel.Decode.of(F16, D, D_v, rows)
        more = [config.warps, config.threads, int(config.shared_q), config.stages, config.shared_bytes]
        ctas = [config.ctas(arch) for arch in ("sm_80", "sm_86", "sm_90a")]
        yield f"decode {D} {D_v} {rows}", " ".join(map(str, (config.rows, *more, *ctas)))
    for longest, batch, heads, slots in product(
        (0, 1, 7, 8, 15, 16, 17, 100, 1000, 5000), (1, 3), (1, 8), (1, 132, 264)
    ):
        key = f"pieces {longest} {batch} {heads} {slots}"
        found = [decode_kernel.pieces_of(longest, total, batch, heads, slots) for total in (longest, batch * longest)]
        yield key, str(found)


def sections() -> Iterator[tuple[str, str]]:
    for heads, group, keys, width in product((1, 7, 64), (1, 4), (0, 1000, 4096, 32768), (128, 512)):
        found = forward_kernels.section(heads, group, keys, width)
        yield f"section {heads} {group} {keys} {width}", str(found)
    for scale, cap, fp8 in product((0.125, 1.0, 0.69, 0.7, 0.0, -0.5, 6e-31, 7e-31), (None, 30.0), (False, True)):
        mode, *factors = forward_kernels.scores(scale, cap, fp8)
        yield f"scores {scale} {cap} {fp8}", f"{mode} " + " ".join(f"{x:.12g}" for x in factors)
    values = AttentionValues()
    for keys, sequences in product((0, 1, 16, 17, 1000), (0, 1, 5)):
        room = values.room(keys, sequences)
        yield (
            f"values {keys} {sequences}",
            f"{room} {values.grid(6, room, 65)} {values.grid(6, room, 64)} {values.threads}",
        )


def test_a_grid_has_room_for_the_values_of_long_sequences() -> None:
    """Only the first side of a grid has more than 65,535 CTAs."""
    for heads, keys in ((1, 65535 * 128 + 1), (4, 2**27), (65536, 128), (2**20, 1000)):
        first, *others = AttentionValues.grid(heads, AttentionValues.room(keys), 256)
        assert first == heads * -(-keys // 128) <= MAX_GRID_X and max(others) <= MAX_GRID_YZ


def host_work() -> Iterator[tuple[str, str]]:
    """The tiles that the CPU computes, (batches, heads, query heads of each, queries), with the keys of each chunk."""
    causal = BlockMask.causal(200, 300, block=(48, 64), device="cpu")
    sparse = BlockMask.random(200, 300, block=(48, 64), per_row=2, heads=(2, 8), device="cpu")
    calls: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
        # batches, heads, KV heads, queries, keys; columns of q and k, and of v
        "several heads": ((3, 6, 6, 40, 50), (8, 8), {}),
        "grouped heads": ((2, 8, 2, 100, 100), (8, 8), {}),
        "wide values": ((2, 8, 8, 16, 600), (8, 512), {}),
        "wide keys": ((2, 8, 8, 16, 600), (512, 8), {}),
        "few wide keys": ((2, 8, 8, 16, 64), (512, 8), {}),
        "no keys": ((2, 8, 8, 16, 0), (8, 8), {}),
        "no columns": ((1, 1, 1, 16, 20), (0, 1), {}),
        "many queries": ((1, 1, 1, 1100, 1100), (8, 8), {"causal": True}),
        "as many as pays": ((1, 1, 1, 512, 1024), (8, 8), {}),
        "one less": ((1, 1, 1, 512, 1023), (8, 8), {}),
        "narrow band": ((1, 2, 2, 700, 700), (8, 8), {"window": (60, 9)}),
        "wide band": ((1, 2, 2, 700, 700), (8, 8), {"window": (200, 198)}),
        "band before the keys": ((1, 1, 1, 200, 100), (8, 8), {"window": (20, 5)}),
        "mask": ((2, 8, 2, 200, 300), (8, 8), {"mask": causal}),
        "mask with wide keys": ((2, 8, 4, 200, 300), (2048, 8), {"mask": causal}),
        "mask for each head": ((2, 8, 2, 200, 300), (8, 8), {"mask": sparse}),
        "mask for each head and a band": ((2, 8, 2, 200, 300), (8, 8), {"mask": sparse, "window": (70, 0)}),
    }
    attend = host_tiles._Tile.attend
    for name, ((B, H, H_kv, S_q, S_k), (D, D_v), options) in calls.items():
        found: list[str] = []

        def note(self: Any, q: Any, k: Any, v: Any, chunks: Any, found: list[str] = found) -> Any:
            found.append(f"{'x'.join(map(str, q.shape[:4]))}:{'+'.join(str(chunk.width) for chunk in chunks)}")
            return attend(self, q, k, v, chunks)

        def share(work: Any, starts: Any, found: list[str] = found, **how: Any) -> None:
            found.append(f"work {written_lists.digest([str(np.diff(starts).tolist())])} {how}")
            work(0, len(starts) - 1)

        q, k, v = (np.ones(x, np.float32) for x in ((B, H, S_q, D), (B, H_kv, S_k, D), (B, H_kv, S_k, D_v)))
        with patch.object(host_tiles._Tile, "attend", note), patch.object(host_tiles.threads, "share", share):
            attention(q, k, v, **options)
        yield name, " ".join(found[:9]) + f" ... {len(found)} {written_lists.digest(found)}"


SECTIONS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "forward": forward,
    "ahead of time": ahead_of_time,
    "decode": decoding,
    "sections, scores and values": sections,
    "tiles on the host": host_work,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_choices_are_those_that_were_written_down(section: str) -> None:
    written_lists.compare(PATH, section, SECTIONS[section])


def test_every_first_choice_is_compiled_ahead_of_time() -> None:
    """What is chosen is listed; of AttentionSimt a few sizes only."""
    listed = {x for family in (*choose.FORWARD, decode_kernel.Decode) for x in family.every(DTYPES)}
    served = 0
    for one in problems():
        kernel = choose.choose(one)
        if not isinstance(kernel, AttentionSimt):
            served += 1
            assert getattr(kernel, "decode", kernel) in listed, one
            assert kernel.runs_on(one.arch)
    assert served > 100


def test_a_kernel_that_cannot_serve_a_problem_is_not_forced_on_it() -> None:
    assert isinstance(choose.choose(_USUAL, "AttentionSimt"), AttentionSimt)
    assert isinstance(choose.choose(_USUAL, "GemmSimt"), AttentionSm90)
    with pytest.raises(ValueError, match="AttentionSm90 cannot compute this attention"):
        choose.choose(replace(_USUAL, arch="sm_80"), "AttentionSm90")


if __name__ == "__main__":
    written_lists.write(PATH, SECTIONS)
