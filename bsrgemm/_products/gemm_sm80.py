"""``A @ B`` on the tensor cores of any card since Ampere: which tiles, for which products, and how it is launched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from .._kernels.card import Card, shared_kb, tensor_arch
from .._kernels.element_types import BYTES, Types, element, number
from .._kernels.launch import Launch, Scratch
from . import arguments
from .call import Problem
from .costs import from_l2, memory, operand_bytes, overlapped, rows_of, speed
from .dense import Tiled, schedule, tensor_cores_serve
from .operand import Kind
from .work_list import Share

#: Element -> (how it is multiplied, number of columns of A that one instruction takes).
MMA = {
    "f16": ("MMA_F16", 16),
    "bf16": ("MMA_BF16", 16),
    "f32": ("MMA_3XTF32", 8),
    "f64": ("MMA_F64", 8),
    "i8": ("MMA_S8", 32),
}
#: Element -> types of the result, and of the sums, if these are not the element itself and float32.
_RESULTS = {"f16": ("f16", "f32"), "bf16": ("bf16", "f32"), "i8": ("i32", "i8")}
_SUMS = {"f64": "f64", "i8": "u32"}
#: Number of elements of a result that has two tiles of 128 x 256 for each of the 132 multiprocessors of an H200.
_WIDE = 2 * 132 * 128 * 256
_HEIGHTS = (128, 64, 32, 16)
#: The stages that are multiplied in about 27 us: a group is cut if it is longer.
_LEAST_STAGES = {"h": 32, "s": 13, "t": 24, "d": 19, "i": 26}


@dataclass(frozen=True)
class GemmSm80(Tiled, source="gemm_sm80.cu", argument=arguments.gemm_sm80, needs="sm_80", types="a b c acc"):
    """``A @ B`` in tiles of `row_tiles` row tiles by `tile_n` columns."""

    types: Types
    #: how elements are multiplied: "MMA_F16", "MMA_3XTF32", ...
    mma: str
    row_tile_height: int
    #: number of row tiles of a tile
    row_tiles: int
    tile_n: int
    #: number of warps along the rows of a tile, among which its row tiles are divided
    warps_m: int
    threads: int
    stages: int
    a_transposed: bool
    b_transposed: bool
    #: whether the last row tile of a block row is cut, or lines of stored blocks are longer than a block
    ragged: bool = False

    reads_lines = True

    costs: ClassVar = {
        "t0": 8.89, "lat_h": 532.0, "lat_s": 247.0, "lat_t": 720.0, "lat_d": 264.0, "lat_i": 745.0, "lat_n": 19.9,
        "rate_h": 1.42, "rate_s": 0.398, "rate_t": 0.915, "rate_d": 0.221, "rate_i": 1.87, "union_h": 0.513,
        "union_s": 0.331, "union_t": 0.266, "union_d": 0.0922, "union_i": 1.87, "T": 0.982, "F": 1.01,
        "ragged_h": 0.77, "ragged_s": 1.79, "ragged_t": 0.669, "ragged_d": 0.91, "ragged_i": 0.914, "l2": 4.61,
        "cut": 10.4, "add": 117000.0,
    }  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """An upper bound of the size of the kernel's struct Shared, in bytes."""
        return self.stages * 128 * (self.row_tiles * self.row_tile_height + self.tile_n) + 1024

    @property
    def kind(self) -> str:
        """How its costs are named: by the way in which elements are multiplied."""
        return {"MMA_3XTF32": "s", "MMA_TF32": "t", "MMA_F64": "d", "MMA_S8": "i"}.get(self.mma, "h")

    def least_columns(self, problem: Problem) -> int:
        """The columns of A up to which a group is not cut; groups of usual length are cut into twelve at most.

        To add the sums of splits takes 11 us, and some more for each split, since one CTA does it for all of a group.
        """
        of = rows_of(problem)
        mean = of.union(-(-self.row_tiles // -(-problem.R // self.row_tile_height)))
        return max(_LEAST_STAGES[self.kind] * 128 // BYTES[self.types.a], math.ceil(mean * problem.K / 12))

    def ctas(self, arch: str) -> int:
        """Return the number of CTAs that share a multiprocessor: kCtas of the kernel."""
        words = (
            self.row_tiles * self.row_tile_height * self.tile_n // self.threads * (2 if self.mma == "MMA_F64" else 1)
        )
        light = self.threads < 256 or (self.threads == 256 and words <= 64 and self.mma != "MMA_3XTF32")
        return 2 if light and 2 * (self.shared_bytes + 1024) <= (shared_kb(arch) + 1) * 1024 else 1

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """Rounds of tiles, each a chain of steps of 128 bytes along K over the union of its row tiles' columns."""
        p, of, size = problem, rows_of(problem), BYTES[problem.types.a]
        kind = self.kind
        high, per_row = self.row_tiles * self.row_tile_height, -(-p.R // self.row_tile_height)
        mean, longest = (find(-(-self.row_tiles // per_row)) for find in (of.union, of.most))
        tiles = -(-of.count * per_row // self.row_tiles) * self.column_tiles(p)
        resident = self.ctas(p.arch)
        rounds = max(1, math.ceil(tiles / (card.multiprocessors * resident)))
        together = min(resident, max(1, math.ceil(tiles / card.multiprocessors)))
        used = (
            1.0
            if self.row_tiles <= per_row
            else x["union_" + kind] + (1 - x["union_" + kind]) * of.mean / max(mean, 1e-9)
        )
        flops = high * self.tile_n * min(-(-p.K // 8) * 8, 128 // size) * used
        step = overlapped(x["lat_" + kind] + x["lat_n"] * self.tile_n / 128, together * flops / x["rate_" + kind] / 1e3)
        step *= (
            (x["T"] if p.transposed else 1)
            * (x["F"] if self.b_transposed else 1)
            * (x["ragged_" + kind] if self.ragged else 1)
        )
        share, least = tiles * mean / (card.multiprocessors * resident), self.least_columns(p) / p.K
        entries, adding = longest + (rounds - 1) * mean, 0.0
        if longest > max(1.0, 1.15 * share, least):  # it is cut
            entries = max(1.0, 1.3 * share, least)
            sums = high * min(self.tile_n, p.N) * (8 if kind == "d" else 4)
            adding = x["cut"] + longest / entries * sums / x["add"]
        chain = math.ceil(p.K * size / 128) * entries * step / 1e3 / speed(card)
        l2 = x["l2"] * from_l2(card, tiles * mean * p.K * self.tile_n * size)
        return x["t0"] + adding + overlapped(chain, l2, memory(card, *operand_bytes(p)))

    def runs_on(self, arch: str) -> bool:
        return super().runs_on(arch) and self.shared_bytes <= shared_kb(arch) * 1024

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        """It copies its operands in pieces of 16 bytes, along K if that is the fastest index."""
        names, K = problem.types, problem.K
        if names.a not in MMA or not problem.b_order or not tensor_arch(problem.arch) or problem.parts != 1:
            return False
        size = BYTES[names.a]
        return (
            tensor_cores_serve(problem)
            and names.c in _RESULTS.get(names.a, (names.a,))
            and names.acc == _SUMS.get(names.a, "f32")
            and problem.lines * size % 16 == 0
            and (problem.b_order == "C" or K * size % 16 == 0)
            and problem.block_rows * _rows_of_tiles(problem.R) < 2**31
            and problem.lines * (K if problem.transposed else problem.R) < 2**32
        )

    @classmethod
    def best(cls, problem: Problem) -> GemmSm80:
        """Wide tiles if there are enough of them, otherwise narrow ones."""
        row_tile_height = height_of(problem.R)
        few = problem.N <= 128 or problem.block_rows * problem.R * problem.N * problem.batches < _WIDE
        return cls._of(problem, row_tile_height)[-1 if few else 0]

    @classmethod
    def variants(cls, problem: Problem) -> Iterator[GemmSm80]:
        best = cls.best(problem)
        yield best
        heights = [h for h in _HEIGHTS if problem.R % h == 0] or [height_of(problem.R)]
        for row_tile_height in heights:
            yield from (other for other in cls._of(problem, row_tile_height) if other != best)

    @classmethod
    def _of(cls, problem: Problem, row_tile_height: int) -> list[GemmSm80]:
        """Return the constants with this height of row tiles, the preferred ones first.

        A product of float32 numbers is computed as three products of tf32 numbers, which keep the accuracy of float32,
        or as one if the caller allows tf32.
        """
        mma = "MMA_TF32" if problem.types.a == "f32" and problem.tf32 else MMA[problem.types.a][0]
        tiles = tiles_of(mma, row_tile_height, shared_kb(problem.arch))
        ragged = problem.R % row_tile_height != 0 or problem.line > 0
        flags = (problem.transposed, problem.b_order == "F", ragged)
        return [cls(problem.types, mma, row_tile_height, *tile, *flags) for tile in tiles]

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[GemmSm80]:
        for name in (n for n in map(element, dtypes) if n in MMA):
            kinds = (MMA[name][0], "MMA_TF32") if name == "f32" else (MMA[name][0],)
            for c, mma, row_tile_height, *flags in itertools.product(
                _RESULTS.get(name, (name,)), kinds, _HEIGHTS, (False, True), (False, True), (False, True)
            ):
                names = Types(name, name, c, _SUMS.get(name, "f32"))
                tiles = {tile for kilobytes in (99, 163, 227) for tile in tiles_of(mma, row_tile_height, kilobytes)}
                for tile in sorted(tiles):
                    yield cls(names, mma, row_tile_height, *tile, *flags)

    def prepare(self, call: Kind, card: Card) -> Launch:
        problem, operand, shape = call.problem, call.operand, self.shape_of_groups(call)
        pattern = operand.pattern(call.stored_columns, problem.transposed)
        column_tiles, ctas = self.column_tiles(problem), card.multiprocessors * self.ctas(card.arch)
        share = Share(problem.K, column_tiles, ctas, self.least_columns(problem))
        groups, items = operand.groups(pattern, *shape), operand.split_items(pattern, *shape, share)
        grid = (ctas if items.pieces else min(groups.count * column_tiles, ctas),)
        more = {"schedule": schedule(groups, items), "line": problem.lines, "high": shape[0] * self.row_tile_height}
        pieces, pointers = items.pieces * column_tiles, _writer_of_sums(self.acc)
        sums = pieces * self.row_tiles * self.row_tile_height * self.tile_n * number(self.acc).itemsize
        scratch = Scratch(sums, pieces, pointers) if pieces else None
        return self.launch(call, grid, more=more, scratch=scratch, holds=(groups, items))


@cache
def _writer_of_sums(acc: str) -> Callable[[Any, int, int], None]:
    """What writes the addresses of the sums of splits and of the counters of those that have arrived."""
    return arguments.gemm_sm80(acc).patch("schedule.partial", "schedule.arrived").write


def _rows_of_tiles(R: int) -> int:
    """The rows of the row tiles of a block row."""
    return -(-R // height_of(R)) * height_of(R)


def height_of(R: int) -> int:
    """The height of row tiles: the highest one that divides the blocks, or else that adds the fewest rows to them.

    >>> [height_of(R) for R in (64, 96, 24, 40, 72, 100, 120, 3)]
    [64, 32, 32, 16, 16, 16, 128, 16]
    """
    return min(_HEIGHTS, key=lambda height: (-(-R // height) * height, -height))


def tiles_of(mma: str, row_tile_height: int, shared_kb: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield possible tiles as (row tiles, columns, warps along the rows, threads, stages), the preferred one first.

    Tiles of a single row tile are the fastest where each instruction is slow, since no warp waits for the row tiles of
    another warp. On an H200, with blocks of 32 x 32 at density 0.22, they reach 109 TFLOP/s in tf32, where tiles of
    four row tiles reach 82, and 45 TFLOP/s instead of 33 in float64, with blocks of 64 x 64 49 instead of 37. 16-bit
    types are faster with several row tiles, which share what is read of B.
    """
    alone = row_tile_height == 64 and mma == "MMA_F64"
    if alone and shared_kb > 99:
        yield 1, 256, 2, 512, 4 if shared_kb > 163 else 3
    if row_tile_height < 64 and mma in ("MMA_TF32", "MMA_F64") and shared_kb > 99:
        yield max(1, 32 // row_tile_height), 256, 1, 256, 3 if shared_kb > 163 else 2
    if mma == "MMA_3XTF32" and row_tile_height < 128:
        yield 64 // row_tile_height, 128, 1, 128, 4 if shared_kb > 99 else 3
    if mma not in ("MMA_3XTF32", "MMA_F64") and shared_kb > 99:
        yield 128 // row_tile_height, 256, 2, 256, 4 if shared_kb > 163 else 3
    yield 1 if alone else 128 // row_tile_height, 128, 2, 256, 3
