"""softmax(q k^T / sqrt(D)) v: `Attention` of whole sequences, `Decode` of one token on a KV cache, and `Gradients`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import bsrgemm as bg

from ..checks import TOLERANCE, Reference, Seen, gradients_error
from ..data import stored_dtype
from ..internals import forced
from ..peers import attention as peers
from ..peers import gradients as gradient_peers
from ..place import Call, Place
from .case import Error, Peer, Ready, ours_too, plainly


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
    kind: str = "float16"
    #: whether each head has a pattern of blocks of its own
    per_head: bool = False
    softcap: float | None = None
    #: name of the kernel to use, even if another one would be chosen
    kernel: str | None = None
    #: names of what is timed beside it; None is everybody who serves it: other libraries
    beside: tuple[str, ...] | None = None
    #: whether a replayed CUDA graph is timed
    replayed: bool = False
    back_to_back: bool = False

    def __post_init__(self) -> None:
        if self.blocks is not None and self.length % self.blocks[0]:
            raise ValueError(f"a length of {self.length} is not a multiple of the block {self.blocks[0]}")
        if self.blocks is not None and (self.causal or self.window):
            raise ValueError("a mask of blocks is not also causal or a window here")

    @property
    def mask_name(self) -> str:
        if self.blocks is not None:
            size, each = self.blocks
            return f"{each} of {self.length // size} blocks {size}{' per head' if self.per_head else ''}"
        if self.window is not None:
            return f"window {self.window}"
        return "causal" if self.causal else "full"

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        parts = [f"{self.kind} {shape}", self.mask_name, *([f"{self.kv_heads} KV heads"] if self.kv_heads else [])]
        parts += ["softcap"] if self.softcap else []
        return ", ".join([*parts, *([f"on {self.kernel}"] if self.kernel else [])])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.length, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.kv_heads or self.heads, self.length, self.head_dim

    @property
    def pairs(self) -> int:
        """Pairs of query and key that are seen, in one head."""
        S = self.length
        if self.blocks is not None:
            return S * self.blocks[0] * self.blocks[1]
        W = min(S, self.window or S)
        return S * W - W * (W - 1) // 2 if self.causal or self.window else S * S

    @property
    def flops(self) -> float:
        return 4.0 * self.head_dim * self.pairs * self.batch * self.heads

    @property
    def moved(self) -> float:
        size = stored_dtype(self.kind).itemsize
        result = 2 if self.kind == "e4m3" else size
        return float(np.prod(self.shape)) * (size + result) + 2.0 * size * float(np.prod(self.kv_shape))

    @property
    def memory(self) -> float:
        # results of peers, copies of operands in their layout, float64 of one head
        return 3 * self.moved + 16.0 * self.length * (self.head_dim + 200)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `attention`, except for the mask."""
        found: dict[str, Any] = {"causal": True} if self.causal or self.window else {}
        found |= {} if self.window is None else {"window": (self.window - 1, 0)}
        return found | ({} if self.softcap is None else {"softcap": self.softcap})

    def mask(self, place: Place) -> bg.BlockMask | None:
        """The mask of blocks, if there is one."""
        if self.blocks is None:
            return None
        size, each = self.blocks
        heads = (1, self.heads if self.per_head else 1)
        return bg.BlockMask.random(self.length, per_row=each, heads=heads, block=size, device=place.device)

    def seen(self, mask: bg.BlockMask | None) -> Seen:
        """Which keys each query may see, for the check."""
        return Seen(self.heads, self.causal, self.window, mask)

    def operands(self, place: Place) -> list[Any]:
        """q, k and v."""
        return [place.draw(shape, self.kind) for shape in (self.shape, self.kv_shape, self.kv_shape)]

    def call(self, place: Place, q: Any, k: Any, v: Any, mask: bg.BlockMask | None) -> Call:
        """Our call; fp8 has a result in float16."""
        fp8 = self.kind == "e4m3"
        options = self.options | ({"q_scale": 1.0} if fp8 else {})
        out = place.xp.empty_like(q, dtype=np.float16 if fp8 else q.dtype)
        plain = partial(bg.attention, q, k, v, mask=mask, out=out, **options)

        made = forced(plain, self.kernel)
        return place.captured(made) if self.replayed else made

    def ready(self, place: Place) -> Ready:
        (q, k, v), mask = self.operands(place), self.mask(place)
        reference = cache(lambda: Reference.of(self.seen(mask), q, k, v))
        found = self._others(place, q, k, v, mask) | self._own(place, q, k, v)
        usual = {name: make for name, make in found.items() if name not in ("full", "float16")}
        chosen = usual if self.beside is None else {n: make for n, make in found.items() if n in self.beside}
        return Ready(
            self.call(place, q, k, v, mask),
            lambda got: reference().error(peers.as_array(got)) / TOLERANCE[self.kind].attention, chosen,
        )  # fmt: skip

    def _others(self, place: Place, q: Any, k: Any, v: Any, mask: Any) -> dict[str, Callable[[], Peer]]:
        """Other libraries: none of them has fp8 here."""
        makers = {} if self.kind == "e4m3" else peers.PEERS if place.on_gpu else {"NumPy": peers.plain}

        def made(make: Callable[..., Call]) -> Call:
            call = make(q, k, v, mask=mask, **self.options)
            return peers.graphed(call) if self.replayed and place.on_gpu else call

        return {name: plainly(partial(made, make)) for name, make in makers.items()}

    def _own(self, place: Place, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Peer]]:
        """The same without a mask, and fp8 beside float16."""

        def full() -> Peer:
            unmasked = replace(self, causal=False, window=None, blocks=None, kernel=None)
            return Peer(unmasked.call(place, q, k, v, None), judged=False)

        def wide() -> Peer:
            wider = replace(self, kind="float16")
            q, k, v = wider.operands(place)
            return Peer(wider.call(place, q, k, v, wider.mask(place)), judged=False)

        return {"full": full, "float16": wide}


