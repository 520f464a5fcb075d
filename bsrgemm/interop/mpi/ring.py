"""Attention whose queries, keys and values are spread over ranks along the sequence.

At step t a rank computes with the keys of rank ``r + t`` (modulo the number of ranks), while those of ``r + t + 1``
travel. Results of the steps are merged by the logarithms of their sums. Going back, the gradients of keys and values
travel to the rank that has them, while the next step is computed. Nothing is sent that its receiver does not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._attention import checks
from ..._attention.attention import attention
from ..._attention.gradients import attention_backward
from ..._attention.mask import BlockMask
from ..._attention.merge import merge_states
from ..._backend.base import Array
from ..communicator import Communicator, Exchange, as_communicator, texts_of, together
from .ring_plan import Call, Plan, Ring, check_split, local_length, parts_of, plan_of, ranges


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: object,
    mask: BlockMask | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bhsd",
    align: str = "bottom-right",
    multiple: int = 1,
    return_lse: bool = False,
) -> Any:
    """``softmax(scale * q @ k.T) @ v`` over a sequence that is spread over ranks; all ranks call it together.

    Parameters
    ----------
    q, k, v : array
        The queries, keys and values of this rank, as for `attention`: its two chunks of the sequence, which
        `zigzag_split` cuts and `zigzag_positions` names. All ranks have the same dtypes, batches, heads and head dims.
    comm : mpi4py.MPI.Intracomm, Communicator or None
        The ranks; None is this process alone.
    mask : BlockMask, optional
        Which keys a query may see in the whole sequence: its shape is that of all queries and all keys. Every rank has
        the whole mask; it uses the rows of its own queries.
    causal, window, scale, softcap, align
        As for `attention`, by positions in the whole sequence.
    layout : {"bhsd", "bshd"}
        Order of the dimensions of `q`, `k`, `v` and the result.
    multiple : int
        As it was given to `zigzag_split`. With a mask, chunks have to begin at its blocks.
    return_lse : bool
        If True, also return the natural logarithms of the sums of ``exp(score)``.

    Returns
    -------
    out : array
        The result for the queries of this rank: an array like `q` with the head dim of `v`.
    lse : array (B, H_q, length of q)
        As for `attention`. Returned only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if the arguments of one of them do not fit, or differ from those of the others.

    See Also
    --------
    ring_attention_backward : the gradients.
    bsrgemm.merge_states : the merge of the results of the steps.

    Notes
    -----
    The result is that of `attention` on one rank up to rounding: steps are merged in float32 (float64 for float64), and
    rounded once. The same call on the same number of ranks returns the same bits.

    The keys of the next step are on their way while a step is computed. Steps that see nothing are skipped, and of a
    chunk only the keys between the first and the last that the receiver sees are sent. With a mask, each rank tells the
    others what it needs. What is computed from a mask is kept on it for the next call.

    Beside the operands a rank takes memory for its own keys and values in the order in which they are sent, those of
    two other ranks, and the result in float32.

    Examples
    --------
    On one rank it is `attention`. With several, start the same program by ``mpiexec -n 4 python program.py`` and pass
    ``MPI.COMM_WORLD``:

    >>> import numpy as np, bsrgemm as bg
    >>> from bsrgemm.interop import mpi
    >>> q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 64, 8)) for i in range(3))
    >>> out = mpi.ring_attention(q, k, v, comm=None, causal=True)
    >>> np.allclose(out, bg.attention(q, k, v, causal=True))
    True
    """
    ranks = as_communicator(comm)
    with together(ranks):
        rules = _Rules(mask, causal, window, scale, softcap, layout, align, multiple)
        call = _Operands(ranks, rules, q, k, v)
        return_lse = checks.checked_flag(return_lse, "return_lse")
    call.agree()
    xp, acc = call.backend.xp, call.acc
    shape = (*call.given[0].shape[:-1], call.v.shape[-1])
    state = _State(xp.zeros(shape, acc), xp.full(call.q.shape[:3], -np.inf, acc), layout)
    for step, keys, values in call.steps():
        for one in call.plan.calls[step.source]:
            state.add(call, one, keys, values)
    out = state.out.astype(call.q.dtype, copy=False)
    return (out, state.lse) if return_lse else out


def ring_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    comm: object,
    mask: BlockMask | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bhsd",
    align: str = "bottom-right",
    multiple: int = 1,
    dlse: Any = None,
    deterministic: bool = True,
) -> tuple[Array, Array, Array]:
    """Return the gradients of `ring_attention` with respect to q, k and v of this rank; all ranks call it together.

    Parameters
    ----------
    dout : array like `out`
        The gradient of a scalar with respect to `out`.
    q, k, v : array
        The operands of `ring_attention`.
    out, lse : array
        What it returned with ``return_lse=True``.
    comm, mask, causal, window, scale, softcap, layout, align, multiple
        As they were given to `ring_attention`.
    dlse : array like `lse`, optional
        The gradient of the scalar with respect to `lse`; 0 by default.
    deterministic : bool
        As for `attention_backward`.

    Returns
    -------
    dq, dk, dv : array
        The gradients, of the shape and dtype of `q`, `k` and `v`: of the scalar that is the sum over all ranks.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if the arguments of one of them do not fit, or differ from those of the others.

    See Also
    --------
    ring_attention : the forward pass.

    Notes
    -----
    Keys and values travel as in the forward pass. What a rank contributes to the gradients of the keys and values of
    another one is rounded to their dtype, sent back while the next step is computed, and added in float32 (float64 for
    float64) in the order of the steps.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> from bsrgemm.interop import mpi
    >>> q, k, v, dout = (np.random.default_rng(i).standard_normal((1, 2, 64, 8)) for i in range(4))
    >>> out, lse = mpi.ring_attention(q, k, v, comm=None, causal=True, return_lse=True)
    >>> dq, dk, dv = mpi.ring_attention_backward(dout, q, k, v, out, lse, comm=None, causal=True)
    >>> want = bg.attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> np.allclose(dk, want[1])
    True
    """
    ranks = as_communicator(comm)
    with together(ranks):
        rules = _Rules(mask, causal, window, scale, softcap, layout, align, multiple)
        call = _Operands(ranks, rules, q, k, v)
        back = _Backward(call, dout, out, lse, dlse, checks.checked_flag(deterministic, "deterministic"))
    call.agree()
    back.start()
    for step, keys, values in call.steps():
        back.add(step, keys, values)
    return back.finish()


@dataclass(frozen=True, slots=True)
class _Rules:
    """Who sees whom, in the whole sequence, and how scores are computed: arguments as they were given."""

    mask: Any
    causal: Any
    window: Any
    scale: Any
    softcap: Any
    layout: Any
    align: Any
    multiple: Any


@dataclass(slots=True)
class _Step:
    """One step of the ring: the rank whose keys are read, and the rank that reads ours."""

    source: int
    reader: int


class _Operands:
    """The operands of a rank after their checks, and the exchange of keys and values with the others."""

    def __init__(self, comm: Communicator, rules: _Rules, q: Any, k: Any, v: Any) -> None:
        self.comm, self.rules, self.given = comm, rules, (q, k, v)
        checks.check_layout(rules.layout, rules.align)
        self.left, self.right = checks.band(rules.window, checks.checked_flag(rules.causal, "causal"))
        check_split(0, comm.rank, comm.size, rules.multiple)
        self.backend, q, k, v = checks.operands(q, k, v, rules.layout, False)
        self.given = (q, k, v)
        _, self.acc = checks.dtypes_of(q.dtype, k.dtype, v.dtype, None, None)
        self.q, self.k, self.v = (checks.by_heads(x, rules.layout, False) for x in (q, k, v))
        self.sizes = checks.sizes_of(self.q.shape, self.k.shape, self.v.shape)
        scale, softcap = rules.scale, rules.softcap
        self.options: dict[str, Any] = {
            "scale": self.sizes.scale if scale is None else checks.checked_number(scale, "scale", self.acc),
            "softcap": None if softcap is None else checks.checked_number(softcap, "softcap", self.acc, positive=True),
        }
        if rules.mask is not None:  # the lengths are not known yet
            shape = getattr(rules.mask, "shape", (0, 0))
            checks.check_mask(self.backend, rules.mask, self.sizes._replace(queries=shape[0], keys=shape[1]))
        self.ring: Ring
        self.plan: Plan
        #: what every rank needs of the keys of every other
        self.needs: list[np.ndarray[Any, Any]]

    # ------------------------------------------------------------------------------------ what ranks must agree on
    def agree(self) -> None:
        """Compare the arguments of all ranks, and plan the steps. Errors are raised by all ranks together."""
        comm, sizes, mask = self.comm, self.sizes, self.rules.mask
        others = texts_of(comm, f"{sizes.queries} {sizes.keys}\n{self._described()}")
        lengths, texts = zip(*(text.split("\n", 1) for text in others), strict=True)
        with together(comm):
            for rank, text in enumerate(texts):
                if text != texts[0]:
                    raise ValueError(
                        f"q, k, v and options: wanted the same on all ranks, got {texts[0]} on rank 0 and {text} on "
                        f"rank {rank}"
                    )
            self.ring = self._ring([tuple(map(int, text.split())) for text in lengths])
            self.plan = plan_of(self.ring, comm.rank, mask)
        if mask is None:
            self.needs = [plan_of(self.ring, rank, None).needs for rank in range(comm.size)]
        else:
            self.needs = comm.allgather(self.plan.needs)

    def _described(self) -> str:
        sizes, mask, rules = self.sizes, self.rules.mask, self.rules
        what = None if mask is None else (mask.shape, mask.block, mask.heads)
        return (
            f"{self.k.dtype}, batch {sizes.batch}, heads ({sizes.heads}, {sizes.kv_heads}), head dims "
            f"({self.k.shape[3]}, {self.v.shape[3]}), window ({self.left}, {self.right}), align {rules.align!r}, "
            f"mask {what}, multiple {rules.multiple}, {self.options}"
        )

    def _ring(self, lengths: list[tuple[int, ...]]) -> Ring:
        """The whole sequence, from the lengths of all ranks; ValueError if they are not those of a zigzag."""
        rules, size = self.rules, self.comm.size
        queries, keys = (sum(pair[i] for pair in lengths) for i in range(2))
        for name, total, i in (("q", queries, 0), ("k", keys, 1)):
            for rank, pair in enumerate(lengths):
                wanted = local_length(total, rank, size, rules.multiple)
                if pair[i] != wanted:
                    raise ValueError(
                        f"{name}: wanted length {wanted} on rank {rank}, two chunks of {total} positions on {size} "
                        f"ranks with multiple={rules.multiple}, got {pair[i]}; zigzag_split cuts them"
                    )
        if rules.mask is not None:
            mask = rules.mask
            checks.check_mask(self.backend, mask, self.sizes._replace(queries=queries, keys=keys))
            for total, block in zip((queries, keys), mask.block, strict=True):
                inside = [a for rank in range(size) for a, _ in ranges(total, rank, size, rules.multiple) if a % block]
                if inside:
                    raise ValueError(
                        f"multiple: wanted a multiple of the block of the mask, {mask.block}, since chunks begin at "
                        f"its blocks, got {rules.multiple}, with a chunk that begins at {inside[0]}"
                    )
        place = keys - queries if rules.align == "bottom-right" else 0
        return Ring(queries, keys, size, rules.multiple, self.left, self.right, place)

    # ------------------------------------------------------------------------------------ steps
    def steps(self) -> Any:
        """Yield every step with the keys and values of its source; those of the next step are on their way."""
        rank, size = self.comm.rank, self.comm.size
        packed = self._packed()
        keys, values = self.k, self.v
        for t in range(size):
            step = _Step((rank + t) % size, (rank - t) % size)
            following = None
            if t + 1 < size:
                following = self._fetch(packed, (rank + t + 1) % size, (rank - t - 1) % size)
            yield step, keys, values
            if following is not None:
                messages, arrived = following
                messages.wait()
                keys, values = self.unpacked(arrived)

    def _packed(self) -> Array | None:
        """Keys and values of this rank with the sequence as the first dimension, (length, batch, heads, columns).

        Any range of the sequence is contiguous then, and keys and values are one message. None if nobody reads them.
        """
        rank = self.comm.rank
        readers = (needs for other, needs in enumerate(self.needs) if other != rank)
        if not any(parts_of(needs, rank, self.ring) for needs in readers):
            return None
        return self.pack(self.k, self.v, self.k.dtype)

    def pack(self, k: Array, v: Array, dtype: np.dtype[Any]) -> Array:
        B, H, S, D = k.shape
        found = self.backend.xp.empty((S, B, H, D + v.shape[3]), dtype)
        found[..., :D] = k.transpose(2, 0, 1, 3)
        found[..., D:] = v.transpose(2, 0, 1, 3)
        return found

    def unpacked(self, x: Array) -> tuple[Array, Array]:
        D = self.k.shape[3]
        by_head = x.transpose(1, 2, 0, 3)
        return by_head[..., :D], by_head[..., D:]

    def room(self, parts: list[slice]) -> Array:
        """Memory to receive keys and values, or their gradients, of these positions."""
        B, H, _, D = self.k.shape
        count = sum(x.stop - x.start for x in parts)
        return self.backend.xp.empty((count, B, H, D + self.v.shape[3]), self.k.dtype)

    def _fetch(self, packed: Array | None, source: int, reader: int) -> tuple[Exchange, Array]:
        """Start to send what `reader` needs of our keys and values, and to receive what we need of `source`."""
        sends = {}
        parts = parts_of(self.needs[reader], self.comm.rank, self.ring)
        if parts:
            assert packed is not None
            sends[reader] = packed[parts[0]] if len(parts) == 1 else _gathered(self.backend.xp, packed, parts)
        arriving = self.room(parts_of(self.needs[self.comm.rank], source, self.ring))
        receives = {source: arriving} if len(arriving) else {}
        return self.comm.exchange(sends, receives), arriving


class _State:
    """The result of the steps that were computed so far, in the dtype of the sums."""

    def __init__(self, out: Array, lse: Array, layout: str) -> None:
        self.out, self.lse = out, lse
        self._out = checks.by_heads(out, layout, False)
        self._written: list[slice] = []

    def add(self, call: _Operands, one: Call, keys: Array, values: Array) -> None:
        """Compute one call of attention, and merge it."""
        q, k, v = call.q[:, :, one.queries], keys[:, :, one.keys], values[:, :, one.keys]
        out, lse = self._out[:, :, one.queries], self.lse[:, :, one.queries]
        first = all(one.queries.stop <= x.start or x.stop <= one.queries.start for x in self._written)
        self._written.append(one.queries)
        if first:
            lse[...] = attention(q, k, v, return_lse=True, out=out, **one.options, **call.options)[1]
            return
        part = attention(q, k, v, return_lse=True, out_dtype=call.acc, **one.options, **call.options)
        out[...], lse[...] = merge_states([out, part[0]], [lse, part[1]])


class _Backward:
    """The gradients of the steps that were computed so far, in the dtype of the sums."""

    def __init__(self, call: _Operands, dout: Any, out: Any, lse: Any, dlse: Any, deterministic: bool) -> None:
        self.call, self.deterministic = call, deterministic
        xp, acc, layout = call.backend.xp, call.acc, call.rules.layout
        q, _, v = call.given
        shape, rows = (*q.shape[:-1], v.shape[-1]), tuple(call.q.shape[:3])
        self.dout = checks.by_heads(self._checked(dout, "dout", shape, (q.dtype, acc)), layout, False)
        out = checks.by_heads(self._checked(out, "out", shape, (q.dtype, acc)), layout, False)
        self.lse = self._checked(lse, "lse", rows, (acc,))
        with np.errstate(all="ignore"):
            self.delta = (self.dout.astype(acc, copy=False) * out.astype(acc, copy=False)).sum(axis=-1)
            if dlse is not None:  # it adds p * dlse to the gradient of a score
                self.delta = self.delta - self._checked(dlse, "dlse", rows, (acc,))
        self.dq: Array = xp.zeros(q.shape, acc)
        self._dq = checks.by_heads(self.dq, layout, False)
        #: gradients of the keys and values of this rank, as `_Operands.pack` orders them
        self.own: Array
        self._under_way: tuple[Exchange, list[slice], Array] | None = None

    def _checked(self, x: Any, name: str, shape: tuple[int, ...], dtypes: tuple[np.dtype[Any], ...]) -> Array:
        backend = self.call.backend
        found = x if backend.is_dense(x) else checks.adopted_array(backend, x, name)
        wanted = " or ".join(dict.fromkeys(map(str, dtypes)))
        if found.dtype not in dtypes:
            raise TypeError(f"{name}: wanted {wanted} of shape {shape}, got {found.dtype}")
        if tuple(found.shape) != shape:
            raise ValueError(f"{name}: wanted {wanted} of shape {shape}, got shape {tuple(found.shape)}")
        return found

    def start(self) -> None:
        B, H, S, D = self.call.k.shape
        self.own = self.call.backend.xp.zeros((S, B, H, D + self.call.v.shape[3]), self.call.acc)

    def add(self, step: _Step, keys: Array, values: Array) -> None:
        """Compute the calls of one step, and send the gradients of keys and values to the rank that has them."""
        call, rank = self.call, self.call.comm.rank
        if step.source == rank:
            self._compute(step.source, keys, values, self.own)
            return
        parts = parts_of(call.needs[rank], step.source, call.ring)
        total = call.backend.xp.zeros((sum(x.stop - x.start for x in parts), *self.own.shape[1:]), call.acc)
        self._compute(step.source, keys, values, total)
        self._arrived()
        share = total.astype(call.k.dtype, copy=False)
        ours = parts_of(call.needs[step.reader], rank, call.ring)
        arriving = call.room(ours)
        sends = {step.source: share} if len(share) else {}
        receives = {step.reader: arriving} if len(arriving) else {}
        self._under_way = (call.comm.exchange(sends, receives), ours, arriving)

    def _compute(self, source: int, keys: Array, values: Array, total: Array) -> None:
        """Add the gradients of the calls of a step to `dq` and to `total`."""
        call = self.call
        dk, dv = call.unpacked(total)
        for one in call.plan.calls[source]:
            rows = (slice(None), slice(None), one.queries)
            cols = (slice(None), slice(None), one.keys)
            found = attention_backward(
                self.dout[rows],
                call.q[rows],
                keys[cols],
                values[cols],
                None,
                self.lse[rows],
                delta=self.delta[rows],
                deterministic=self.deterministic,
                **one.options,
                **call.options,
            )
            for sums, gradient in zip((self._dq[rows], dk[cols], dv[cols]), found, strict=True):
                sums += gradient.astype(call.acc, copy=False)

    def _arrived(self) -> None:
        """Add the gradients that another rank has sent."""
        if self._under_way is not None:
            messages, parts, arriving = self._under_way
            messages.wait()
            at = 0
            for part in parts:
                count = part.stop - part.start
                self.own[part] += arriving[at : at + count].astype(self.call.acc, copy=False)
                at += count
            self._under_way = None

    def finish(self) -> tuple[Array, Array, Array]:
        """Wait for the last gradients, and round all of them."""
        self._arrived()
        call = self.call
        q, k, v = call.given
        results = [self.dq.astype(q.dtype, copy=False)]
        for like, gradient in zip((k, v), call.unpacked(self.own), strict=True):
            found = call.backend.xp.empty(like.shape, like.dtype)
            checks.by_heads(found, call.rules.layout, False)[...] = gradient
            results.append(found)
        return results[0], results[1], results[2]


def _gathered(xp: Any, x: Array, parts: list[slice]) -> Array:
    """Ranges of the first dimension, one after the other."""
    found = xp.empty((sum(part.stop - part.start for part in parts), *x.shape[1:]), x.dtype)
    at = 0
    for part in parts:
        count = part.stop - part.start
        found[at : at + count] = x[part]
        at += count
    return found
