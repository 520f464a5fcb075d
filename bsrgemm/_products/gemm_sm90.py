"""``A @ B`` on Hopper's tensor cores: which tiles, for which products, and how it is launched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np

from .._kernels import tensor_map
from .._kernels.card import Card
from .._kernels.element_types import BYTES, Types, element
from .._kernels.kernel import host
from .._kernels.launch import Launch, Map, Scratch
from .._kernels.structs import TENSOR_MAP_BYTES
from .._kernels.tensor_map import Layout
from ..dtypes import HALF_DTYPES
from . import arguments
from .call import Problem
from .costs import memory, operand_bytes, overlapped, rows_of, speed
from .dense import SCRATCH, Tiled, map_at, matrix_map, schedule, tensor_cores_serve
from .operand import Kind
from .work_list import Share

#: Element -> (its name in the wgmma instruction, how many of them one instruction takes along K).
WGMMA = {"f16": ("f16", 16), "bf16": ("bf16", 16), "f32": ("tf32", 8), "e4m3": ("e4m3", 32)}
#: Bytes of panels of B that stay in the L2 beside what is read of A.
_PANEL_BYTES = 20 << 20
#: Keep A in the L2 cache, next to panels of B, if it has at most so many bytes. On an H200 this saves 1 % of the time
#: at densities of 0.05 and 0.10.
_KEPT_BYTES = 20 << 20


class Store(StrEnum):
    """How C is written: by the threads, or by TMA as tiles of rows or of columns."""

    DIRECT = "direct"
    ROWS = "rows"
    COLUMNS = "columns"


#: Half of the 132 multiprocessors of an H100 or H200.
FEW_TILES = 66


def tile_shape(rows: int, columns: int, batches: int, row_tile_height: int) -> tuple[int, int, int]:
    """Return the height of row tiles, and the rows and the columns of a tile, for a result of this size.

    The given height is the largest that divides the blocks. A tile of 64 rows has one row tile, so that no columns of
    several ones are merged, and there are twice as many tiles. Microseconds on an H200 for float16, n = 8192, density
    0.22, with equally many blocks in all block rows / with each block drawn alone:

    ===================  ===========  ===========  ===========  =========
    blocks, columns      128 x 128    64 x 256     64 x 128     chosen
    ===================  ===========  ===========  ===========  =========
    64 x 64, 128         21.3 / 33.5  26.6 / 38.0  16.6 / 26.7  64 x 128
    64 x 64, 256         27.0 / 41.2  22.0 / 33.3  26.3 / 28.9  64 x 256
    128 x 128, 128       20.0 / 28.3  25.0 / 35.2  15.9 / 24.1  64 x 128
    128 x 128, 256       18.9 / 28.7  21.1 / 31.0  24.6 / 26.2  128 x 128
    ===================  ===========  ===========  ===========  =========

    Up to 64 columns, tiles of 64 x 64 need no pieces: 64 columns take 16.1 us for 19.3 in tiles of 128 x 64 with blocks
    of 64 x 64, and 15.2 for 18.6 with blocks of 128 x 128, which are equally many in all rows.

    >>> [tile_shape(8192, columns, 1, 64) for columns in (64, 128, 256, 512)]
    [(64, 64, 64), (64, 64, 128), (64, 64, 256), (64, 128, 256)]
    >>> [tile_shape(rows, 256, 1, 128) for rows in (4096, 8192, 16384)]
    [(64, 64, 128), (128, 128, 128), (128, 128, 256)]
    """
    tiles = -(-rows // 128) * -(-columns // 256) * batches
    if columns <= 64 and row_tile_height >= 64 and tiles <= FEW_TILES:
        return 64, 64, 64
    if columns <= 64 or tiles > FEW_TILES:
        return row_tile_height, 128, 64 if columns <= 64 else 128 if columns <= 128 else 256
    if row_tile_height >= 64 and (columns <= 128 or tiles <= FEW_TILES // 2):
        return 64, 64, 128
    return (row_tile_height, 64, 256) if row_tile_height == 64 else (row_tile_height, 128, 128)


def column_tiles_of(section: int, tile_n: int, panel: int) -> int:
    """Return how many column tiles make a section whose panels of B, of so many bytes each, stay in the L2."""
    return max(1, min(section // tile_n, _PANEL_BYTES // panel))


class WorkListSm90(Tiled):
    """A kernel for Hopper that takes groups of row tiles from a work list, whose long groups are cut into pieces."""

    types: Types
    tile_m: Any
    depth: Any

    @property
    def mma_type(self) -> str:
        """The name of the element in the wgmma instruction."""
        return WGMMA[self.types.a][0]

    @property
    def mma_k(self) -> int:
        """How many elements an instruction takes along K."""
        return WGMMA[self.types.a][1]

    def group(self, K: int) -> int:
        """Return how many column tiles are processed together, for a B of K rows."""
        raise NotImplementedError

    def block_map(self, call: Kind) -> Layout | None:
        """The tensor map of A's blocks, which are stacked along their rows; None if TMA does not read them."""
        raise NotImplementedError

    def operand_maps(self, call: Kind) -> tuple[Layout | None, Layout | None]:
        """The tensor maps of B and of the result; None for a result that is not written in tiles."""
        raise NotImplementedError

    def maps(self, call: Kind) -> tuple[Map, ...]:
        """The tensor maps that have an address of a call."""
        of_b, of_c = self.operand_maps(call)
        blocks = self.block_map(call) if call.copied else None
        return (*map_at(0, of_b), *map_at(1, of_c), *([] if blocks is None else [Map(2, 0, blocks)]))

    def chain(self, problem: Problem, card: Card, step: float, x: dict[str, float]) -> tuple[float, float, bool]:
        """The steps of the CTA that has most of them take so long, and what is read of the L2 by all (bytes).

        A step is as long as said for all warpgroups. Groups longer than a fair share are cut, which costs once more.
        """
        p, of = problem, rows_of(problem)
        per_row = -(-p.R // self.row_tile_height)
        mean, longest = (find(-(-self.row_tiles // per_row)) for find in (of.union, of.most))
        tiles = -(-of.count * per_row // self.row_tiles) * self.column_tiles(p)
        share, least = tiles * mean / card.multiprocessors, 512 / p.K
        most = longest + (max(1, math.ceil(tiles / card.multiprocessors)) - 1) * mean
        cut = longest > max(1.15 * share, least) and tiles < 4 * card.multiprocessors
        entries = max(share, least, most * x["cut_share"]) if cut else most
        chain = entries * -(-p.K // self.depth) * step / 1e3 / speed(card)
        return chain, tiles * mean * -(-p.K // 16) * 16 * self.tile_n * BYTES[p.types.b], cut

    def prepare(self, call: Kind, card: Card) -> Launch:
        problem, operand, shape = call.problem, call.operand, self.shape_of_groups(call)
        pattern, column_tiles = operand.pattern(call.stored_columns, problem.transposed), self.column_tiles(problem)
        groups = operand.groups(pattern, *shape)
        items = operand.split_items(pattern, *shape, Share(problem.K, column_tiles, card.multiprocessors))
        tiles = groups.count * column_tiles
        # Launch as few CTAs as finish in the same number of rounds; more would only consume power.
        grid = (card.multiprocessors if items.pieces else -(-tiles // -(-tiles // card.multiprocessors)),)
        layout, blocks = arguments.gemm_sm90(), self.block_map(call)
        more = {
            "a": bytes(TENSOR_MAP_BYTES) if call.copied or blocks is None else blocks.at(operand.pointer),
            "b": bytes(TENSOR_MAP_BYTES),
            "c": bytes(TENSOR_MAP_BYTES),
            "schedule": schedule(groups, items),
            "group": self.group(problem.block_cols * problem.K),
            "count": -1 if items.pieces else groups.count,
            "keep_a": call.blocks.nbytes <= _KEPT_BYTES,
            "groups": groups.count,
            "entries": len(groups.columns),
        }
        pieces = items.pieces * column_tiles
        # Two warpgroups have room for 64 x 64 sums each, even if one of them joins those of both.
        sums = max(self.tile_m * self.tile_n, 2 * 64 * 64)
        pointers = layout.patch(*(f"schedule.{name}" for name in SCRATCH))
        scratch = Scratch(
            4 * pieces * sums, 2 + 2 * pieces, lambda to, memory, zeros: pointers.write(to, zeros, memory, zeros + 8)
        )
        return self.launch(call, grid, more=more, maps=self.maps(call), scratch=scratch, holds=(groups, items))


@dataclass(frozen=True)
class GemmSm90(
    WorkListSm90,
    source="gemm_sm90.cu",
    argument=arguments.gemm_sm90(),
    needs="sm_90a",
    types="a c",
    derived="mma_type mma_k stages",
):
    """``A @ B`` on Hopper's tensor cores, in tiles of `tile_m` x `tile_n`."""

    types: Types
    row_tile_height: int
    tile_n: int
    depth: int
    tail: int
    a_transposed: bool
    b_transposed: bool
    #: how C is written
    store: Store
    #: whether one copy brings all slabs of 64 columns of a panel of B
    wide: bool
    #: for row tiles of fewer than 64 rows: whether the part of a block that a step needs is contiguous in memory
    flat: bool
    #: number of columns of B that are processed before the kernel moves on to the next ones
    section: int = host(1024)
    #: 128, or 64 for products of few tiles, in row tiles of 64 rows
    tile_m: int = 128
    #: for float32: 2 if B is given in two parts of tf32, and A is split likewise
    parts: int = 1

    threads = 384

    costs: ClassVar = {
        "t0": 8.1, "lat": 40.9, "lat_low": 90.9, "rate": 2.67, "rate_f": 1.28, "rate_low": 2.67, "rate_low_f": 1.15,
        "l2sm": 67.4, "T": 1.28, "T_low": 1.06, "F": 1.32, "pieces": 1.88, "pieces_f": 1.25, "cut": 3.62,
        "cut_share": 0.222,
    }  # fmt: skip

    @property
    def row_tiles(self) -> int:
        """The number of row tiles of a tile."""
        return self.tile_m // self.row_tile_height

    @property
    def lines(self) -> bool:
        """For A in two parts: whether the part of a block that a step needs has rows of 128 bytes."""
        return self.parts == 2 and not self.flat and self.depth * BYTES[self.types.a] == 128

    @property
    def stages(self) -> int:
        """The number of pipeline stages: as many as fit into shared memory."""
        if self.parts == 2:
            return 4
        return ({256: 4, 128: 6, 64: 8} if self.tile_m == 128 else {256: 4, 128: 8, 64: 8})[self.tile_n]

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's struct Shared plus its alignment: at most 230,912 of the 232,448 bytes of a CTA."""
        return 1024 + self.stages * 128 * (self.tile_m + self.parts * self.tile_n) + 16 * 2048 + 512

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """A warpgroup has half of the rows, and leaves out what none of them has."""
        p, of, size = problem, rows_of(problem), BYTES[problem.types.a]
        low = "_low" if self.row_tile_height < 64 else ""
        mean = of.union(-(-self.tile_m // p.R))
        own = of.union(-(-self.tile_m // 2 // p.R)) / max(mean, 1e-9) if self.tile_m == 128 and p.R < 128 else 1.0
        kind = "_f" if size == 4 else ""
        products = 3 if self.parts == 2 else 1
        flops = own * self.tile_m * self.tile_n * self.depth * products / x["rate" + low + kind] / 1e3
        read = self.tile_n * self.depth * size * self.parts / x["l2sm"]
        step = overlapped(x["lat" + low], flops, read)
        if low and not self.flat and not self.lines:  # pieces of less than 128 bytes
            step *= x["pieces" + kind]
        elif p.transposed:
            step *= x["T" + low]
        if self.b_transposed and size == 2:
            step *= x["F"]
        chain, _, cut = self.chain(p, card, step, x)
        a, b, c = operand_bytes(p)
        return x["t0"] + (x["cut"] if cut else 0) + overlapped(chain, memory(card, a, b * self.parts, c))

    def group(self, K: int) -> int:
        """Return how many column tiles are processed together, for a B of K rows.

        These are the tiles of one section, or fewer if their panels of B do not fit into 20 MiB of the L2 cache. At
        K = 8192 on an H200, sections of 2048 columns instead of 1024 cost 3-7 %, and sections of 4096 cost 20 %. Where
        not even one panel fits, two share what is read of A: 2.87 instead of 3.10 ms for blocks of 128 x 128 at
        K = 65536 and density 0.02. Row tiles of 64 rows read more of B for each block of A, and lose 8 % by it.
        """
        panel = K * self.tile_n * self.parts * BYTES[self.types.b]
        least = 2 if panel > _PANEL_BYTES and self.row_tile_height == 128 else 1
        return max(least, column_tiles_of(self.section, self.tile_n, panel))

    @property
    def rare(self) -> bool:
        usual = self.depth * BYTES[self.types.a] == 128 if self.row_tile_height >= 64 else self.flat
        narrow = self.tile_n != 256 and self.tile_m == 128 and self.parts == 1
        widened = (self.types.a == "f32") != (self.types.c == "f32")
        return not usual or narrow or widened or self.tail > 0 or self.store is Store.COLUMNS

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        """It reads B by TMA. Only for 16-bit floats can it read operands whose contiguous dimension is not K."""
        names = problem.types
        if problem.arch != "sm_90a" or names.acc != "f32" or not problem.b_order or not tensor_cores_serve(problem):
            return False
        if names.a in ("f16", "bf16"):
            return names.c in (names.a, "f32") and problem.R % 16 == 0 and problem.K % 16 == 0
        straight = not problem.transposed and problem.b_order == "F"
        if names.a == "e4m3":
            return straight and problem.R % 64 == 0 and problem.K % 32 == 0 and names.c in ("f16", "bf16", "f32")
        tf32 = (problem.tf32 or problem.parts == 2) and names.a == names.c == "f32"
        return straight and tf32 and problem.R % 16 == 0 and problem.K % 8 == 0

    @classmethod
    def best(cls, problem: Problem) -> GemmSm90:
        """The constants for a product.

        Row tiles are as high as the block size allows. From 64 rows on, A is not passed through registers. With 128
        rows, a tile has one row tile, so that no block columns of several row tiles have to be merged. A stage of the
        pipeline holds 128 bytes along K. A block whose K is not a multiple of that is processed in equal shorter steps
        if possible, otherwise in full steps and a shorter last one, the tail. Float32 in two parts always passes A
        through registers.
        """
        names, R, K, N = problem.types, problem.R, problem.K, problem.N
        row_tile_height = next(h for h in (128, 64, 32, 16) if R % h == 0 and (problem.parts == 1 or h < 64))
        full = 128 // BYTES[names.a]
        if row_tile_height < 64:
            depth = next(d for d in (full, full // 2, full // 4) if K % d == 0)
            tail = 0
        else:
            steps = (full, 3 * full // 4, full // 2) if names.a in ("f16", "bf16") else (full,)
            depth = K if full > K and names.a in ("f16", "bf16") else next((d for d in steps if K % d == 0), full)
            tail = K % depth
        tile_m, tile_n = 128, 128
        if problem.parts == 1:
            row_tile_height, tile_m, tile_n = tile_shape(problem.block_rows * R, N, problem.batches, row_tile_height)
        pieces = problem.overwrite and names.c in ("f16", "bf16")
        by_tma = {"C": Store.ROWS, "F": Store.COLUMNS}
        store = by_tma.get(problem.c_order, Store.DIRECT) if pieces else Store.DIRECT
        flat = row_tile_height < 64 and (row_tile_height == R if problem.transposed else depth == K)
        wide = problem.b_order == "C" and N % 64 == 0
        return cls(
            names, row_tile_height, tile_n, depth, tail, problem.transposed, problem.b_order == "F", store, wide, flat,
            tile_m=tile_m, parts=problem.parts,
        )  # fmt: skip

    @classmethod
    def variants(cls, problem: Problem) -> Iterator[GemmSm90]:
        best = cls.best(problem)
        yield best
        heights = [h for h in (128, 64) if problem.R % h == 0] or [best.row_tile_height]
        for row_tile_height, tile_n, section in itertools.product(heights, (256, 128, 64), (512, 1024, 2048)):
            other = replace(best, row_tile_height=row_tile_height, tile_n=tile_n, section=section, tile_m=128)
            if other != best and tile_n <= section:
                yield other
        low = (replace(best, row_tile_height=64, tile_n=n, tile_m=64) for n in (256, 128, 64) if heights[-1] == 64)
        yield from (other for other in low if other != best)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[GemmSm90]:
        for dtype in (d for d in dtypes if d in (*HALF_DTYPES, np.dtype(np.float32))):
            yield from cls._of(dtype)
        if np.dtype(np.uint8) in dtypes:
            yield from cls._of_fp8()

    @classmethod
    def _of(cls, dtype: np.dtype[Any]) -> Iterator[GemmSm90]:
        """All layouts for 16-bit floats, only a column-major B for float32 (tf32)."""
        half = dtype in HALF_DTYPES
        name = element(dtype)
        results = ((name, Store.ROWS), (name, Store.COLUMNS), (name, Store.DIRECT)) if half else ()
        for c, store in (*results, ("f32", Store.DIRECT)):
            names = Types(name, name, c, "f32")
            for row_tile_height, tile_n, a_transposed, b_transposed in itertools.product(
                (128, 64, 32, 16), (256, 128, 64), (False, True), (False, True)
            ):
                if half and row_tile_height < 64:
                    steps = [(64, 0), (32, 0), (16, 0)]
                elif half:
                    steps = [(64, 0), (48, 0), (32, 0), (16, 0), (64, 16), (64, 32), (64, 48)]
                elif a_transposed or not b_transposed:
                    continue
                elif row_tile_height < 64:
                    steps = [(32, 0), (16, 0), (8, 0)]
                else:
                    steps = [(32, tail) for tail in (0, 8, 16, 24)]
                for depth, tail in steps:
                    for wide, flat in itertools.product((False, True), (False, True)):
                        if (wide and b_transposed) or (flat and row_tile_height >= 64):
                            continue
                        config = cls(
                            names, row_tile_height, tile_n, depth, tail, a_transposed, b_transposed, store, wide, flat
                        )  # fmt: skip
                        yield config
                        if row_tile_height == 64:
                            yield replace(config, tile_m=64)
                        if not half and row_tile_height < 64 and tile_n == 128:
                            yield replace(config, parts=2)

    @classmethod
    def _of_fp8(cls) -> Iterator[GemmSm90]:
        """Those of fp8, which a user requests by `scale_a` and `scale_b` and not by a dtype."""
        for c in ("f16", "bf16", "f32"):
            names = Types("e4m3", "e4m3", c, "f32")
            for store, row_tile_height, tile_n, tail in itertools.product(
                Store if c != "f32" else (Store.DIRECT,), (128, 64), (256, 128, 64), (0, 32, 64, 96)
            ):
                config = cls(names, row_tile_height, tile_n, 128, tail, False, True, store, False, False)
                yield config
                if row_tile_height == 64:
                    yield replace(config, tile_m=64)

    def block_map(self, call: Kind) -> Layout | None:
        """For row tiles of fewer than 64 rows, the blocks are lines of 128 bytes if `flat`; otherwise there is none."""
        data, height = call.blocks, self.row_tile_height
        blocks, rows, cols = data.shape
        dims, strides, box = (cols, blocks * rows), (cols * data.itemsize,), (128 // data.itemsize, height)
        if height < 64 and not self.lines:
            if not self.flat:
                return None
            line = 128 // data.itemsize
            dims, strides, box = (line, blocks * rows * cols // line), (128,), (line, height * self.depth // line)
        elif self.a_transposed:
            box = (64, self.depth)
        return Layout(tensor_map.dtype_name(data.dtype), dims, strides, box, "128B")

    def operand_maps(self, call: Kind) -> tuple[Layout | None, Layout | None]:
        B, out = call.B, call.out
        if self.b_transposed:
            row = B.itemsize * self.depth if self.row_tile_height < 64 else 128
            box = (row // B.itemsize, self.tile_n, self.parts)
            found = matrix_map(B, True, box, f"{row}B", parts=self.parts)
        else:
            found = matrix_map(B, False, (64, self.depth, self.tile_n // 64 if self.wide else 1), "128B", self.wide)
        if self.store is Store.ROWS:
            return found, matrix_map(out, False, (64, 16, 1), "128B")
        if self.store is Store.COLUMNS:
            return found, matrix_map(out, True, (16, 64, 1), "32B")
        return found, None