@dataclass(frozen=True)
class Decode:
    """One query token of each of `batch` sequences, on `length` keys and values of fewer heads."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int | None = None
    kind: str = "float16"
    #: share of the blocks of `block` keys that are read; None is all keys
    share: float | None = None
    block: int = 64
    back_to_back: bool = True

    def __str__(self) -> str:
        parts = [f"{self.kind} {self.batch} x {self.length} keys"]
        parts += [f"{self.heads} heads on {self.kv_heads} of {self.head_dim}"]
        parts += [f"pages of {self.page}"] if self.page else []
        parts += [f"{self.kept} of {self.length // self.block} blocks of {self.block}"] if self.share else []
        return ", ".join(parts)

    @property
    def kept(self) -> int:
        """Blocks of keys that a head reads."""
        return max(1, round(self.length // self.block * (self.share or 1)))

    @property
    def _read(self) -> int:
        """Keys that are read."""
        return self.kept * self.block if self.share else self.length

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.heads * self._read * self.head_dim

    @property
    def moved(self) -> float:
        size = stored_dtype(self.kind).itemsize
        return size * self.batch * self.head_dim * (2.0 * self.kv_heads * self._read + 2 * self.heads)

    @property
    def memory(self) -> float:
        size = stored_dtype(self.kind).itemsize
        whole = 2.0 * size * self.batch * self.head_dim * self.kv_heads * self.length
        return 3 * whole + 16.0 * self.length * (self.head_dim + 8)

    def ready(self, place: Place) -> Ready:
        shape = (self.batch, self.kv_heads, self.length, self.head_dim)
        k, v = place.draw(shape, self.kind), place.draw(shape, self.kind)
        q = place.draw((self.batch, self.heads, 1, self.head_dim), self.kind)
        store = bg.KVCache(*shape, dtype=k.dtype, page=self.page, device=place.device)
        store.append(k, v)
        everything = partial(bg.attention_decode, q, store, out=place.xp.empty_like(q))
        call, numbers = everything, None
        if self.share:
            rng = np.random.default_rng(0)
            count = self.length // self.block
            numbers = np.stack([np.sort(rng.permutation(count)[: self.kept]) for _ in range(self.kv_heads)])
            blocks = place.xp.asarray(np.tile(numbers.astype(np.int32), (self.batch, 1, 1)))
            call = partial(everything, blocks=blocks, block=self.block)
        reference = cache(lambda: self._reference(q, k, v, numbers))
        # The queries that share a KV head as rows of one head: a usual workaround where GQA of one token is slow.
        folded = q.reshape(self.batch, self.kv_heads, self.heads // self.kv_heads, self.head_dim)

        def of(make: Callable[..., Call], query: Any) -> Callable[[], Peer]:
            return plainly(lambda: peers.graphed(make(query, k, v)))

        found = {"NumPy": plainly(lambda: peers.plain(q, k, v))}
        if place.on_gpu:
            found = {"cuDNN": of(peers.cudnn, q), "cuDNN folded": of(peers.cudnn, folded), "flash": of(peers.flash, q)}
        if self.share:
            found = {"all keys": ours_too(place.captured(everything))}

        def error(got: Any) -> float:
            return reference().error(peers.as_array(got).reshape(q.shape)) / TOLERANCE[self.kind].attention

        return Ready(place.captured(call), error, found if self.page is None or self.share else {})

    def _reference(self, q: Any, k: Any, v: Any, numbers: Any) -> Reference:
        group = self.heads // self.kv_heads

        def seen(b: int, h: int, query: Any, key: Any) -> Any:
            place = bg.get_array_module(key)
            every = (query >= 0) & (key >= 0)
            return (
                every if numbers is None else every & place.isin(key // self.block, place.asarray(numbers[h // group]))
            )

        return Reference.of(seen, q, k, v)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Gradients:
    """dq, dk and dv: ours in the default order, which repeats bit by bit, beside "any order" and older kernels."""

    of: Attention

    def __str__(self) -> str:
        return str(self.of)

    @property
    def kind(self) -> str:
        return self.of.kind

    @property
    def flops(self) -> float:
        return 2.5 * self.of.flops

    @property
    def moved(self) -> float:
        return 2 * self.of.moved

    @property
    def memory(self) -> float:
        return 4 * self.of.memory

    def operands(self, place: Place, given: list[Any] | None = None) -> SimpleNamespace:
        """q, k, v and dout, and what attention returns for them."""
        (q, k, v), mask = given or self.of.operands(place), self.of.mask(place)
        options = self.of.options | ({} if mask is None else {"mask": mask})
        out, lse = bg.attention(q, k, v, return_lse=True, **options)
        return SimpleNamespace(
            q=q, k=k, v=v, dout=place.draw(self.of.shape, self.of.kind), out=out, lse=lse, mask=mask, options=options
        )

    def call(self, x: SimpleNamespace, place: Place, deterministic: bool = True, kernel: str | None = None) -> Call:
        """Our call, into arrays that are there."""
        into = {name: place.xp.empty_like(y) for name, y in (("dq", x.q), ("dk", x.k), ("dv", x.v))}
        plain = partial(
            bg.attention_backward, x.dout, x.q, x.k, x.v, x.out, x.lse, deterministic=deterministic, **into, **x.options
        )

        return forced(plain, kernel)

    def ready(self, place: Place) -> Ready:
        x = self.operands(place)
        seen, allowed = self.of.seen(x.mask), TOLERANCE[self.of.kind].gradients

        def error(got: Any) -> float:
            return gradients_error(x, seen, self.of.softcap, got) / allowed

        forward = partial(bg.attention, x.q, x.k, x.v, out=place.xp.empty_like(x.out), return_lse=True, **x.options)
        found = {
            "any order": plainly(lambda: self.call(x, place, deterministic=False)),
            "forward pass": ours_too(forward),
        }
        if place.on_gpu:
            found["portable"] = plainly(lambda: self.call(x, place, kernel="BackwardSm80"))
            if self.of.head_dim == 128 and self.of.window is None and self.of.softcap is None:
                found["portable, any order"] = plainly(lambda: self.call(x, place, False, "BackwardFused"))
            for name, make in gradient_peers.PEERS.items():
                found[name] = partial(_peer, make, x, self.of, error)
        return Ready(self.call(x, place), error, found)


def _peer(make: Callable[..., gradient_peers.Made], x: SimpleNamespace, case: Attention, error: Error) -> Peer:
    made = make(x, case)
    arrays = made.gradients
    return Peer(made.call, judged=False) if arrays is None else Peer(made.call, lambda got: error(arrays(got)))
