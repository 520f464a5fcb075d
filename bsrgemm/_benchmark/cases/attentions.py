"""softmax(q k^T / sqrt(D)) v: `attention` over whole sequences, `decode` of one token on a KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from bsrgemm import BlockMask, KVCache, attention, attention_decode

from ..checks.attention import TOLERANCE, Reference, Seen
from ..peers import attention as peers
from ..place import Draw, Place
from ..random_data import stored_dtype
from ..timing import Call
from .problem import Peer, Ready


@dataclass(frozen=True)
class Attention:
    """q, k and v of (batch, heads, length, head dim); `blocks` is (size, blocks in each block row)."""

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool = False
    #: keys that a query sees, up to its own
    window: int | None = None
    blocks: tuple[int, int] | None = None
    kv_heads: int | None = None
    dtype: str = "float16"
    #: whether each head has a pattern of blocks of its own
    per_head: bool = False
    group = "attention"

    def __post_init__(self) -> None:
        if self.blocks is not None and self.length % self.blocks[0]:
            raise ValueError(f"a length of {self.length} is not a multiple of the block {self.blocks[0]}")
        if self.blocks is not None and (self.causal or self.window):
            raise ValueError("a mask of blocks is not also causal or a window here")

    @property
    def mask_name(self) -> str:
        if self.blocks is not None:
            size, each = self.blocks
            return f"{each} of {-(-self.length // size)} blocks {size}"
        if self.window is not None:
            return f"window {self.window}"
        return "causal" if self.causal else "full"

    def __str__(self) -> str:
        shape = f"{self.batch} x {self.heads} x {self.length} x {self.head_dim}"
        shared = f", {self.kv_heads} KV heads" if self.kv_heads else ""
        return f"{self.dtype} {shape}, {self.mask_name}{shared}"

    def parameters(self) -> dict[str, Any]:
        kind = "blocks" if self.blocks else "window" if self.window else "causal" if self.causal else "full"
        return {
            "shape": list(self.shape), "kv_heads": self.kv_heads or self.heads,
            "mask": kind, "mask_name": self.mask_name, "density": self.pairs / self.length**2, "dtype": self.dtype,
        }  # fmt: skip

    @property
    def computed_in(self) -> str:
        return self.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.length, self.head_dim

    @property
    def pairs(self) -> int:
        """Pairs of query and key that are allowed, in one head."""
        S = self.length
        if self.blocks is not None:
            size, each = self.blocks
            return S * size * each
        W = min(S, self.window or S)
        return S * W - W * (W - 1) // 2 if self.causal or self.window else S * S

    @property
    def flops(self) -> float:
        return 4.0 * self.head_dim * self.pairs * self.batch * self.heads

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.kv_heads or self.heads, self.length, self.head_dim

    @property
    def traffic(self) -> float:
        size = stored_dtype(self.dtype).itemsize
        result = 2 if self.dtype == "e4m3" else size
        queries = self.batch * self.heads * self.length * self.head_dim
        return queries * (size + result) + 2.0 * size * float(np.prod(self.kv_shape))

    @property
    def memory(self) -> float:
        # results of peers, copies of operands in their layout, float64 of one head
        return 3 * self.traffic + 16.0 * self.length * (self.head_dim + 200)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `attention` and of the peers, except for the mask."""
        if self.window is not None:
            return {"causal": True, "window": (self.window - 1, 0)}
        return {"causal": True} if self.causal else {}

    def mask(self, device: str) -> BlockMask | None:
        """The mask of blocks, if there is one."""
        if self.blocks is None:
            return None
        size, each = self.blocks
        heads = (1, self.heads if self.per_head else 1)
        return BlockMask.random(self.length, per_row=each, heads=heads, block=size, device=device)

    def seen(self, mask: BlockMask | None) -> Seen:
        """Which keys each query may see, for the check."""
        return Seen(self.heads, self.causal, self.window, mask)

    def ready(self, place: Place, draw: Draw) -> Ready:
        q, k, v = (draw(s, self.dtype) for s in (self.shape, self.kv_shape, self.kv_shape))
        pattern, fp8 = self.mask(place.name), self.dtype == "e4m3"
        out = place.xp.empty(self.shape, np.float16 if fp8 else q.dtype)
        options = self.options | ({"q_scale": 1.0} if fp8 else {})
        ours = partial(attention, q, k, v, mask=pattern, out=out, **options)
        reference = cache(lambda: Reference.of(self.seen(pattern), q, k, v))
        makers = {} if fp8 else {"NumPy": peers.plain} if place.name == "cpu" else peers.PEERS
        return Ready(
            ours,
            lambda got: reference().error(got) / TOLERANCE[self.dtype],
            {n: _peer(partial(make, q, k, v, mask=pattern, **self.options)) for n, make in makers.items()},
        )


@dataclass(frozen=True)
class Decode:
    """One query token of each of `batch` sequences, on `length` keys and values of fewer heads."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int | None = None
    dtype: str = "float16"
    group = "decode"

    def __str__(self) -> str:
        heads = f"{self.heads} heads on {self.kv_heads} of {self.head_dim}"
        pages = f", pages of {self.page}" if self.page else ""
        return f"{self.dtype} {self.batch} x {self.length} keys, {heads}{pages}"

    def parameters(self) -> dict[str, Any]:
        return {
            "batch": self.batch, "length": self.length, "heads": self.heads, "kv_heads": self.kv_heads,
            "head_dim": self.head_dim, "page": self.page, "dtype": self.dtype,
        }  # fmt: skip

    @property
    def computed_in(self) -> str:
        return self.dtype

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.heads * self.length * self.head_dim

    @property
    def traffic(self) -> float:
        size = stored_dtype(self.dtype).itemsize
        return size * self.batch * self.head_dim * (2.0 * self.kv_heads * self.length + 2 * self.heads)

    @property
    def memory(self) -> float:
        return 3 * self.traffic + 16.0 * self.length * (self.head_dim + 8)

    def ready(self, place: Place, draw: Draw) -> Ready:
        shape = (self.batch, self.kv_heads, self.length, self.head_dim)
        k, v = draw(shape, self.dtype), draw(shape, self.dtype)
        q = draw((self.batch, self.heads, 1, self.head_dim), self.dtype)
        store = KVCache(*shape, dtype=k.dtype, page=self.page, device=place.name)
        store.append(k, v)
        ours = partial(attention_decode, q, store, out=place.xp.empty_like(q))
        reference = cache(lambda: Reference.of(Seen(self.heads), q, k, v))
        # The queries that share a KV head as rows of one head: a usual workaround where GQA of one token is slow.
        folded = q.reshape(self.batch, self.kv_heads, self.heads // self.kv_heads, self.head_dim)

        found: dict[str, Callable[[], Peer]] = {"NumPy": _peer(partial(peers.plain, q, k, v))}
        if place.name != "cpu":
            found = {
                "cuDNN": _peer(partial(peers.cudnn, q, k, v)),
                "cuDNN folded": _peer(partial(peers.cudnn, folded, k, v)),
                "flash": _peer(partial(peers.flash, q, k, v)),
            }

        def error(got: Any) -> float:
            return reference().error(peers.as_array(got).reshape(q.shape)) / TOLERANCE[self.dtype]

        return Ready(ours, error, found)


def _peer(make: Callable[[], Call]) -> Callable[[], Peer]:
    return lambda: Peer(make())
