"""What the kernels of ``A @ B`` have in common: the parts of a launch, lists of row tiles, and predicted times.

Comments here use NVIDIA's words: a CTA is a thread block, a lane is a thread of a warp. A row tile is a part of a block
row: a block row is cut into row tiles of equal height, and one tile of a tensor-core kernel covers a few of them.
"CUDA cores" are the ordinary cores of a GPU, as opposed to its tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .._kernels import element_types, tensor_map
from .._kernels.card import Card, tensor_arch
from .._kernels.kernel import Kernel
from .._kernels.launch import Launch, Map, Scratch, address
from .._kernels.structs import TENSOR_MAP_BYTES, Struct
from .._kernels.tensor_map import Layout
from . import arguments
from .call import Problem
from .operand import Kind
from .work_list import Groups, Items

#: Fields of `Product` that point to the operands and describe how they lie, and fields of `Schedule` that point to
#: temporary memory.
_OPERANDS = ("b", "c")
_STRIDES = ("b_row", "b_col", "b_batch", "c_row", "c_col", "c_batch")
SCRATCH = ("counters", "partial", "arrived")
#: Products with fewer columns than the first number run on the CUDA cores, unless A has at least as many elements as
#: the second number. A product with one vector always runs on the CUDA cores.
_TENSOR_COLUMNS, _LARGE = 16, 1 << 20
#: The number of block rows that warps may look at after the last one: three steps of the largest grid.
_ROWS_AHEAD = 2**20


class Dense(Kernel):
    """A kernel of ``A @ B``, whose argument is a `Product` or has one in it."""

    #: whether it reads blocks whose lines are longer than a block (`Problem.line`)
    reads_lines = False
    #: the numbers of `seconds`
    costs: ClassVar[dict[str, float]] = {}

    @classmethod
    def reads(cls, problem: Problem) -> bool:
        """Whether it can compute a product whose blocks may be a copy with longer lines."""
        return (cls.reads_lines or not problem.line) and cls.serves(problem)

    def seconds(self, problem: Problem, card: Card) -> float:
        """What a product will take from the call of the kernel to the next one on the stream."""
        return 1e-6 * self.microseconds(problem, card, self.costs)

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """The same in microseconds, with the numbers of `costs`."""
        raise NotImplementedError(f"{type(self).__name__} predicts no time")

    def fields_of(self, call: Kind, index: Sequence[Any] = (None, None, None)) -> dict[str, Any]:
        """The fields of `Product`, with zeros for what differs between calls of this kind."""
        p, steps = call.problem, []
        for x in (call.B, call.out):
            steps += [n // x.itemsize for n in (x.strides[-2], x.strides[-1], x.strides[0] if p.batches > 1 else 0)]
        return {
            **dict.fromkeys(("alpha", "beta", *_OPERANDS), 0),
            **dict(zip(_STRIDES, steps, strict=True)),
            **dict(zip(("indices", "indptr", "places"), (address(x) for x in index), strict=True)),
            "data": call.operand.pointer,
            "block_rows": p.block_rows,
            "block_cols": p.block_cols,
            "blocks": p.blocks,
            "N": p.N,
            "batches": p.batches,
            "R": p.R,
            "K": p.K,
            "read_c": not p.overwrite,
        }

    @staticmethod
    def _pointers(layout: Struct, inner: str, copied: bool) -> Callable[..., None]:
        """What writes the addresses of B and the result, and that of A's blocks if these are copied."""
        write = layout.patch(*(inner + name for name in _OPERANDS)).write
        if not copied:
            return write
        write_data = layout.patch(inner + "data").write

        def write_all(to: Any, b: int, c: int, data: int) -> None:
            write(to, b, c)
            write_data(to, data)

        return write_all

    def launch(
        self,
        call: Kind,
        grid: tuple[int, ...],
        index: Sequence[Any] = (None, None, None),
        *,
        more: dict[str, Any] | None = None,
        behind: bytes = b"",
        maps: Sequence[Map] = (),
        scratch: Scratch | None = None,
        holds: Any = (),
    ) -> Launch:
        """The launch for a kind of product; `more` are fields beside `Product`, and `behind` is a second argument."""
        layout = self.structs[0]
        inner = "" if layout.name == "Product" else "product."
        packed = self.fields_of(call, index)
        if inner:
            packed = {"product": arguments.product(self.acc).pack(**packed), **(more or {})}
        template = bytes(layout.pack(**packed))
        factors, number = layout.patch(inner + "alpha", inner + "beta"), element_types.number(self.acc)
        return Launch(
            self,
            grid,
            template + behind,
            pointers=self._pointers(layout, inner, call.copied),
            numbers=lambda to, alpha, beta: factors.write(to, *_words(number, alpha, beta)),
            maps=maps,
            scratch=scratch,
            holds=(call.operand.arrays, index, holds),
        )


class Preparation(Dense):
    """A kernel that prepares an operand for another one. It is not compiled itself, and no variant of it is tried."""

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Any]:
        yield from ()


@dataclass(frozen=True)
class Holder(Preparation):
    """A preparation that holds the kernel, or another preparation, which computes what is prepared."""

    kernel: Any

    def inner(self, problem: Problem) -> Problem:
        """The product that the kernel computes."""
        raise NotImplementedError

    def around(self, problem: Problem, inner: Problem, card: Card) -> float:
        """Seconds of what is done before and after it."""
        raise NotImplementedError

    def seconds(self, problem: Problem, card: Card) -> float:
        inner = self.inner(problem)
        found: float = self.kernel.seconds(inner, card) + self.around(problem, inner, card)
        return found


