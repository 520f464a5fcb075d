"""Gradients of attention: TFLOP/s beside cuDNN, FlashAttention-2 and -4 and cuDNN's block-sparse attention.

The rate counts 10 operations for each pair of a query and a key that it sees and each column: five products. All
kernels of a call are timed, those that prepare it included. Ours runs in the default order, which repeats bit by bit,
and with ``deterministic=False``; peers run as they are, FlashAttention-4 in both ways.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bsrgemm import BlockMask, attention, attention_backward

from ..._kernels.forced_kernel import force_kernel
from .. import machine, provenance
from ..peers.attention import block_lists, tensor
from ..table import Table, writing
from ..timing import Call, Clock


@dataclass(frozen=True)
class Case:
    """A problem: heads of queries and keys, lengths, columns, and what queries see."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    columns: int
    dtype: str = "float16"
    causal: bool = False
    #: keys before the query's own that a causal window has
    window: int | None = None
    #: (block, density) of a random mask for each head
    blocks: tuple[int, float] | None = None

    def pairs(self, mask: BlockMask | None) -> float:
        """Pairs of a query and a key that it sees, over all heads."""
        S, each = self.length, self.batch * self.heads
        if mask is not None:
            return float(mask.density) * S * S * each
        if self.window is not None:
            w = min(self.window + 1, S)
            return (w * (w + 1) / 2 + (S - w) * w) * each
        return (S * (S + 1) / 2 if self.causal else S * S) * each


CASES = (
    Case("full 16K", 1, 16, 16, 16384, 128),
    Case("causal 16K", 1, 16, 16, 16384, 128, causal=True),
    Case("window 2048 16K", 1, 16, 16, 16384, 128, causal=True, window=2048),
    Case("window 2048 128K", 1, 16, 16, 131072, 128, causal=True, window=2048),
    Case("128-blocks .2 16K", 1, 16, 16, 16384, 128, "bfloat16", blocks=(128, 0.2)),
    Case("64-blocks .2 16K", 1, 16, 16, 16384, 128, "bfloat16", blocks=(64, 0.2)),
    Case("full 4 x 4096", 4, 16, 16, 4096, 128),
    Case("causal 4 x 4096", 4, 16, 16, 4096, 128, causal=True),
    Case("causal 32:8 8192", 1, 32, 8, 8192, 128, causal=True),
    Case("full 16K D 64", 1, 32, 32, 16384, 64),
    Case("causal 16K D 64", 1, 32, 32, 16384, 64, causal=True),
    Case("causal 8192 D 256", 1, 16, 16, 8192, 256, causal=True),
)


@dataclass
class Operands:
    """The arrays of a case, with the result of the forward pass."""

    q: Any
    k: Any
    v: Any
    dout: Any
    out: Any
    lse: Any
    options: dict[str, Any]


