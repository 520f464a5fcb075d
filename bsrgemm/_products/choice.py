"""The kernels of ``A @ B``, and those that are tried for a product: pure functions, without device or arrays."""

from __future__ import annotations

from collections.abc import Iterator

from .._kernels.card import Card
from .call import Problem
from .costs import H200
from .dense import Dense
from .gemm_simt import GemmFew, GemmSimt, Spmv
from .gemm_sm80 import GemmSm80
from .gemm_sm90 import GemmSm90
from .spmm import Spmm, SpmmF64
from .spmv_small import SpmvSmall
from .swap_ab_sm90 import GemmTurnedSm90

#: The kernels of ``A @ B`` that are compiled. prepared.py has the preparations that hold one of them.
DENSE: tuple[type[Dense], ...] = (
    *(GemmFew, GemmTurnedSm90, GemmSm90, GemmSm80, SpmmF64, SpmvSmall, Spmm, Spmv, GemmSimt),
)


def variants(problem: Problem) -> Iterator[Dense]:
    """Yield the kernels that `bsrgemm.tune` measures, and of which one can be forced.

    Those with the shortest predicted times come first, of each the constants of the rule, then its others.
    """
    serving = [kernel for kernel in DENSE if kernel.serves(problem)]
    for kernel in sorted(serving, key=lambda kernel: kernel.best(problem).seconds(problem, H200)):
        yield from kernel.variants(problem)


def plain(problem: Problem, card: Card) -> Dense:
    """The kernel with the shortest predicted time of those that take the operands as they lie, the first of equals."""
    serving = [kernel.best(problem) for kernel in DENSE if kernel.reads(problem)]
    if not serving:
        raise ValueError(f"no kernel can multiply this: {problem}")
    return min(serving, key=lambda kernel: kernel.seconds(problem, card))