class ByRows(Dense):
    """A kernel without a work list, which reads the index arrays of the matrix or of its transpose."""

    def grid(self, problem: Problem, card: Card) -> tuple[int, ...]:
        """The CTAs for a product."""
        raise NotImplementedError

    def prepare(self, call: Kind, card: Card) -> Launch:
        index = call.operand.index(call.stored_columns, call.problem.transposed)
        return self.launch(call, self.grid(call.problem, card), index)


class Tiled(Dense):
    """A kernel that takes groups of row tiles from a work list."""

    row_tile_height: Any
    row_tiles: Any
    tile_n: Any

    def shape_of_groups(self, call: Kind) -> tuple[int, int]:
        """Row tiles of a block row, and of a group."""
        return -(-call.problem.R // self.row_tile_height), self.row_tiles

    def column_tiles(self, problem: Problem) -> int:
        """Tiles of columns of all batches."""
        return -(-problem.N // self.tile_n) * problem.batches


def schedule(groups: Groups, items: Items) -> bytearray:
    """Return the packed work list of a launch, without temporary memory."""
    lists = (items.items, items.splits, items.count, groups.columns, groups.blocks, groups.row_tiles)
    names = ("items", "splits", "count", "columns", "blocks", "row_tiles")
    pointers = {name: x.data.ptr for name, x in zip(names, lists, strict=True)}
    return arguments.SCHEDULE.pack(**pointers, **dict.fromkeys(SCRATCH, 0))


def map_at(number: int, layout: Layout | None) -> tuple[Map, ...]:
    """The map of operand `number`, B or the result, behind that of A; none if TMA does not touch the operand."""
    return () if layout is None else (Map(number, (number + 1) * TENSOR_MAP_BYTES, layout),)


def matrix_map(
    x: Any, columns: bool, box: tuple[int, int, int], swizzle: str, slabs: bool = False, parts: int = 1
) -> Layout:
    """Return the tensor map, in four dimensions, of a batch of row-major or column-major matrices.

    With `slabs`, a row-major matrix is divided into slabs of 64 columns, so that one copy can bring several of them.
    With two `parts`, the second part of a column-major matrix lies behind the first, and one copy brings both.
    """
    rows, cols = x.shape[-2:]
    dims, pitch = ((rows, cols), x.strides[-1]) if columns else ((cols, rows), x.strides[-2])
    count, slab_pitch = 1, pitch
    if slabs:
        dims, count, slab_pitch = (64, rows), cols // 64, 64 * x.itemsize
    elif parts == 2:
        count, slab_pitch = 2, cols * pitch
    batches, batch_pitch = (x.shape[0], x.strides[0]) if x.ndim == 3 and x.shape[0] > 1 else (1, pitch)
    pitches = (pitch, slab_pitch, batch_pitch)
    return Layout(tensor_map.dtype_name(x.dtype), (*dims, count, batches), pitches, (*box, 1), swizzle)


def tensor_cores_serve(problem: Problem) -> bool:
    """Return whether the sizes of a product suit the tensor-core kernels.

    They number entries of work lists and tiles with 31 bits. Few columns of a small matrix are left to the CUDA cores.
    """
    rows, cols = problem.block_rows * problem.R, problem.block_cols * problem.K
    fewest = 2 if problem.blocks * problem.R * problem.K >= _LARGE else _TENSOR_COLUMNS
    row_tiles = problem.blocks * -(-problem.R // 16)
    return (
        problem.aligned
        and problem.types.a == problem.types.b
        and fewest <= problem.N
        and 0 < row_tiles < 2**28
        and max(rows, cols, problem.blocks * problem.R, problem.blocks * problem.K) < 2**31
        and (rows // 16 + 1) * (problem.N // 64 + 1) * problem.batches < 2**31
    )


def copied_in_pieces(problem: Problem) -> bool:
    """Return whether blocks can be copied to shared memory in pieces of 16 bytes, and B and C be accessed likewise."""
    return (
        tensor_arch(problem.arch)
        and (problem.types.of_one("f32") or problem.types.of_one("f64"))
        and problem.aligned
        and not problem.transposed
        and problem.b_order == problem.c_order == "C"
        and max(problem.block_rows + _ROWS_AHEAD, problem.block_cols) < 2**31
    )


def ceil_power_of_two(n: int, most: int) -> int:
    return min(most, 1 << (max(1, n) - 1).bit_length())


def floor_power_of_two(n: int, most: int) -> int:
    return 1 << (max(1, min(n, most)).bit_length() - 1)


def _words(number: np.dtype[Any], alpha: Any, beta: Any) -> tuple[Any, ...]:
    """Return the numbers that are packed for alpha and beta; negative integers wrap around as sums do."""
    kind = number.kind
    if kind == "f":
        return alpha, beta
    if kind == "c":
        return alpha.real, alpha.imag, beta.real, beta.imag
    if kind == "u":
        wrap = 1 << 8 * number.itemsize
        return int(alpha) % wrap, int(beta) % wrap
    return bool(alpha), bool(beta)
