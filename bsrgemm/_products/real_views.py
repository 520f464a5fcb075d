"""Complex products on kernels that can only multiply real numbers, such as those of the tensor cores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from .._kernels.card import Card, tensor_arch
from .._kernels.element_types import Types
from .._kernels.launch import Calls, Chain
from .._kernels.rearrange import Form, Lie, Rearrange
from .call import Problem
from .choice import plain
from .copied import as_batch, whole_lines
from .costs import memory, operand_bytes
from .dense import Holder
from .operand import Kind

_REAL: dict[str, tuple[str, np.dtype[Any]]] = {
    "c64": ("f32", np.dtype(np.float32)),
    "c128": ("f64", np.dtype(np.float64)),
}


@dataclass(frozen=True)
class RealViews(Holder):
    """Compute a complex product as a real one of views of A and of the result, and of a copy of B.

    In memory, a row of A is Re a, Im a, Re b, Im b ..., a real row of twice the length. Times a matrix that has below
    each row of B, seen as real numbers, i times that row, it is the row of the result, seen as real numbers. Each
    complex multiplication becomes four real ones, which is as many as it needs.
    """

    costs: ClassVar = {
        "launch": 4.58, "copy": 0.804,
    }  # fmt: skip

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        names = problem.types
        return (
            names.a in _REAL
            and names.of_one(names.a)
            and not problem.transposed
            and problem.line == 0  # no kernel of complex numbers, which complex factors take, reads longer lines
            and (problem.c_order in ("C", "rows") or problem.N == 1)
            and 0 < 2 * problem.blocks * problem.R * problem.K < 2**31
            and tensor_arch(problem.arch)
        )

    def inner(self, problem: Problem) -> Problem:
        name, dtype = _REAL[problem.types.a]
        whole = problem.c_order == "C" or (problem.c_order == "F" and 2 * dtype.itemsize == 16)
        return replace(
            problem, types=Types(name, name, name, name, problem.types.index), K=2 * problem.K, N=2 * problem.N,
            b_order="C", c_order="C" if whole else "",
        )  # fmt: skip

    def around(self, problem: Problem, inner: Problem, card: Card) -> float:
        """B is read, and written twice."""
        x, moved = self.costs, operand_bytes(problem)[1]
        return 1e-6 * (x["launch"] + memory(card, 3 * moved) / x["copy"])

    def prepare(self, call: Kind, card: Card) -> Chain:
        problem, inner, B, out, A = call.problem, self.inner(call.problem), call.B, call.out, call.operand
        dtype, size = _REAL[problem.types.a][1], B.itemsize
        data, blocks = A.arrays[0], Lie.in_order(dtype, (problem.blocks, problem.R, inner.K))
        *outer, rows, N = B.shape
        pitch = whole_lines(N, size) * size
        to = Lie(B.dtype, B.shape, (*(2 * rows * pitch for _ in outer), 2 * pitch, size))
        copy = Rearrange.copying(as_batch(B), as_batch(to), form=Form.TIMES_I, part=pitch // size)
        below = Lie(dtype, (*outer, 2 * rows, 2 * N), (*to.strides[:-2], pitch, dtype.itemsize))
        real = Lie(dtype, (*out.shape[:-1], 2 * N), (*out.strides[:-1], dtype.itemsize), out.data.ptr)
        launch = self.kernel.prepare(Kind(inner, A, below, real, True, blocks), card)
        spare = Calls()  # for complex factors

        def multiply(arrays: Any, alpha: Any, beta: Any) -> None:
            B, out, *blocks, room = arrays
            if complex(alpha).imag or complex(beta).imag:
                other = spare.made(call.problem, lambda: plain(problem, card).prepare(call, card))
                other.start((B, out, *blocks), alpha, beta)
                return
            copy.start((B, room))
            launch.start((room, out, *(blocks or [data])), complex(alpha).real, complex(beta).real)

        room = ((max(1, 2 * rows * pitch // size * (B.shape[0] if outer else 1)),), B.dtype)
        return Chain([multiply], [room], otherwise=lambda: plain(problem, card).prepare(call, card))
