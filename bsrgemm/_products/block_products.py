"""Kernels whose result is a list of blocks, and their predicted times; `pairs` and `sampled` launch them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import tensor_map
from .._kernels.card import Card, card, tensor_arch
from .._kernels.element_types import CUDA_NAMES, Types, element
from .._kernels.jit import MAX_GRID_X, MAX_GRID_YZ
from .._kernels.kernel import Kernel
from .._kernels.launch import Chain, Launch, Map, Scratch
from .._kernels.rearrange import LINE
from .._kernels.structs import TENSOR_MAP_BYTES
from .._kernels.tensor_map import Layout
from ..dtypes import HALF_DTYPES
from . import reals
from .arguments import BLOCK_PRODUCTS_SM80, BLOCK_PRODUCTS_SM90
from .costs import H200
from .dense import address, ceil_power_of_two
from .gemm_simt import INDEX, names_of
from .gemm_sm80 import MMA
from .gemm_sm90 import WGMMA
from .lists import SampledTiles

#: The kernels number tiles, rows and columns with 31 bits, so there must be fewer of each than this.
MOST = 2**31
#: Tiles of which the Hopper kernel has fewer: its CTAs count on when there are none left.
_COUNTED_BEYOND = 2**20
#: Blocks whose sides are at most this have their sizes compiled into spgemm_simt, and sizes (R, K, N) that are listed.
_COMPILED_SIDE = 10
_PAIRED = ((1, 1, 1), (2, 2, 2), (2, 2, 3), (3, 2, 3), (3, 3, 3), (6, 3, 6), (6, 6, 6), (10, 10, 10))
#: By the number of rows of a block, the least part of all blocks that must be stored for tiles of a list. On an H200 a
#: random pattern of so many blocks took as long with tiles of one block row; patterns with similar rows gain more.
_LEAST_DENSITY = {64: 0.06, 32: 0.02, 16: 0.02}
_SIDES = (16, 32, 64, 128)
#: The orders in which the operands of a sampled product can be read.
_ORDERS = tuple(itertools.product("CF", "CF"))
#: The least number of stored elements. Fewer make too few tiles for all multiprocessors.
_LEAST_ELEMENTS = 1 << 19
#: By the number of rows of a block, the least number of columns of X.
_LEAST_DEPTH = {64: 512, 32: 64, 16: 64}
#: By the number of block rows of a tile of a list, the part of its blocks that is stored, in a random pattern.
_FILLED = {2: 0.8, 4: 0.5, 8: 0.33}
#: Of a multiprocessor of an H200: bytes of a cycle from the L2, and cycles for each line of at most 128 bytes that TMA
#: writes to shared memory. A step of 48 KB took 1,140 cycles in 320 lines of 128 bytes, 1,600 in 576 of 64, and 3,900
#: in 1,088 of 32.
_L2_BYTES, _LINE_CYCLES = 36, 3
#: Multiplications a second on the CUDA cores of an H200: of a block, which one CTA computes, and of all; by the bytes
#: of complex numbers, 0 for all others.
_SIMT = {0: (2.3e9, 1.8e12), 8: (2.4e9, 1.5e12), 16: (2.0e9, 7e11)}
#: Seconds of launches on the tensor cores and on the CUDA cores; nanoseconds from the start of a CTA to the next one.
_LAUNCH, _SIMT_LAUNCH, _CTA = 3e-6, 1e-5, 2.4
#: Seconds more of a sampled product on the CUDA cores, whose operands are copied first, and the share of the rate for a
#: block of one element, which grows with the side of a block.
_GATHERED, _ELEMENT_SHARE = 1e-5, 0.12


@dataclass(frozen=True)
class BlockProblem:
    """The properties that decide the kernel for result blocks of R x N, each a sum of products of R x K and K x N."""

    arch: str
    a: np.dtype[Any]
    b: np.dtype[Any]
    out: np.dtype[Any]
    R: int
    K: int
    N: int
    #: the order of the dense right-hand side of a sampled product, "C" or "F"; None for ``BSR @ BSR``
    order: str | None = None
    #: for float32: whether factors may be rounded to tf32
    tf32: bool = False
    #: the order of the dense left-hand side of a sampled product
    x_order: str = "C"

    @property
    def real(self) -> BlockProblem:
        """A product of complex blocks as one of real blocks (see `reals`); any other as it is."""
        if self.a not in reals.REALS or not self.a == self.b == self.out:
            return self
        dtype = reals.REALS[self.a]
        return replace(self, a=dtype, b=dtype, out=dtype, K=2 * self.K, N=2 * self.N)

    @property
    def fitting(self) -> BlockProblem:
        """The product of blocks with zeros at their ends, so that tensor cores can read them.

        >>> half = np.dtype(np.float16)
        >>> padded = BlockProblem("sm_80", half, half, half, 100, 3, 17).fitting
        >>> padded.R, padded.K, padded.N
        (112, 8, 32)
        """
        piece = max(1, LINE // self.a.itemsize)
        R, K, N = (-(-side // to) * to for side, to in ((self.R, 16), (self.K, piece), (self.N, 16)))
        return replace(self, R=R, K=K, N=N)


@dataclass(slots=True)
class Lists:
    """The pairs of blocks that are multiplied, and the number of blocks."""

    #: index of the left block of each pair; None in a sampled product, where the block row determines it; tiles of a
    #: list
    left: Array | None
    #: index of the right block of each pair
    right: Array
    #: index of the first pair of each block of the result; in a sampled product, of each block row; the number of
    #: tiles of a list
    starts: Array
    #: number of blocks of the result, of pairs (or tiles), of blocks of the left and of blocks of the right operand
    counts: tuple[int, int, int, int]

    def fields(self) -> dict[str, int]:
        """Return the fields of the kernel argument that both kernels have in common."""
        names = ("blocks", "pairs", "a_blocks", "b_blocks")
        pointers = {"left": address(self.left), "right": address(self.right), "starts": address(self.starts)}
        return pointers | dict(zip(names, self.counts, strict=True))


@dataclass(frozen=True)
class BlockProductsSm90(
    Kernel,
    source="block_products_sm90.cu",
    argument=BLOCK_PRODUCTS_SM90,
    needs="sm_90a",
    types="a c index",
    derived="mma_type mma_k stages",
):
    """The blocks of a product of 16-bit floats on Hopper's tensor cores.

    The product is ``BSR @ BSR`` or, if `sampled`, the product of two dense matrices at the blocks of a pattern.
    """

    types: Types
    sampled: bool
    #: whether K is the contiguous dimension of B
    b_transposed: bool
    tile_m: int
    part_n: int
    #: number of parts of `part_n` columns of a tile; in a sampled product they are neighbours in a block row
    parts: int
    #: number of block rows of a tile of a list (`SampledTiles`), or 0 if there is none
    row_parts: int = 0
    #: whether rows are the contiguous dimension of A, in a sampled product
    a_transposed: bool = False

    threads = 384
    #: multiplications of a multiprocessor in a nanosecond, nanoseconds of a step at least, and of a step by itself
    costs: ClassVar = {"WGMMA": (2200.0, 300.0, 600.0)}

    @property
    def mma_type(self) -> str:
        """The name of the element in the wgmma instruction."""
        return WGMMA[self.types.a][0]

    @property
    def mma_k(self) -> int:
        """How many elements an instruction takes along K."""
        return WGMMA[self.types.a][1]

    @property
    def tile_n(self) -> int:
        return self.part_n * self.parts

    @property
    def part_m(self) -> int:
        """The number of rows of a tile that are neighbours in X."""
        return self.tile_m // max(1, self.row_parts)

    @property
    def stages(self) -> int:
        """The number of pipeline stages: as many as fit into 200 KiB of shared memory."""
        return (200 << 10) // (128 * (self.tile_m + self.tile_n))

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's struct Shared plus its alignment, in bytes."""
        return self.stages * 128 * (self.tile_m + self.tile_n) + (16 << 10) + 1024

    @classmethod
    def of(cls, problem: BlockProblem) -> BlockProductsSm90 | None:
        """The constants for a problem, or None if it cannot compute it.

        Tiles are as high as the block size allows. In a sampled product, a tile covers neighbouring blocks of a block
        row, 256 columns in all, since they share what is read of X.
        """
        a, order, N = problem.a, problem.order, problem.N
        name, out = CUDA_NAMES[a], CUDA_NAMES[problem.out]
        if problem.arch != "sm_90a" or a != problem.b or a not in HALF_DTYPES or out not in (name, "f32"):
            return None
        if problem.R % 16 or N % 16 or problem.K % 8 or not problem.K:
            return None
        names = Types(name, name, out, "f32", "i64")
        tile_m = 128 if problem.R % 128 == 0 else 64
        if order is None:
            return cls(names, False, False, tile_m, 128 if N % 128 == 0 else 64, 1)
        part_n = next(n for n in (128, 64, 32, 16) if N % n == 0)
        return cls(names, True, order == "F", tile_m, part_n, 256 // part_n, a_transposed=problem.x_order == "F")

    @classmethod
    def serves(cls, problem: BlockProblem) -> bool:
        return cls.of(problem) is not None

    def by_list(self, problem: BlockProblem, blocks: int, shape: tuple[int, int]) -> BlockProductsSm90 | None:
        """The kernel that takes its tiles from a list, or None where tiles of one block row are as good.

        `shape` is the number of block rows and block columns of the pattern.
        """
        R, N = problem.R, problem.N
        if (
            R not in _LEAST_DENSITY
            or N not in _SIDES
            or -(-shape[1] // SampledTiles(128 // R, 256 // N).columns) > MAX_GRID_YZ
        ):
            return None
        if blocks * R * N < _LEAST_ELEMENTS or _LEAST_DEPTH[R] > problem.K:
            return None
        if blocks < _LEAST_DENSITY[R] * shape[0] * shape[1]:
            return None
        return replace(self.indexed("i32"), tile_m=128, row_parts=128 // R)

    def indexed(self, index: str) -> BlockProductsSm90:
        """The same kernel for lists of another type."""
        return replace(self, types=replace(self.types, index=index))

    def sampled_seconds(self, problem: BlockProblem, blocks: int, shape: tuple[int, int], card: Card) -> float:
        """What a sampled product will take: the bytes of each step from the L2, or the lines that TMA writes."""
        kernel = self.by_list(problem, blocks, shape) or self
        whole = kernel.row_parts * kernel.parts * _FILLED[kernel.row_parts] if kernel.row_parts else kernel.parts
        tiles = blocks * -(-problem.N // kernel.part_n) / whole * -(-problem.R // kernel.tile_m)
        lines = 0
        for side, part, across in (
            (kernel.tile_m, kernel.part_m, kernel.a_transposed),
            (kernel.tile_n, kernel.part_n, not kernel.b_transposed),
        ):
            lines += 64 * side // min(64, part) if across else side
        cycles = max(128 * (kernel.tile_m + kernel.tile_n) / _L2_BYTES, lines * _LINE_CYCLES)
        return tiles * -(-problem.K // 64) * cycles / (card.multiprocessors * card.clock)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BlockProductsSm90]:
        """Sampled products can have either index type."""
        for dtype in (d for d in dtypes if d in HALF_DTYPES):
            for out, R, N, (x_order, order) in itertools.product(
                (dtype, np.dtype(np.float32)), (64, 128), _SIDES, (("C", None), *_ORDERS)
            ):
                found = cls.of(BlockProblem("sm_90a", dtype, dtype, out, R, 64, N, order, x_order=x_order))
                if found is not None and (order is not None or N >= 64):
                    yield found
                    if order is not None:
                        yield found.indexed("i32")
                        lists_of = replace(found.indexed("i32"), tile_m=128)
                        yield from (replace(lists_of, row_parts=n) for n in (2, 4, 8) if R == 64)

    def launch(self, layouts: tuple[Layout, Layout], out: tuple[int, int, int], found: Lists, K: int) -> Launch | None:
        """The launch for operands of these tensor maps, or None if there are too many tiles; `out` is a shape."""
        blocks, R, N = out
        heights, parts = -(-R // self.tile_m), blocks * -(-N // self.part_n)
        tiles = heights * parts
        if tiles + heights * found.counts[2] >= MOST - _COUNTED_BEYOND:
            return None
        ctas = min(tiles, card().multiprocessors)
        # The kernel starts with so many wide tiles that every CTA computes the same number; the rest are narrow.
        narrow = tiles // (self.parts * ctas) * ctas // heights * self.parts
        empty = bytes(TENSOR_MAP_BYTES)
        packed = BLOCK_PRODUCTS_SM90.pack(
            a=empty, b=empty, out=0, counters=0, R=R, N=N, K=K, narrow=narrow, row_blocks=0, **found.fields()
        )
        write_counters = BLOCK_PRODUCTS_SM90.patch("counters").write
        write_numbers = BLOCK_PRODUCTS_SM90.patch("blocks", "pairs").write
        write_row_blocks = BLOCK_PRODUCTS_SM90.patch("row_blocks").write
        write_out = BLOCK_PRODUCTS_SM90.patch("out").write

        def numbers(to: Any, *given: int) -> None:
            """Numbers of blocks, pairs and blocks of a row, of a product whose lists were not there yet."""
            if given:
                write_numbers(to, *given[:2])
                write_row_blocks(to, given[2])

        return Launch(
            self.indexed(element(found.right.dtype)),
            (ctas,),
            packed,
            pointers=lambda to, a, b, result: write_out(to, result),
            numbers=numbers,
            maps=[Map(n, n * TENSOR_MAP_BYTES, layout) for n, layout in enumerate(layouts)],
            scratch=Scratch(0, 2, lambda to, memory, zeros: write_counters(to, zeros)),
            holds=(found,),
        )


@dataclass(frozen=True)
class BlockProductsSm80(
    Kernel,
    source="block_products_sm80.cu",
    argument=BLOCK_PRODUCTS_SM80,
    needs="sm_80",
    types="a c acc index",
    derived="row_tiles warps_m threads stages",
):
    """The same products as `BlockProductsSm90`, on the tensor cores of any card since Ampere.

    A CTA computes a tile of `tile_m` x `tile_n`.
    """

    types: Types
    #: how elements are multiplied, as in `GemmSm80`
    mma: str
    sampled: bool
    #: whether K is the contiguous dimension of B
    b_transposed: bool
    row_tile_height: int
    tile_n: int
    #: number of columns of a tile that belong to the same block
    part_n: int
    #: whether rows are the contiguous dimension of A, in a sampled product
    a_transposed: bool = False

    row_tiles = 1
    #: as those of `BlockProductsSm90`, by how elements are multiplied
    costs: ClassVar = {
        "MMA_F16": (1370.0, 80.0, 620.0), "MMA_BF16": (1370.0, 80.0, 620.0), "MMA_TF32": (604.0, 80.0, 860.0),
        "MMA_3XTF32": (140.0, 100.0, 790.0), "MMA_F64": (179.0, 80.0, 560.0),
    }  # fmt: skip

    @property
    def tile_m(self) -> int:
        return self.row_tile_height

    @property
    def warps_m(self) -> int:
        """The number of warps along the rows of a tile; each computes up to 64 x 32 elements."""
        return -(-self.tile_m // 64)

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * (self.tile_n // 32)

    @property
    def stages(self) -> int:
        return 3 if self.tile_m + self.tile_n > 192 else 4

    @property
    def shared_bytes(self) -> int:
        """An upper bound of the size of the kernel's struct Shared, in bytes."""
        return self.stages * 128 * (self.tile_m + self.tile_n) + 1024

    @classmethod
    def of(cls, problem: BlockProblem) -> BlockProductsSm80 | None:
        """The constants for a problem, or None if it cannot compute it.

        It multiplies all float types. A product of float32 numbers is computed as three products of tf32 numbers, which
        keep the accuracy of float32, or as one if the caller allows tf32. A column-major X needs lines of 128 bytes of
        a tile.
        """
        a, R, N = problem.a, problem.R, problem.N
        name, to = CUDA_NAMES[a], CUDA_NAMES[problem.out]
        if not tensor_arch(problem.arch) or a != problem.b or name not in MMA or name == "i8":
            return None
        if to not in (name, "f32") or (name == "f64" and to != "f64"):
            return None
        if R % 16 or N % 16 or problem.K * a.itemsize % 16 or not problem.K:
            return None
        mma = "MMA_TF32" if name == "f32" and problem.tf32 else MMA[name][0]
        names = Types(name, name, to, "f64" if name == "f64" else "f32", "i64")
        tile_m, part_n = (next(n for n in (128, 64, 32, 16) if side % n == 0) for side in (R, N))
        if problem.order is not None:
            a_transposed = problem.x_order == "F"
            if a_transposed and tile_m * a.itemsize < 128:
                return None
            return cls(names, mma, True, problem.order == "F", tile_m, 128, part_n, a_transposed)
        tile_n = max(part_n, 32, 128 // a.itemsize)
        return cls(names, mma, False, False, tile_m, tile_n, tile_n)

    @classmethod
    def serves(cls, problem: BlockProblem) -> bool:
        return cls.of(problem) is not None

    def indexed(self, index: str) -> BlockProductsSm80:
        """The same kernel for lists of another type."""
        return replace(self, types=replace(self.types, index=index))

    def sampled_seconds(self, problem: BlockProblem, blocks: int, shape: tuple[int, int], card: Card) -> float:
        """Steps of 128 bytes along K of all tiles; the same for all orders of the operands."""
        rate, least, alone = self.costs[self.mma]
        tiles = blocks * -(-problem.N // self.part_n) / (self.tile_n // self.part_n) * (problem.R // self.tile_m)
        depth, wide = -(-problem.K * problem.a.itemsize // 128), min(problem.K, 128 // problem.a.itemsize)
        step = max(least, self.tile_m * self.tile_n * wide / rate)
        ctas = blocks * -(-problem.N // self.part_n) * (problem.R // self.tile_m)
        spread = tiles * (depth * step + alone / 2) / card.multiprocessors + ctas * _CTA
        return _LAUNCH + 1e-9 * max(depth * max(step, alone), spread) * H200.clock / card.clock

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BlockProductsSm80]:
        for dtype in (d for d in dtypes if element(d) in MMA):
            for R, N, (x_order, order) in itertools.product(_SIDES, _SIDES, (("C", None), *_ORDERS)):
                for tf32 in (False, True) if dtype == np.float32 else (False,):
                    found = cls.of(BlockProblem("sm_80", dtype, dtype, dtype, R, 64, N, order, tf32, x_order))
                    if found is not None:
                        yield found if order is None else found.indexed("i32")

    def launch(self, steps: tuple[int, ...], out: tuple[int, int, int], found: Lists, K: int) -> Launch | None:
        """The launch for operands whose lines and blocks lie so many elements apart, or None for too many tiles."""
        blocks, R, N = out
        tiles = blocks * (R // self.tile_m) * -(-N // self.part_n)
        if tiles >= MOST:
            return None
        named = dict(zip(("a_line", "b_line", "a_block", "b_block"), steps, strict=True))
        packed = BLOCK_PRODUCTS_SM80.pack(a=0, b=0, out=0, R=R, N=N, K=K, **named, **found.fields())
        kernel = self.indexed(element(found.right.dtype))
        write, write_numbers = (BLOCK_PRODUCTS_SM80.patch(*x).write for x in (("a", "b", "out"), ("blocks", "pairs")))

        def numbers(to: Any, *given: int) -> None:
            """As those of `BlockProductsSm90`."""
            if given:
                write_numbers(to, *given[:2])

        return Launch(kernel, (tiles,), packed, pointers=write, numbers=numbers, holds=(found,))


@dataclass(frozen=True)
class SpgemmSimt(Kernel, source="spgemm_simt.cu"):
    """The numeric phase of ``BSR @ BSR`` on the CUDA cores; `lanes` threads share a block of the result."""

    types: Types
    lanes: int
    #: sizes of small blocks, which are compiled in; zeros if the kernel takes the sizes as arguments
    block_r: int = 0
    block_k: int = 0
    block_n: int = 0

    threads = 128

    @classmethod
    def of(cls, names: Types, R: int, K: int, N: int) -> SpgemmSimt:
        """A block has as many threads as elements, up to the 128 threads of a CTA."""
        if max(R, K, N) <= _COMPILED_SIDE:
            return cls(names, R * N, R, K, N)
        return cls(names, ceil_power_of_two(R * N, 128))

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[SpgemmSimt]:
        for dtype, index in itertools.product(dtypes, INDEX):
            names = names_of(dtype, index)
            yield from (cls(names, 1 << n) for n in range(8))
            yield from (cls.of(names, *block) for block in _PAIRED)

    def grid(self, segments: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-segments // (self.threads // self.lanes))),)


#: The ways to compute blocks of which one can be forced: of all pairs of filled factors, on the tensor cores by
#: themselves, and on the CUDA cores.
WAYS = ("SparseDense", "SampledDense", "BlockProducts", "SpgemmSimt")
#: The kernels whose result is a list of blocks.
BLOCKS: tuple[type[Kernel], ...] = (BlockProductsSm90, BlockProductsSm80, SpgemmSimt)


# -------------------------------------------------------------------------------------------------- what is chosen
def is_preferred(way: str, faster: bool) -> bool:
    """Whether blocks are computed in this way (see `WAYS`): the forced one, or else one that should be faster."""
    return Kernel.forced == way if Kernel.forced in WAYS else faster


def tensor_seconds(problem: BlockProblem, pairs: float, blocks: int, card: Card) -> float:
    """Steps of 128 bytes along K of all tiles of so many pairs, on the tensor cores; `problem` is one that fits."""
    kernel: Any = BlockProductsSm90.of(problem) or BlockProductsSm80.of(problem)
    rate, least, alone = kernel.costs[getattr(kernel, "mma", "WGMMA")]
    wide = kernel.part_n if isinstance(kernel, BlockProductsSm90) else kernel.tile_n
    tiles = -(-problem.R // kernel.tile_m) * -(-problem.N // wide)
    depth = -(-problem.K * problem.a.itemsize // 128)
    step = max(least, kernel.tile_m * wide * min(problem.K, 128 // problem.a.itemsize) / rate)
    chain = longest(pairs, blocks) * depth * max(step, alone)
    spread = pairs * tiles * depth * step / card.multiprocessors
    return _LAUNCH + 1e-9 * max(chain, spread) * H200.clock / card.clock


def simt_seconds(problem: BlockProblem, pairs: float, blocks: int, card: Card) -> float:
    """What so many pairs take on the CUDA cores: those of a block, which one CTA computes, or all of them."""
    each, rates = problem.R * problem.K * problem.N, _SIMT[problem.a.itemsize if problem.a.kind == "c" else 0]
    scale = card.multiprocessors / H200.multiprocessors
    seconds = max(longest(pairs, blocks) * each / rates[0], pairs * each / rates[1] / scale)
    return _SIMT_LAUNCH + seconds * H200.clock / card.clock


def sampled_simt_seconds(problem: BlockProblem, blocks: int, card: Card) -> float:
    """What a sampled product takes on the CUDA cores: small blocks use little of what they load."""
    share = min(1.0, _ELEMENT_SHARE * math.sqrt(problem.R * problem.N))
    return _GATHERED + simt_seconds(problem, blocks / share, round(blocks / share), card)


def longest(pairs: float, blocks: int) -> float:
    """The pairs of the block that has most, if they lie at random.

    >>> longest(10, 10), round(longest(1000, 100))
    (1.0, 20)
    """
    mean = max(1.0, pairs / max(1, blocks))
    return mean if mean == 1 else min(pairs, mean + math.sqrt(2 * mean * math.log(max(1, blocks))))


def started(
    launch: Launch | Chain, operands: tuple[Array, Array], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    out = cupy.empty(shape, dtype)
    launch.start((*operands, out))
    return out


def matrix_map(
    dtype: np.dtype[Any], dims: tuple[int, int, int], pitches: tuple[int, int], box: tuple[int, int]
) -> Layout:
    """Return the tensor map of a stack of matrices, fastest dimension first; a line of the box is a swizzled row."""
    strides = tuple(p * dtype.itemsize for p in (*pitches, pitches[-1]))
    return Layout(tensor_map.dtype_name(dtype), (*dims, 1), strides, (*box, 1, 1), f"{box[0] * dtype.itemsize}B")
