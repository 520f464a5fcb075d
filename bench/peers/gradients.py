"""The gradients of attention by others: cuDNN, FlashAttention-2 and -4, and the block-sparse attention of cuDNN.

Each function prepares one problem and returns the call to be timed, with what makes dq, dk and dv of its result, like
q, k and v. `x` has q, k, v and dout, and the mask if there is one; the case says what queries see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bsrgemm._kernels.timing import Call

from .attention import as_array, block_lists, tensor


class Made(NamedTuple):
    """A call, and dq, dk and dv in its result; None where nobody has looked into it."""

    call: Call
    gradients: Callable[[Any], list[Any]] | None


def _as_arrays(result: Any) -> list[Any]:
    return [as_array(y) for y in result[:3]]


def _sdpa(backend: str, x: Any, case: Any) -> Made:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.window is not None or case.blocks is not None or case.softcap is not None:
        raise NotImplementedError("this peer supports neither windows nor block masks nor a softcap")
    leaves = [tensor(y).detach().requires_grad_(True) for y in (x.q, x.k, x.v)]
    gqa = {"enable_gqa": True} if case.kv_heads else {}
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=case.causal, **gqa)
    dout = tensor(x.dout)
    return Made(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), _as_arrays)


def fa4(x: Any, case: Any, deterministic: bool = False) -> Made:
    """FlashAttention-4: full, causal, windows."""
    import torch
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    if case.blocks is not None:
        raise NotImplementedError("FlashAttention-4 does not take these lists of blocks in its backward pass")
    q, k, v, dout = (tensor(y).transpose(1, 2).contiguous() for y in (x.q, x.k, x.v, x.dout))
    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options = {"window_size_left": case.window - 1, "window_size_right": 0}
    if case.softcap is not None:
        options["softcap"] = case.softcap
    with torch.no_grad():
        out, lse = _flash_attn_fwd(q, k, v, return_lse=True, **options)[:2]

    def call() -> Any:
        with torch.no_grad():
            return _flash_attn_bwd(q, k, v, out, dout, lse, deterministic=deterministic, **options)

    return Made(call, lambda result: [as_array(y.transpose(1, 2).contiguous()) for y in result[:3]])


def block_sparse_cudnn(x: Any, case: Any) -> Made:
    """The block-sparse attention of cuDNN's frontend, which adds with atomics."""
    import torch
    from cudnn.block_sparse_attention import BSA

    if case.blocks is None:
        raise NotImplementedError("this attention of cuDNN supports block masks only")
    q, k, v, dout = (tensor(y) for y in (x.q, x.k, x.v, x.dout))
    count, columns = block_lists(x.mask)
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

    return Made(call, None)


PEERS: dict[str, Callable[..., Made]] = {
    "cuDNN": partial(_sdpa, "CUDNN_ATTENTION"),
    "flash": partial(_sdpa, "FLASH_ATTENTION"),
    "FA4": fa4,
    "FA4, deterministic": partial(fa4, deterministic=True),
    "cuDNN BSA": block_sparse_cudnn,
}
