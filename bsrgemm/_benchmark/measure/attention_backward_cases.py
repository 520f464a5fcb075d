"""Problems of the gradients of attention, their operands, and the calls that compute them: ours and those of peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bsrgemm import BlockMask, attention, attention_backward

from ..._kernels.forced_kernel import force_kernel
from ..peers.attention import block_lists, tensor
from ..timing import Call


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
    softcap: float | None = None

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
    Case("causal 16K softcap", 1, 16, 16, 16384, 128, causal=True, softcap=30.0),
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
    if case.softcap is not None:
        options["softcap"] = case.softcap
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


def portable_any_order(x: Operands) -> Call:
    """The same in one pass, with sums in any order: heads of 97 to 128 columns, no window."""
    call = ours(x, False)

    def forced() -> Any:
        with force_kernel("BackwardFused"):
            return call()

    return forced


def _sdpa(backend: str, x: Operands, case: Case) -> Call:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.window is not None or case.blocks is not None or case.softcap is not None:
        raise NotImplementedError("this peer supports neither windows nor block masks nor a softcap")
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
    if case.softcap is not None:
        options["softcap"] = case.softcap
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
