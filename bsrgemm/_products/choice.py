"""The kernels of ``A @ B``, and the rule that chooses one: a pure function, without device or arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .call import Problem
from .dense import Dense, copied_in_pieces
from .gemm_simt import GemmFew, GemmSimt, Spmv
from .gemm_sm80 import GemmSm80
from .gemm_sm90 import FEW_TILES, GemmSm90
from .spmm import Spmm, SpmmF64
from .spmv_small import MOST_SMALL, SpmvSmall
from .swap_ab_sm90 import GemmTurnedSm90

#: The kernels of ``A @ B`` that are compiled. prepared.py has those that copy an operand for one of them.
DENSE: tuple[type[Dense], ...] = (
    *(GemmFew, GemmTurnedSm90, GemmSm90, GemmSm80, SpmmF64, SpmvSmall, Spmm, Spmv, GemmSimt),
)
#: Up to the first number of columns, a product that is computed one block row at a time is the fastest. The second
#: number applies to operands that `copied_in_pieces` refuses, which are read less efficiently.
_FEWER_COLUMNS, _FEWEST_COLUMNS = 64, 16


def by_rule(problem: Problem) -> Dense:
    """Return the kernel that was measured to be the best for such a product."""
    return kernel_of(problem).best(problem)


def kernel_of(problem: Problem) -> type[Dense]:
    """Return the class of the best kernel: one for the tensor cores if one can compute the product.

    The rules were fitted to measurements on an H200.
    """
    if problem.parts == 2:
        return GemmSm90  # no other kernel reads B in parts
    if GemmFew.serves(problem):
        return GemmFew
    if not by_rows(problem):
        if GemmTurnedSm90.serves(problem) and _many_turned_tiles(problem):
            return GemmTurnedSm90
        for kernel in (GemmSm90, GemmSm80):
            if kernel.serves(problem):
                return kernel
    return next(kernel for kernel in (SpmmF64, SpmvSmall, Spmm, Spmv, GemmSimt) if kernel.serves(problem))


def variants(problem: Problem) -> Iterator[Dense]:
    """Yield the kernels that `bsrgemm.tune` measures, and of which one can be forced.

    The one of the rule comes first, then the same kernel with other constants, then the others that can compute it.
    """
    first = by_rule(problem)
    if isinstance(first, GemmSm90 | GemmSm80):
        yield from type(first).variants(problem)
    else:
        yield first
    if GemmSm80.serves(problem) and not isinstance(first, GemmSm80):
        yield from GemmSm80.variants(problem)
    for kernel in (GemmTurnedSm90, GemmSm90):
        if kernel.serves(problem) and not isinstance(first, kernel):
            yield kernel.best(problem)
    plain = next(k for k in (SpmmF64, SpmvSmall, Spmm, Spmv, GemmSimt) if k.serves(problem))
    simple = Spmv.best(replace(problem, aligned=False)) if problem.N == 1 else GemmSimt.best(problem)
    yield from (kernel for kernel in dict.fromkeys((plain.best(problem), simple)) if kernel != first)


def by_rows(problem: Problem) -> bool:
    """Return whether there are so few columns that the product should be computed one block row at a time.

    With few columns, reading A takes most of the time. The tiles of the tensor-core kernels have several block rows and
    are processed over the block columns of all of them, most of which each block row does not have. Milliseconds on an
    H200, for 1 GB of blocks, 27 in each block row, at random block columns (in tiles / by block rows):

    ===============  ===========  ===========
    blocks           16 columns   64 columns
    ===============  ===========  ===========
    float32 16 x 16  7.2 / 0.45   7.2 / 1.3
    float64 16 x 16  3.1 / 0.36   3.1 / 0.91
    float64 32 x 32  1.8 / 0.35   1.8 / 0.87
    float64 64 x 64  1.2 / 0.40   1.2 / 0.84
    ===============  ===========  ===========
    """
    wide = problem.types.of_one("f32") or problem.types.of_one("f64")
    small = max(problem.R, problem.K) <= MOST_SMALL and problem.blocks < 2**31
    if not wide or not 1 < problem.N <= _FEWER_COLUMNS:
        return False
    return SpmmF64.serves(problem) or (small and (problem.N <= _FEWEST_COLUMNS or copied_in_pieces(problem)))


def _many_turned_tiles(problem: Problem) -> bool:
    """Return whether gemm_turned_sm90 has more than two tiles for each of the 132 multiprocessors of an H200.

    It was compared with gemm_sm90 for large products only; smaller ones stay with gemm_sm90, and so do those with few
    columns.
    """
    config = GemmTurnedSm90.best(problem)
    rows, columns = -(-problem.block_rows * problem.R // config.tile_m), -(-problem.N // config.tile_n)
    return problem.N > 128 and rows * columns * problem.batches > 2 * 2 * FEW_TILES
