"""The gradients of attention on the GPU: which kernels compute them, and their start."""

from __future__ import annotations

from dataclasses import replace

import cupy

from .._kernels.card import Card, card
from .._kernels.kernel import Kernel
from .._kernels.launch import Chain, contiguous
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
from .choose import calls_of
from .forward import CAPPED, SIGNED, scores, share_of_blocks
from .longer_lines import readable
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


def backward(call: BackwardCall) -> Chain | None:
    """Start the kernels that write dq, dk and dv on CuPy's current stream.

    The result starts calls of the same kind again. It is None for an empty problem, for sequences of different lengths
    and where operands are copied first: these calls have operands of their own.
    """
    if not call.q.shape[2] or not call.k.shape[2] or not call.q.size:
        for x in (call.dq, call.dk, call.dv):
            x.fill(0)
        return None
    machine = card()
    kernel = choose(problem_of(call, machine), Kernel.forced)
    # What the kernels cannot read as it is, is copied first.
    given = call.operands
    copied = {name: contiguous(given[name]) for name in _SUMS if name in given}
    if kernel.reads_rows:
        copied |= {name: readable(given[name]) for name in _ROWS}
    call = replace(call, **copied)
    operands = call.operands
    key = (
        kernel, *((name, x.dtype, x.shape, x.strides) for name, x in operands.items()), call.scale, call.softcap,
        call.left, call.right, call.bottom_right, None if call.bounds is None else len(call.bounds[0]),
        cupy.cuda.runtime.getDevice(),
    )  # fmt: skip
    chain: Chain = calls_of(call.mask).made(key, lambda: kernel.prepare(call, machine))
    arrays = list(operands.values())
    if call.bounds is not None:
        arrays += [*call.bounds, *(x for part in kernel.parts() for x in part.sequences(call))]
    chain.start(arrays)
    as_given = call.bounds is None and all(operands[name] is x for name, x in given.items())
    return chain if as_given else None


def problem_of(call: BackwardCall, machine: Card) -> BackwardProblem:
    """What decides the kernel for these operands."""
    mode, _, _ = scores(call.scale, call.softcap)
    return BackwardProblem(
        arch=machine.arch,
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
