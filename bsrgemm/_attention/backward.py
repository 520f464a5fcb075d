"""The gradients of attention on the GPU: which kernels compute them, and their start."""

from __future__ import annotations

from dataclasses import replace

from .._backend.base import Backend
from .._kernels import forced_kernel
from .._kernels.card import card
from .._kernels.kernel import Kernel
from .._kernels.launch import contiguous
from .backward_kernel import BackwardProblem, Gradients
from .backward_sm80 import AttentionDelta, BackwardFused, BackwardSimt, BackwardSm80
from .backward_sm90 import (
    LEAST_SOFTCAP,
    BackwardBegin,
    BackwardEnd,
    BackwardKeysSm90,
    BackwardQueriesSm90,
    BackwardSm90,
    TurnOrder,
)  # fmt: skip
from .call import BackwardCall
from .forward import CAPPED, SIGNED, readable, scores, share_of_blocks
from .mask import BlockMask

#: The kernels that are chosen by a problem, the best first.
_CHOSEN: tuple[type[Gradients], ...] = (BackwardSm90, BackwardKeysSm90, BackwardFused, BackwardSm80, BackwardSimt)
#: These, and those that are launched with them.
BACKWARD: tuple[type[Kernel], ...] = (
    *_CHOSEN,
    *(BackwardQueriesSm90, BackwardBegin, BackwardEnd, TurnOrder, AttentionDelta),
)
#: Operands that the tensor cores read in rows of multiples of 16 bytes, and sums that are read in order.
_ROWS, _SUMS = ("q", "k", "v", "dout"), ("lse", "dlse", "delta")
#: The share of blocks of 64 keys up to which tiles have as many: with half of the blocks they are 1.8 times as fast as
#: tiles of 128 keys, which are seldom whole then; with all blocks they take 1.3 times as long.
_MANY_BLOCKS = 0.75


def choose(problem: BackwardProblem, wanted: str | None = None) -> Gradients:
    """The best kernel for a problem, or the one whose class is named `wanted`.

    >>> import numpy as np
    >>> half = np.dtype("float16")
    >>> problem = BackwardProblem("sm_90a", half, half, np.dtype("float32"), 128, 128, SIGNED)
    >>> type(choose(problem)).__name__
    'BackwardSm90'
    >>> [part.role for part in choose(problem, "BackwardSm80").parts()]
    [0, 1]
    """
    forced = wanted is not None and wanted.startswith("Backward")
    for kernel in _CHOSEN:
        if kernel.serves(problem) and (not forced or kernel.__name__ == wanted):
            return kernel.best(problem)
    raise ValueError(f"{wanted} cannot compute these gradients: {problem}")


def backward(backend: Backend, call: BackwardCall) -> None:
    """Start the kernels that write dq, dk and dv on CuPy's current stream."""
    if not call.q.shape[2] or not call.k.shape[2] or not call.q.size:
        for x in (call.dq, call.dk, call.dv):
            x.fill(0)
        return
    kernel = choose(problem_of(call), forced_kernel.name)
    # What the kernels cannot read as it is, is copied first.
    names = (*_SUMS, *_ROWS) if kernel.reads_rows else _SUMS
    given = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    copied = {name: readable(x) if name in _ROWS else contiguous(x) for name, x in given.items()}
    kernel.start(backend, replace(call, **copied))


def problem_of(call: BackwardCall) -> BackwardProblem:
    """What decides the kernel for these operands."""
    mode, _, _ = scores(call.scale, call.softcap)
    return BackwardProblem(
        arch=card().arch,
        dtype=call.q.dtype,
        dout_dtype=call.dout.dtype,
        acc=call.acc,
        head_dim=call.q.shape[3],
        value_dim=call.v.shape[3],
        # No score is compared with others here, so that the sign of the scale does not matter.
        scores=CAPPED if mode == CAPPED else SIGNED,
        # In a window nobody waits for the turn of an addition, and the first one can store.
        ordered=call.deterministic or (call.mask is None and call.left + call.right < call.k.shape[2] // 2),
        heads=call.q.shape[0] * call.q.shape[1],
        narrow=call.mask is not None and _is_narrow(call.mask),
        steep=call.softcap is not None and call.softcap < LEAST_SOFTCAP,
    )


def _is_narrow(mask: BlockMask) -> bool:
    """Whether blocks of 64 keys are to be tiles, judged by numbers that the host knows."""
    return mask.block[1] == 64 and share_of_blocks(mask) <= _MANY_BLOCKS
