"""`KVCache`: the keys and values of a batch of growing sequences, each in one piece of memory or in pages.

Lengths and page tables are kept on the host; copies on the device are updated in stream order, without waiting. Nothing
is written before all arguments are known to fit. Once an `append` was captured in a CUDA graph, the host does not know
how often the graph was replayed: from then on the lengths on the device count, and the kernel checks that tokens fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .._backend import registry
from .._backend.base import Array, Backend, EngineTable, class_of
from .._backend.recording import recorded
from ..dtypes import BFLOAT16, FLOAT16, HALF_DTYPES, check_dtype
from .checks import host_array

_DTYPES = (FLOAT16, BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
_LAYOUTS = {"bhsd": "(batch, KV heads, length, head dim)", "bshd": "(batch, length, KV heads, head dim)"}
_LEAST_PAGE, _MOST_PAGE = 16, 256
#: Kernels count keys of a sequence, and rows of all heads, in 32 bits.
_MOST_CAPACITY, _MOST_ROWS = 2**30, 2**31
_NO_PAGE = -1
#: Keys of a tile of the kernel; pages and blocks consist of whole tiles.
TILE = 16


@dataclass(slots=True)
class AppendCall:
    """Checked arguments of `KVCache.append`; `k` and `v` are (batch, heads, tokens, columns) of any strides."""

    k: Array
    v: Array
    #: memory of the cache, (pages, heads, tokens of a page, columns)
    to_k: Array
    to_v: Array
    #: tokens that each sequence has, and tokens for which it had no room; int32 on the cache's device
    lengths: Array
    refused: Array
    #: largest length of a sequence
    capacity: int
    #: pages of each sequence, and what the table becomes before the tokens are written; None if the cache is not paged,
    #: or if the table stays as it is
    table: Array | None = None
    new_table: Array | None = None
    #: how many of the tokens each sequence takes, int32 on the cache's device; None: all
    takes: Array | None = None

    @property
    def arrays(self) -> dict[str, Array | None]:
        """The operands of a kernel by name, in their order; None where there is none."""
        names = ("k", "v", "to_k", "to_v", "lengths", "refused", "table", "takes")
        return {name: getattr(self, name) for name in names}


class AppendEngine(ABC):
    """Appends tokens to the sequences of a cache on the arrays of one backend."""

    def is_capturing(self) -> bool:
        """Tell whether work becomes a part of a graph that is replayed later, instead of being done now."""
        return False

    @abstractmethod
    def append(self, call: AppendCall) -> None:
        """Write tokens at the ends of the sequences, whose lengths on the device grow by them.

        A sequence without room for all of its tokens takes none of them. They are added to `refused`.
        """


#: By the name of the backend, what appends to caches there.
APPEND_ENGINES: EngineTable[AppendEngine] = EngineTable(__package__, cpu="kv_cache", cuda="decode_kernel")


class KVCache:
    """Keys and values of `batch` sequences, each with a length of its own, for `attention_decode`.

    Parameters
    ----------
    batch, kv_heads : int
        Numbers of sequences, and of heads of keys and values.
    capacity : int
        Largest number of tokens of a sequence, less than 2**30.
    head_dim : int
        Elements of a key; `attention_decode` on a GPU takes 64, 80, 96, 128, 192 and 256.
    value_dim : int, optional
        Elements of a value; `head_dim` by default.
    dtype : dtype
        float16 or bfloat16; on the CPU also float32 or float64.
    page : int, optional
        Tokens of a page, a power of two from 16 to 256. Sequences then get memory page by page, as they grow. By
        default a sequence has one piece of memory for all of its `capacity`.
    pages : int, optional
        Number of pages for all sequences together; by default enough for all of them to reach `capacity`.
    device : {"cpu", "cuda"}, optional
        Device that holds the cache; `default_device()` by default.

    Attributes
    ----------
    batch, kv_heads, capacity, head_dim, value_dim, dtype, page, pages
        The parameters of the same names; `page` is None if the cache is not paged.
    k, v : array (batch, kv_heads, capacity, head dim), or (pages, kv_heads, page, head dim)
        The memory; its content beyond the length of a sequence is undefined.
    table : array (batch, ceil(capacity / page)) of int32, or None
        The pages of each sequence, -1 where it has none yet.

    Raises
    ------
    TypeError
        If the device does not support `dtype`.
    ValueError
        If a number is out of range, `pages` is given without `page`, `device` is not the name of a device, or there are
        2**31 tokens or more in all heads and sequences together.
    ImportError
        If `device` is "cuda" and CuPy cannot be imported.

    Notes
    -----
    The host knows the lengths, so neither `append` nor `attention_decode` waits for the GPU. This changes with the
    first `append` that is captured in a CUDA graph. Each replay of the graph appends tokens at the end that the
    sequences have by then, and the host does not see it. Therefore `lengths`, `gathered` and an `append` outside a
    capture read the lengths from the GPU then, and wait for it; `attention_decode` does not.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> import numpy as np
    >>> cache = bg.KVCache(2, 1, 64, 8, dtype="float32", page=16, device="cpu")
    >>> tokens = np.ones((2, 1, 20, 8), np.float32)
    >>> cache.append(tokens, tokens)  # a prompt
    >>> cache.append(tokens[:, :, :2], tokens[:, :, :2], lengths=[1, 2])  # sequences may grow by different lengths
    >>> cache.lengths
    array([21, 22])
    >>> cache.table
    array([[ 0,  1, -1, -1],
           [ 2,  3, -1, -1]], dtype=int32)
    >>> cache
    <KVCache float32 on 'cpu': 2 sequences of 21 to 22 tokens (at most 64), 1 KV heads of 8, 4 of 8 pages of 16>
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: Any = np.float16,
        page: int | None = None,
        pages: int | None = None,
        device: str | None = None,
    ) -> None:
        self._backend: Backend = registry.by_name(registry.default_device() if device is None else device)
        supported = _DTYPES if self._backend is registry.host() else HALF_DTYPES
        self.dtype = check_dtype(dtype, supported, "dtype")
        self.batch, self.kv_heads = _count("batch", batch), _count("kv_heads", kv_heads)
        self.capacity, self.head_dim = _count("capacity", capacity), _count("head_dim", head_dim)
        if self.capacity >= _MOST_CAPACITY:
            raise ValueError(f"capacity: wanted less than 2**30 tokens, got {self.capacity}")
        self.value_dim = self.head_dim if value_dim is None else _count("value_dim", value_dim)
        self.page = None if page is None else _page(page)
        if self.page is None:
            if pages is not None:
                raise ValueError(f"pages: got {pages!r} without page, the tokens of each")
            self.pages, tokens, width = self.batch, self.capacity, 0
        else:
            tokens, width = self.page, -(-self.capacity // self.page)
            self.pages = self.batch * width if pages is None else _count("pages", pages)
        if self.pages * self.kv_heads * tokens >= _MOST_ROWS:
            raise ValueError(
                "capacity: wanted less than 2**31 tokens of all heads and sequences together, "
                f"got {self.pages * self.kv_heads * tokens}"
            )
        #: stands for everything that the checks of a decode depend on
        self._sizes = _same(
            self._backend.name, self.dtype, self.batch, self.kv_heads, self.capacity, self.head_dim, self.value_dim,
            self.page, self.pages,
        )  # fmt: skip
        xp = self._backend.xp
        self.k = xp.empty((self.pages, self.kv_heads, tokens, self.head_dim), self.dtype)
        self.v = xp.empty((self.pages, self.kv_heads, tokens, self.value_dim), self.dtype)
        self._lengths = np.zeros(self.batch, np.int64)
        self._device_lengths = xp.zeros(self.batch, np.int32)
        self._device_refused = xp.zeros(self.batch, np.int32)
        #: whether an append was captured, so that only the device knows the lengths
        self._captured = False
        self._free = list(range(self.pages))[::-1]
        self._pages = np.full((self.batch, width), _NO_PAGE, np.int32)
        self.table = None if self.page is None else self._backend.from_host(self._pages)
        #: the largest of `_lengths`, and their sum; both as rounded numbers of tiles
        self._longest, self._total, self._tiles = 0, 0, (0, 0)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Number of tokens of each sequence, as an array of int64 on the host.

        Once an `append` was captured in a CUDA graph, the numbers are read from the GPU, which waits for it.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.KVCache(2, 1, 64, 8, dtype="float32", device="cpu").lengths
        array([0, 0])
        """
        self._read_lengths()
        return self._lengths.copy()

    @property
    def refused(self) -> np.ndarray[Any, Any]:
        """Number of tokens of each sequence for which replays of a captured `append` found no room, int64 on the host.

        Such tokens are not stored, and the sequence stays as long as it was. `reset` sets the number to 0. Once an
        `append` was captured, the numbers are read from the GPU, which waits for it; until then they are 0, since an
        `append` outside a capture raises an error instead.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.KVCache(2, 1, 64, 8, dtype="float32", device="cpu").refused
        array([0, 0])
        """
        if not self._captured:
            return np.zeros(self.batch, np.int64)
        return self._from_device(self._device_refused)

    @property
    def device(self) -> Any:
        """The device that holds the cache: "cpu", or the CuPy device."""
        return self._backend.device_of(self.k)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and the table of pages."""
        return int(self.k.nbytes + self.v.nbytes + (0 if self.table is None else self.table.nbytes))

    def __repr__(self) -> str:
        lengths = self.lengths
        few, many = lengths.min(), lengths.max()
        paged = "" if self.page is None else f", {self.pages - len(self._free)} of {self.pages} pages of {self.page}"
        return (
            f"<KVCache {self.dtype} on {self._backend.name!r}: {self.batch} sequences of {few} to {many} tokens "
            f"(at most {self.capacity}), {self.kv_heads} KV heads of {self.head_dim}{paged}>"
        )

    @recorded
    def append(self, k: Any, v: Any, lengths: Any = None, *, layout: str = "bhsd") -> None:
        """Add tokens at the end of the sequences.

        Parameters
        ----------
        k, v : array (batch, kv_heads, n, head dim)
            Keys and values of the cache's dtype, on the cache's device, of any strides; those of `v` have `value_dim`
            elements.
        lengths : sequence of int, optional
            How many of the n tokens each sequence takes, the first ones, as numbers on the host; all by default. While
            a CUDA graph is captured, an array of int32 on the GPU, which each replay reads; numbers below 0 count as 0,
            and those above n as n.
        layout : {"bhsd", "bshd"}
            Order of the dimensions: as above, or with the length before the heads.

        Returns
        -------
        None

        Raises
        ------
        TypeError
            If `k` or `v` has another dtype or is on another device than the cache, or `lengths` are not integers on the
            host, or while a CUDA graph is captured, not int32 on the GPU.
        ValueError
            If a shape does not fit, a sequence would have more than `capacity` tokens, or there are too few pages.
            Nothing is written then.

        See Also
        --------
        reserve : takes the pages that a captured `append` needs.
        refused : counts the tokens that replays could not store.
        attention_decode : attends to the tokens of the cache.

        Notes
        -----
        On a GPU one kernel on CuPy's current stream copies the tokens, and the call does not wait for it, unless an
        `append` was captured before: then it reads the lengths from the GPU first.

        While a CUDA graph is captured, nothing is appended. Each replay of the graph reads the lengths on the GPU,
        writes the tokens that `k` and `v` hold by then, and increases the lengths. A sequence without room for its
        tokens takes none of them: no replay writes beyond the capacity, or to a page that the sequence does not have
        (`reserve`). `refused` counts such tokens. Keep `k`, `v`, `lengths` and the cache as long as the graph.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> import numpy as np
        >>> cache = bg.KVCache(1, 2, 64, 8, dtype="float32", device="cpu")
        >>> token = np.ones((1, 2, 1, 8), np.float32)
        >>> cache.append(token, token)
        >>> cache.lengths
        array([1])
        """
        if not isinstance(layout, str) or layout not in _LAYOUTS:
            raise ValueError(f"layout: wanted 'bhsd' or 'bshd', got {layout!r}")
        k = self._tokens(k, "k", self.head_dim, layout)
        v = self._tokens(v, "v", self.value_dim, layout)
        n = k.shape[2]
        if v.shape[2] != n:
            raise ValueError(f"v: wanted length {n} as k has, got {v.shape[2]}")
        engine = APPEND_ENGINES.of(self._backend)
        if engine.is_capturing():
            self._append_in_graph(engine, k, v, lengths)
            return
        takes = np.full(self.batch, n, np.int64) if lengths is None else self._takes(lengths, n)
        self._read_lengths()
        before, after = self._lengths, self._lengths + takes
        if n == 0 or not takes.any():
            return
        if after.max() > self.capacity:
            b = int((after > self.capacity).argmax())
            raise ValueError(
                f"k: sequence {b} has {before[b]} tokens and cannot take {takes[b]} more: the capacity is "
                f"{self.capacity}; nothing was written"
            )
        pages, taken = (self._pages, []) if self.page is None else self._handed_out(after)
        # All memory that the call needs for itself is taken before anything changes: running out of it does no harm.
        call = self._call(k, v, None if lengths is None else self._backend.from_host(takes.astype(np.int32)))
        call.new_table = self._backend.from_host(pages) if taken else None
        engine.append(call)
        self._take(pages, taken)
        self._set_lengths(after)

    def reserve(self, tokens: int) -> None:
        """Give each sequence the pages for `tokens` tokens, those that it has included.

        A captured `append` cannot take pages: reserve them before the graph is replayed. A cache that is not paged has
        memory for all of its tokens from the beginning; nothing is done then.

        Parameters
        ----------
        tokens : int
            Number of tokens for which each sequence has pages afterwards, at most `capacity`.

        Returns
        -------
        None

        Raises
        ------
        ValueError
            If `tokens` is not a positive integer or exceeds the capacity, or if there are too few pages. Nothing has
            changed then.

        Notes
        -----
        The call does not wait for the GPU. Captured graphs use the pages from their next replay on. `reset` frees them.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> cache = bg.KVCache(2, 1, 64, 8, dtype="float32", page=16, device="cpu")
        >>> cache.reserve(20)
        >>> cache.table
        array([[ 0,  1, -1, -1],
               [ 2,  3, -1, -1]], dtype=int32)
        """
        if _count("tokens", tokens) > self.capacity:
            raise ValueError(f"tokens: wanted at most {self.capacity}, the capacity, got {tokens}")
        if self.page is None:
            return
        pages, taken = self._handed_out(np.full(self.batch, tokens))
        if taken:
            assert self.table is not None
            self.table[...] = self._backend.from_host(pages)
            self._take(pages, taken)

    @recorded
    def reset(self, sequence: int | None = None) -> None:
        """Remove the tokens of one sequence, or of all; their pages become free.

        Parameters
        ----------
        sequence : int, optional
            The number of the sequence; all sequences by default.

        Returns
        -------
        None

        Raises
        ------
        TypeError
            If `sequence` is not an integer.
        ValueError
            If there is no such sequence.

        Notes
        -----
        The call does not wait for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> import numpy as np
        >>> cache = bg.KVCache(2, 1, 64, 8, dtype="float32", device="cpu")
        >>> cache.append(np.ones((2, 1, 3, 8), np.float32), np.ones((2, 1, 3, 8), np.float32))
        >>> cache.reset(0)
        >>> cache.lengths
        array([0, 3])
        """
        chosen = slice(None) if sequence is None else slice(self._sequence(sequence), self._sequence(sequence) + 1)
        lengths = self._lengths.copy()
        lengths[chosen] = 0
        if self.page is not None:
            pages = self._pages.copy()
            freed = pages[chosen][pages[chosen] != _NO_PAGE].tolist()
            pages[chosen] = _NO_PAGE
            assert self.table is not None
            self.table[...] = self._backend.from_host(pages)
            self._pages = pages
            self._free += sorted(freed, reverse=True)
        self._device_lengths[chosen] = 0
        self._device_refused[chosen] = 0
        self._set_lengths(lengths)

    @recorded
    def gathered(self, sequence: int) -> tuple[Array, Array]:
        """Keys and values of one sequence.

        Parameters
        ----------
        sequence : int
            The number of the sequence.

        Returns
        -------
        k, v : array (kv_heads, length, head dim), (kv_heads, length, value dim)
            Views of the cache, or copies if the cache is paged.

        Raises
        ------
        TypeError
            If `sequence` is not an integer.
        ValueError
            If there is no such sequence.

        Notes
        -----
        The call does not wait for the GPU, unless an `append` was captured in a CUDA graph: then it reads the lengths
        from the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> import numpy as np
        >>> cache = bg.KVCache(1, 1, 64, 8, dtype="float32", page=16, device="cpu")
        >>> cache.append(np.ones((1, 1, 3, 8), np.float32), np.ones((1, 1, 3, 8), np.float32))
        >>> k, v = cache.gathered(0)
        >>> k.shape
        (1, 3, 8)
        """
        b = self._sequence(sequence)
        length = int(self.lengths[b])
        if self.page is None:
            return self.k[b, :, :length], self.v[b, :, :length]
        used = self._backend.from_host(self._pages[b, : -(-length // self.page)].astype(np.int64))
        k, v = (_bits(x)[used].transpose(1, 0, 2, 3).reshape(self.kv_heads, -1, x.shape[3]) for x in (self.k, self.v))
        return k.view(self.dtype)[:, :length], v.view(self.dtype)[:, :length]

    # ------------------------------------------------------------------------------------ checks
    def _tokens(self, x: Any, name: str, dim: int, layout: str) -> Array:
        """k or v in layout "bhsd", if its shape, dtype and device are those of the cache."""
        x = dense_of(self._backend, x, name)
        if x.ndim != 4:
            raise ValueError(f"{name}: wanted 4 dimensions, {_LAYOUTS[layout]}, got shape {x.shape}")
        if x.dtype != self.dtype:
            raise TypeError(f"{name}: wanted {self.dtype} as the cache has, got {x.dtype}")
        x = x if layout == "bhsd" else x.swapaxes(1, 2)
        wanted = (self.batch, self.kv_heads, x.shape[2], dim)
        if x.shape != wanted:
            raise ValueError(
                f"{name}: wanted {self.batch} sequences, {self.kv_heads} KV heads and head dim {dim}, "
                f"got {x.shape[0]}, {x.shape[1]} and {x.shape[3]}"
            )
        return x

    def _takes(self, lengths: Any, n: int) -> np.ndarray[Any, Any]:
        """The number of tokens that each sequence takes."""
        if not isinstance(lengths, np.ndarray | list | tuple):
            raise TypeError(f"lengths: wanted integers on the host, got {type(lengths).__name__}")
        takes = host_array("lengths", lengths, f"{self.batch} numbers, one per sequence")
        if takes.shape != (self.batch,):
            raise ValueError(f"lengths: wanted {self.batch} numbers, one per sequence, got shape {takes.shape}")
        if takes.dtype.kind not in "iu":
            raise TypeError(f"lengths: wanted integers, got dtype {takes.dtype}")
        if takes.min() < 0 or takes.max() > n:
            raise ValueError(f"lengths: wanted numbers from 0 to {n}, the length of k, got {lengths!r}")
        return takes.astype(np.int64)

    def _device_takes(self, lengths: Any) -> Array:
        """The number of tokens that each sequence takes, where replays of a graph read it."""
        if not self._backend.is_dense(lengths) or lengths.dtype != np.int32:
            kind = getattr(lengths, "dtype", type(lengths).__name__)
            raise TypeError(
                f"lengths: wanted int32 on {self._backend.name!r} while a graph is captured, since each replay reads "
                f"it, got {kind}"
            )
        if lengths.shape != (self.batch,) or (self.batch > 1 and lengths.strides != (lengths.itemsize,)):
            raise ValueError(
                f"lengths: wanted {self.batch} numbers side by side, one per sequence, got shape {lengths.shape}"
            )
        return lengths

    def _sequence(self, sequence: Any) -> int:
        if isinstance(sequence, bool) or not isinstance(sequence, int | np.integer):
            raise TypeError(f"sequence: wanted an integer, got {sequence!r}")
        if not 0 <= sequence < self.batch:
            raise ValueError(f"sequence: wanted a number from 0 to {self.batch - 1}, got {sequence}")
        return int(sequence)

    # ----------------------------------------------------------------------------------- lengths
    def _read_lengths(self) -> None:
        """Bring the lengths to the host if only the device knows them."""
        if self._captured:
            self._set_lengths(self._from_device(self._device_lengths))

    def _from_device(self, numbers: Array) -> np.ndarray[Any, Any]:
        """Return numbers of sequences as int64 on the host."""
        if APPEND_ENGINES.of(self._backend).is_capturing():
            raise RuntimeError("cache: the lengths are on the GPU and cannot be read while a graph is captured")
        return self._backend.to_host(numbers).astype(np.int64)  # synchronize!

    def _set_lengths(self, lengths: np.ndarray[Any, Any]) -> None:
        self._lengths = lengths
        self._longest, self._total = int(lengths.max()), int(lengths.sum())
        self._tiles = rounded_tiles(self._longest, self._total, self.batch)

    def _append_in_graph(self, engine: AppendEngine, k: Array, v: Array, lengths: Any) -> None:
        """Let each replay of the graph that is being captured append tokens."""
        n = k.shape[2]
        takes = None if lengths is None else self._device_takes(lengths)
        if n > self.capacity and takes is None:
            raise ValueError(f"k: {n} tokens never fit: the capacity is {self.capacity}")
        if n:
            engine.append(self._call(k, v, takes))
            self._captured = True

    def _call(self, k: Array, v: Array, takes: Array | None) -> AppendCall:
        lengths, refused = self._device_lengths, self._device_refused
        return AppendCall(k, v, self.k, self.v, lengths, refused, self.capacity, self.table, takes=takes)

    # ------------------------------------------------------------------------------------- pages
    def _handed_out(self, lengths: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], list[int]]:
        """The table with the pages that each sequence needs for `lengths` tokens, and those that are no longer free."""
        assert self.page is not None
        have, want = (self._pages != _NO_PAGE).sum(axis=1), -(-lengths // self.page)
        more = int(np.maximum(want - have, 0).sum())
        if more > len(self._free):
            raise ValueError(
                f"k: {more} more pages are needed and {len(self._free)} of {self.pages} are free; nothing was written"
            )
        if not more:
            return self._pages, []
        pages, taken = self._pages.copy(), self._free[: -more - 1 : -1]
        rest = iter(taken)
        for b in np.nonzero(want > have)[0].tolist():
            for j in range(int(have[b]), int(want[b])):
                pages[b, j] = next(rest)
        return pages, taken

    def _take(self, pages: np.ndarray[Any, Any], taken: list[int]) -> None:
        """Take over a table of pages, of which some are no longer free."""
        self._pages = pages
        if taken:
            del self._free[-len(taken) :]


@lru_cache(maxsize=1024)
def rounded_tiles(longest: int, total: int, batch: int) -> tuple[int, int]:
    """Rounded numbers of tiles of keys: those of the longest sequence, and those of all `batch` sequences together."""
    tiles = _about(-(-longest // TILE))
    return tiles, min(batch * tiles, _about(-(-total // TILE)))


def _about(x: int) -> int:
    """x rounded up to its four leading bits, so that similar lengths share a launch of decode."""
    shift = max(0, x.bit_length() - 4)
    return -(-x >> shift) << shift


@lru_cache(maxsize=256)
def _same(*sizes: Any) -> object:
    """Return an object that is the same for equal sizes. As a part of a key it is found faster than they are."""
    return object()


def dense_of(backend: Backend, x: Any, name: str) -> Array:
    """`x` as an array of the cache's backend, without a copy."""
    if backend.is_dense(x):
        return x
    found = registry.adopted(backend, x, name)
    if found is None:
        way_out = "wanted a dense array there"
        if registry.backend_of(x) or registry.foreign_backend(x):
            way_out = "nothing is moved silently. cupy.asarray(x) brings it to the GPU, x.get() to the CPU"
        raise TypeError(f"{name}: a {class_of(x)} cannot meet a cache on {backend.name!r}: {way_out}")
    return found


def _bits(x: Array) -> Array:
    """The same memory as a dtype that every array module can gather and scatter."""
    return x.view(np.uint16) if x.dtype in HALF_DTYPES else x


def _count(name: str, x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 1:
        raise ValueError(f"{name}: wanted an integer from 1 on, got {x!r}")
    if x >= _MOST_ROWS:
        raise ValueError(f"{name}: wanted less than 2**31, got {x}")
    return int(x)


def _page(page: Any) -> int:
    number = _count("page", page)
    if not _LEAST_PAGE <= number <= _MOST_PAGE or number & (number - 1):
        raise ValueError(f"page: wanted a power of two from {_LEAST_PAGE} to {_MOST_PAGE}, got {page!r}")
    return number


# --------------------------------------------------------------------------------- append on the CPU
class HostAppend(AppendEngine):
    """Appends to caches in memory of NumPy."""

    def append(self, call: AppendCall) -> None:
        n = call.k.shape[2]
        if call.table is not None and call.new_table is not None:
            call.table[...] = call.new_table
        for b, first in enumerate(call.lengths.tolist()):
            takes = n if call.takes is None else min(max(int(call.takes[b]), 0), n)
            numbers, places = _targets(call, b, np.arange(first, first + takes))
            if first < 0 or first + takes > call.capacity or not _exist(numbers, len(call.to_k)):
                call.refused[b] += takes
                continue
            for x, to in ((call.k, call.to_k), (call.v, call.to_v)):
                if call.table is None:
                    to[b, :, first : first + takes] = x[b, :, :takes]
                else:
                    to[numbers, :, places] = x[b, :, :takes].swapaxes(0, 1)
            call.lengths[b] += takes


def _targets(call: AppendCall, b: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the page of each of some tokens of a sequence, -1 if it has none, and the position in the page."""
    if call.table is None:
        return np.full(len(tokens), b), tokens
    page = call.to_k.shape[2]
    width = call.table.shape[1]
    numbers = np.full(len(tokens), -1)
    inside = (tokens >= 0) & (tokens < width * page)
    numbers[inside] = call.table[b, tokens[inside] // page]
    return numbers, tokens % page


def _exist(pages: np.ndarray, count: int) -> bool:
    return bool(((pages >= 0) & (pages < count)).all())


ENGINE = HostAppend()
