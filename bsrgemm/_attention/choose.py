"""Which kernel computes attention, and its launches, which are remembered by kind of call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import cupy
import numpy as np

from .._backend.base import Backend
from .._kernels.card import Card, card, tensor_arch
from .._kernels.kernel import Kernel
from .._kernels.launch import Calls, Chain, Launch
from ..dtypes import HALF_DTYPES
from . import longer_lines, mask_tiles
from .attention_few import AttentionFew, few_rows
from .attention_sm80 import AttentionSimt, AttentionSm80
from .attention_sm90 import AttentionGathered, AttentionShort, AttentionSm90, AttentionValues, by_columns
from .call import AttentionCall
from .forward import DIMS, Forward, Problem, mappable, scores, share_of_blocks
from .mask import BlockMask
from .small_blocks import piece_of

#: The kernels of attention, the preferred ones first, and those that prepare their operands.
FORWARD: tuple[type[Forward], ...] = (
    *(AttentionShort, AttentionFew, AttentionGathered, AttentionSm90, AttentionSm80, AttentionSimt),
)
ATTENTION = (*FORWARD, AttentionValues)
#: The sides of large tiles and of small ones, which heads of more than so many columns have. A mask with at most this
#: fraction of its blocks is sparse.
_LARGE_TILE, _SMALL_TILE, _SMALL_TILE_COLUMNS, _FEW_BLOCKS = 128, 64, 64, 0.5

#: Pairs of queries and keys that the plain cores multiply while operands are copied: 8 us with heads of 64 columns.
_FEW_PAIRS = 1 << 17

#: What is known of calls without a mask; a mask keeps what is known of calls with it.
_calls = Calls()


def choose(problem: Problem, wanted: str | None = None) -> Forward:
    """The kernel for a problem: the best one, or the one whose class is named `wanted` if that is a class of attention.

    >>> half = np.dtype("float16")
    >>> problem = Problem("sm_90a", half, half, np.dtype("float32"), 80, 80, 0, True, True, 10**5, 4096)
    >>> type(choose(problem)).__name__, type(choose(problem, "AttentionSm80")).__name__
    ('AttentionSm90', 'AttentionSm80')
    """
    for kernel in candidates(problem):
        if wanted is None or not wanted.startswith("Attention") or type(kernel).__name__ == wanted:
            return kernel
    raise ValueError(f"{wanted} cannot compute this attention: {problem}")


def candidates(problem: Problem) -> Iterator[Forward]:
    """The kernels that can serve a problem, the best first."""
    yield from (kernel.best(problem) for kernel in FORWARD if kernel.serves(problem))


def calls_of(mask: BlockMask | None) -> Calls:
    """What is known of calls with a mask, or of those without one."""
    if mask is None:
        return _calls
    found: Calls | None = mask.__dict__.get("_calls")
    return mask.__dict__.setdefault("_calls", Calls()) if found is None else found


def forward(backend: Backend, call: AttentionCall) -> Launch | Chain | None:
    """Start attention on CuPy's current stream.

    The result starts calls of the same kind again. It is None for an empty problem, for sequences of different lengths,
    for fp8 and where its operands are copied first: these calls have operands of their own.
    """
    q, k, v, out, lse = call.q, call.k, call.v, call.out, call.lse
    if not out.size and (lse is None or not lse.size):
        return None
    if not k.shape[2]:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return None
    machine = card()
    problem = problem_of(call, machine)
    if wants_copies(problem) and (call.fp8 or sum(x.nbytes for x in (q, k, v)) <= longer_lines.MOST_BYTES):
        q, k, v = (longer_lines.readable(x) for x in (q, k, v))
        forward(backend, replace(call, q=q, k=k, v=v))
        return None
    kernel = choose(problem, Kernel.forced)
    if kernel.fp8:
        call = replace(call, values=by_columns(v, None if call.bounds is None else call.bounds[1]))
    fp8 = tuple(x is None for x in call.scales) if call.fp8 else (problem.scores, call.scale, call.softcap)
    key = (
        kernel, q.dtype, out.dtype, q.shape, k.shape, v.shape, q.strides, k.strides, v.strides,
        out.strides, lse is None, fp8, call.left, call.right, call.bottom_right,
        None if call.bounds is None else len(call.bounds[0]), cupy.cuda.runtime.getDevice(),
    )  # fmt: skip
    launch: Launch | Chain = calls_of(call.mask).made(key, lambda: longer_lines.prepare(kernel, call, machine))
    operands = [q, k, v, out, *(() if lse is None else (lse,))]
    if call.bounds is not None:
        causal = call.right < k.shape[2]
        operands += [*call.bounds, *mask_tiles.sequences(cupy, *call.bounds, q.shape[2], kernel.tile_q, causal)]
    if call.fp8:
        operands += [x for x in call.scales if x is not None]
    operands += [call.values] if kernel.fp8 else []
    factors = (*scores(call.scale, call.softcap, True)[1:], call.value_scale) if call.fp8 else ()
    launch.start(operands, *factors)
    return None if call.bounds is not None or call.fp8 else launch


def problem_of(call: AttentionCall, machine: Card) -> Problem:
    """The properties of a call that decide its kernel."""
    q, k, v, out = call.q, call.k, call.v, call.out
    return Problem(
        arch=machine.arch,
        dtype=q.dtype,
        out_dtype=out.dtype,
        acc=call.acc,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        scores=scores(call.scale, call.softcap, call.fp8)[0],
        reads=all(map(mappable, (q, k, v))),
        writes=mappable(out),
        rows=q.size // max(1, q.shape[3]),
        keys=k.shape[2],
        fine=call.mask is not None and _is_fine(call.mask, max(q.shape[3], v.shape[3])),
        piece=0 if call.mask is None else piece_of(call.mask),
        fp8=call.fp8,
        queries=q.shape[2],
        few=few_rows(call),
        alike=call.mask is None and call.bounds is None,
        full=_is_full(call),
    )


def wants_copies(problem: Problem) -> bool:
    """Whether these operands of fp8 or 16 bits could use the tensor cores after copies to other strides."""
    if problem.reads or not all(0 < x <= DIMS[-1] for x in (problem.head_dim, problem.value_dim)):
        return False
    if problem.fp8:
        return problem.arch == "sm_90a"
    halves = problem.dtype in HALF_DTYPES and problem.acc == np.float32 and tensor_arch(problem.arch)
    return halves and problem.rows * problem.keys > _FEW_PAIRS


def _is_full(call: AttentionCall) -> bool:
    """Whether every query sees every key."""
    reach = call.q.shape[2] + call.k.shape[2]  # wherever the queries are
    return call.mask is None and call.bounds is None and call.left >= reach and call.right >= reach


def _is_fine(mask: BlockMask, columns: int) -> bool:
    """Whether small tiles suit a mask better, judged by numbers that the host knows.

    Large tiles of small blocks are mostly empty. Blocks of 192 are whole small tiles, while a large tile can reach over
    four of them: at a fifth of random blocks 541 TFLOP/s are expected for 324 in large tiles, at half of them 541 for
    415 (bench/NOTES.md).
    """
    whole = columns > _SMALL_TILE_COLUMNS and not any(side % _SMALL_TILE for side in mask.block)
    suits = min(mask.block) < _LARGE_TILE or (whole and any(side % _LARGE_TILE for side in mask.block))
    return suits and share_of_blocks(mask) <= _FEW_BLOCKS