def operands(case: Case, seed: int = 0) -> Operands:
    """Random operands on the card, and what attention returns for them."""
    import cupy

    from ...dtypes import BFLOAT16

    rng = cupy.random.default_rng(seed)
    dtype = BFLOAT16 if case.dtype == "bfloat16" else np.dtype(case.dtype)
    shapes = [(case.batch, heads, case.length, case.columns) for heads in (case.heads, case.kv_heads)]
    q, k, v, dout = (
        rng.standard_normal(shape, np.float32).astype(dtype) for shape in (shapes[0], shapes[1], shapes[1], shapes[0])
    )
    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options = {"window": (case.window, 0)}
    if case.blocks is not None:
        block, density = case.blocks
        per_row = round(density * (case.length // block))
        mask = BlockMask.random(
            case.length, case.length, per_row=per_row, block=block, heads=(1, case.heads), seed=seed
        ).to_device("cuda")
        options = {"mask": mask}
    out, lse = attention(q, k, v, return_lse=True, **options)
    return Operands(q, k, v, dout, out, lse, options)


def ours(x: Operands, deterministic: bool = True) -> Call:
    """Our call, into arrays that are there."""
    import cupy

    results = {name: cupy.empty_like(y) for name, y in (("dq", x.q), ("dk", x.k), ("dv", x.v))}
    return partial(
        attention_backward, x.dout, x.q, x.k, x.v, x.out, x.lse, deterministic=deterministic, **results, **x.options
    )


def portable(x: Operands) -> Call:
    """Our kernel for Ampere and newer cards, on whatever card there is."""
    call = ours(x)

    def forced() -> Any:
        with force_kernel("BackwardSm80"):
            return call()

    return forced


def _sdpa(backend: str, x: Operands, case: Case) -> Call:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.window is not None or case.blocks is not None:
        raise NotImplementedError("this peer supports neither windows nor block masks")
    leaves = [tensor(y).detach().requires_grad_(True) for y in (x.q, x.k, x.v)]
    gqa = {"enable_gqa": True} if case.heads != case.kv_heads else {}
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=case.causal, **gqa)
    dout = tensor(x.dout)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def fa4(x: Operands, case: Case, deterministic: bool = False) -> Call:
    """FlashAttention-4: full, causal, windows."""
    import torch
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    if case.blocks is not None:
        raise NotImplementedError("FlashAttention-4 does not take these lists of blocks in its backward pass")
    q, k, v, dout = (tensor(y).transpose(1, 2).contiguous() for y in (x.q, x.k, x.v, x.dout))
    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options = {"window_size_left": case.window, "window_size_right": 0}
    with torch.no_grad():
        out, lse = _flash_attn_fwd(q, k, v, return_lse=True, **options)[:2]

    def call() -> Any:
        with torch.no_grad():
            return _flash_attn_bwd(q, k, v, out, dout, lse, deterministic=deterministic, **options)

    return call


def block_sparse_cudnn(x: Operands, case: Case) -> Call:
    """The block-sparse attention of cuDNN's frontend, which adds with atomics."""
    import torch
    from cudnn.block_sparse_attention import BSA

    if case.blocks is None:
        raise NotImplementedError("this attention of cuDNN supports block masks only")
    q, k, v, dout = (tensor(y) for y in (x.q, x.k, x.v, x.dout))
    count, columns = block_lists(x.options["mask"])
    each = max(1, int(count.max()))
    lists = {
        "block_sparse_num": each,
        "q2k_block_nums": torch.from_numpy(np.ascontiguousarray(count)).cuda(),
        "sparse_block_size": case.blocks[0],
    }
    index = torch.from_numpy(np.ascontiguousarray(columns[..., :each])).cuda()
    with torch.no_grad():
        found = BSA.block_sparse_attention_forward(q, k, v, index, **lists)
    values = list(found.values() if isinstance(found, dict) else found)
    out = next(y for y in values if y.shape == q.shape)
    lse = next(y for y in values if y.shape != q.shape)

    def call() -> Any:
        with torch.no_grad():
            return BSA.block_sparse_attention_backward(dout, q, k, v, out, lse, index, **lists)

    return call


PEERS: dict[str, Callable[[Operands, Case], Call]] = {
    "cuDNN": partial(_sdpa, "CUDNN_ATTENTION"),
    "flash2": partial(_sdpa, "FLASH_ATTENTION"),
    "FA4": fa4,
    "FA4, deterministic": partial(fa4, deterministic=True),
    "cuDNN BSA": block_sparse_cudnn,
}


def worst(x: Operands, case: Case, got: Sequence[Any]) -> float:
    """The largest difference to float64 in dq of some queries and in dk and dv of some keys, over the largest value."""
    import cupy

    found, S, rng = 0.0, case.length, np.random.default_rng(1)
    places = np.sort(rng.choice(S, min(S, 64), replace=False))
    batch, kv = case.batch - 1, case.kv_heads - 1
    group = case.heads // case.kv_heads
    k, v = (y[batch, kv].astype(np.float64) for y in (x.k, x.v))
    mask: Any = x.options.get("mask")
    at, key = cupy.asarray(places)[:, None], cupy.arange(S)[None]

    def seen(head: int, rows: Any, columns: Any) -> Any:
        if case.blocks is not None:
            block = case.blocks[0]
            per = S // block
            allowed = cupy.zeros((per, per), bool)
            indptr = mask.indptr[head * per : (head + 1) * per + 1].get()
            for r in range(per):
                allowed[r, mask.indices[indptr[r] : indptr[r + 1]]] = True
            return allowed[rows // block, columns // block]
        near = columns <= rows if case.causal or case.window is not None else columns >= 0
        return near & (columns >= rows - case.window) if case.window is not None else near + 0 * rows.astype(bool)

    dk = dv = 0
    scale = case.columns**-0.5
    for head in range(kv * group, (kv + 1) * group):
        q, dout, out = (y[batch, head].astype(np.float64) for y in (x.q, x.dout, x.out))
        lse = x.lse[batch, head].astype(np.float64)[:, None]
        delta = (dout * out).sum(axis=1)[:, None]

        def pair(
            rows: Any, columns: Any, sees: Any, q: Any = q, dout: Any = dout, lse: Any = lse, delta: Any = delta
        ) -> Any:
            p = cupy.where(sees, cupy.exp(scale * q[rows] @ k[columns].T - lse[rows]), 0)
            return p, p * (dout[rows] @ v[columns].T - delta[rows])

        _, ds = pair(places, slice(None), seen(head, at, key))
        found = max(found, _difference(got[0][batch, head][places], scale * ds @ k))
        p, ds = pair(slice(None), places, seen(head, key.T, at.T))
        dk, dv = dk + scale * ds.T @ q, dv + p.T @ dout
    return max(found, _difference(got[1][batch, kv][places], dk), _difference(got[2][batch, kv][places], dv))


def _difference(x: Any, y: Any) -> float:
    return float(abs(x.astype(np.float64) - y).max() / abs(y).max())


def measure(table: Table, case: Case, clock: Clock, wanted: Sequence[str] | None) -> None:
    """Add the row of a case."""
    x = operands(case)
    flops = 10 * case.pairs(x.options.get("mask")) * case.columns
    calls: dict[str, Call] = {
        "bsrgemm": ours(x),
        "bsrgemm, any order": ours(x, False),
        "bsrgemm, portable": portable(x),
    }
    error = {name: worst(x, case, call()) for name, call in calls.items()}
    missing = {}
    for name, make in PEERS.items():
        try:
            calls[name] = make(x, case)
        except Exception as reason:
            missing[name] = f"{type(reason).__name__}: {reason}"[:200]
    calls = {name: call for name, call in calls.items() if wanted is None or name in wanted}

    def failed(name: str, reason: Exception) -> None:
        missing[name] = f"{type(reason).__name__}: {reason}"[:200]

    times = clock.interleaved(calls, failed)
    rates = {name: flops / t.seconds / 1e12 for name, t in times.items()}
    text = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    shown = f"{max(error.values()):.1e}"
    table.add(f"{case.name:<20} error {shown}  {text}", case=case.name, error=error, rates=rates, missing=missing,
              spread={name: t.spread for name, t in times.items()})  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="part of the name of a case; with --keep, other rows stay")
    parser.add_argument("--only", nargs="+", help="names of candidates; all by default")
    parser.add_argument("--accuracy", action="store_true", help="errors on hard inputs instead of rates")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    if not machine.has_gpu():
        parser.exit(0, "no CUDA device: the gradients of attention are measured on a card only\n")
    if options.accuracy:
        from . import attention_backward_accuracy as accuracy

        with provenance.recording() as launched:
            table = Table("attention_backward_accuracy_cuda", "Errors of the gradients of attention", launched)
            with writing(table, options.keep):
                accuracy.run(table, options.quick)
        return
    clock = Clock("cuda", quick=options.quick)
    with provenance.recording() as launched:
        table = Table("attention_backward_cuda", "Gradients of attention, TFLOP/s", launched)
        table.merge = bool(options.case)
        with writing(table, options.keep):
            for case in CASES:
                if not options.case or any(part in case.name for part in options.case):
                    measure(table, case, clock, options.only)
