"""softmax(scale q k^T) v by others: cuDNN, torch's flash kernels, FlashAttention-4, NumPy.

Each function prepares one problem and returns the call to be timed; `as_array` makes an array of its result, which has
the layout of q, (batch, heads, length, head dim). It raises where the peer is not installed or does not serve the case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from bsrgemm import BlockMask
from bsrgemm._kernels.timing import Call

#: The blocks that FlashAttention-4 takes on Hopper, and those of cuDNN's frontend
_FA4_BLOCK, _CUDNN_BLOCKS = 128, (64, 128)


def tensor(x: Any) -> Any:
    """A CuPy array as a torch tensor of the same memory."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:  # DLPack does not carry CuPy's
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def as_array(result: Any) -> Any:
    """What a call returned as an array of NumPy or CuPy."""
    if isinstance(result, np.ndarray) or type(result).__module__.partition(".")[0] == "cupy":
        return result
    import cupy
    import torch

    if result.dtype == torch.bfloat16:
        return cupy.from_dlpack(result.contiguous().view(torch.int16)).view(ml_dtypes.bfloat16)
    return cupy.from_dlpack(result)


def graphed(call: Call) -> Call:
    """A call of torch as the replay of a CUDA graph on torch's current stream."""
    import torch

    aside = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _sdpa(backend: str, q: Any, k: Any, v: Any, causal: bool, window: Any, mask: Any) -> Call:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if window is not None or mask is not None:
        raise NotImplementedError("this peer supports neither windows nor block masks")
    if causal and q.shape[2] != k.shape[2]:
        raise NotImplementedError(
            "torch aligns a causal mask top-left, which is another mask if q and k have different lengths"
        )
    operands = [tensor(x) for x in (q, k, v)]
    options = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    chosen = getattr(SDPBackend, backend)

    def call() -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=causal, **options)

    return call


def cudnn(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, mask: Any = None) -> Call:
    """cuDNN through torch: full and causal."""
    return _sdpa("CUDNN_ATTENTION", q, k, v, causal, window, mask)


def flash(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, mask: Any = None) -> Call:
    """FlashAttention-2 through torch: full and causal."""
    return _sdpa("FLASH_ATTENTION", q, k, v, causal, window, mask)


def block_lists(mask: BlockMask) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """How many blocks each block row has, (batch, heads, rows), and their columns, (batch, heads, rows, columns).

    On the host, as int32; entries after the last block of a row are 0.
    """
    kinds, indptr, indices = (
        x if isinstance(x, np.ndarray) else x.get() for x in (mask.kinds, mask.indptr, mask.indices)
    )
    if kinds.size and int(kinds.max()) >= 0:
        raise NotImplementedError("this peer supports masks of whole blocks only")
    rows, columns = (-(-n // b) for n, b in zip(mask.shape, mask.block, strict=True))
    count = np.diff(indptr).astype(np.int32)
    listed = np.zeros((len(count), columns), np.int32)
    listed[np.arange(columns) < count[:, None]] = indices[: count.sum()]
    return count.reshape(*mask.heads, rows), listed.reshape(*mask.heads, rows, columns)


def _on_gpu(x: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def _whole_blocks(mask: BlockMask) -> tuple[Any, Any, Any, Any]:
    """Counts and columns in torch: of the blocks in part, of which there are none, and of the whole ones."""
    found = block_lists(mask)
    none = [np.zeros_like(x) for x in found]
    in_part, in_part_at, whole, whole_at = (_on_gpu(x) for x in (*none, *found))
    return in_part, in_part_at, whole, whole_at


def fa4(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, mask: Any = None) -> Call:
    """FlashAttention-4, written in CuTe: full, causal, windows, blocks of 128."""
    import torch
    from flash_attn.cute.interface import _flash_attn_fwd

    # (batch, length, heads, head dim), as it wants them
    operands = [tensor(x).transpose(1, 2).contiguous() for x in (q, k, v)]
    options: dict[str, Any] = {"causal": causal}
    if window is not None:
        left, right = (None if side < 0 else side for side in window)
        options = {"window_size_left": left, "window_size_right": 0 if causal else right}
    if mask is not None:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        if mask.block != (_FA4_BLOCK, _FA4_BLOCK):
            raise NotImplementedError(f"FlashAttention-4 supports blocks of {_FA4_BLOCK} x {_FA4_BLOCK} only")
        names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
        lists = dict(zip(names, _whole_blocks(mask), strict=True))
        options["block_sparse_tensors"] = BlockSparseTensorsTorch(**lists, block_size=mask.block)

    def call() -> Any:
        with torch.no_grad():
            return _flash_attn_fwd(*operands, **options)[0].transpose(1, 2)

    return call


def block_sparse_cudnn(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, mask: Any = None) -> Call:
    """The block-sparse attention of cuDNN's frontend: square blocks of 64 or 128, nothing else masked."""
    import torch
    from cudnn.block_sparse_attention import BSA

    if mask is None or causal or window is not None:
        raise NotImplementedError("this attention of cuDNN supports block masks only")
    rows, columns = mask.block
    if rows != columns or rows not in _CUDNN_BLOCKS:
        raise NotImplementedError(
            f"this attention of cuDNN supports square blocks of {_CUDNN_BLOCKS} only, got {rows} x {columns}"
        )
    operands = [tensor(x) for x in (q, k, v)]
    count, columns_of = block_lists(mask)
    each = max(1, int(count.max()))
    heads = (q.shape[0], q.shape[1])
    counts = _on_gpu(np.broadcast_to(count, (*heads, *count.shape[2:])))
    listed = _on_gpu(np.broadcast_to(columns_of[..., :each], (*heads, count.shape[2], each)))

    def call() -> Any:
        with torch.no_grad():
            found = BSA.block_sparse_attention_forward(
                *operands, listed, block_sparse_num=each, q2k_block_nums=counts, sparse_block_size=rows
            )
        values = found.values() if isinstance(found, dict) else found
        return next(x for x in values if x.shape == operands[0].shape and x.dtype == operands[0].dtype)

    return call


def plain(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, mask: Any = None) -> Call:
    """All scores at once in float32, as one writes it in NumPy."""
    S_q, S_k = q.shape[2], k.shape[2]
    place, key = np.arange(S_q)[:, None] + S_k - S_q, np.arange(S_k)
    left, right = window or (-1, -1)
    right = 0 if causal else right
    seen = np.ones((S_q, S_k), bool) if mask is None else mask.to_dense()
    if left >= 0:
        seen = seen & (key >= place - left)
    if right >= 0:
        seen = seen & (key <= place + right)
    group = q.shape[1] // k.shape[1]

    def call() -> Any:
        wide = q.astype(np.float32)
        keys, values = (np.repeat(x.astype(np.float32), group, axis=1) for x in (k, v))
        scores = np.where(seen, wide @ keys.swapaxes(2, 3) / np.float32(q.shape[3] ** 0.5), -np.inf)
        weights = np.exp(scores - np.maximum(scores.max(axis=3, keepdims=True), np.finfo(np.float32).min))
        total = weights.sum(axis=3, keepdims=True)
        return (weights @ values / np.where(total == 0, 1, total)).astype(q.dtype)

    return call


#: The peers of the GPU
PEERS: dict[str, Callable[..., Call]] = {"cuDNN": cudnn, "flash": flash, "FA4": fa4, "cuDNN BSA": block_sparse_cudnn}
