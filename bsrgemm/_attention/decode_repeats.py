"""Decodes whose arguments were checked before: the same kind of call is started without checking them again.

Calls are of the same kind if their arrays have the same shapes, strides and dtypes, their caches the same sizes, and
their options are equal and of the same types. Only addresses and the lengths of sequences differ between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np

from .._backend.base import Array
from .call import DecodeCall, asked_for
from .engine import AttentionEngine
from .kv_cache import KVCache

#: Kinds of calls that are remembered, and sets of addresses that are known not to overlap for each of them.
_MOST_KINDS, _MOST_PLACES = 256, 256
_kinds: dict[Any, Kind] = {}
#: The scale, the softcap, the layout and whether logarithms are wanted, as a plain call has them.
_PLAIN = (None, None, "bhsd", False)


@dataclass(slots=True)
class Kind:
    """What is known of calls of one kind after their arguments were checked."""

    #: shape of the result
    shape: tuple[int, ...]
    #: shape of the logarithms of the sums, and their dtype; None if they are not wanted
    lse: tuple[tuple[int, ...], np.dtype[Any]] | None
    scale: float
    softcap: float | None
    left: int
    #: whether the queries come before the heads
    swapped: bool
    engine: AttentionEngine
    #: addresses of q, `out`, keys and values where `out` overlaps none of the others
    apart: set[tuple[int, int, int, int]] = field(default_factory=set)
    #: see `DecodeCall.prepared`
    prepared: dict[Any, Any] = field(default_factory=dict)

    def again(self, q: Array, cache: KVCache, out: Array | None) -> Any:
        """Do the call; None if `out` may overlap an operand, which has to be checked."""
        if out is not None and _places(q, cache, out) not in self.apart:
            return None
        backend = cache._backend
        result = backend.empty(self.shape, cache.dtype) if out is None else out
        lse = None if self.lse is None else backend.empty(*self.lse)
        q4, out4 = (q.swapaxes(1, 2), result.swapaxes(1, 2)) if self.swapped else (q, result)
        call = DecodeCall(q4, cache, out4, lse, self.scale, self.softcap, self.left, None, 0, self.prepared)
        self.engine.decode(call)
        return result if lse is None else (result, lse)

    def remember(self, q: Array, cache: KVCache, out: Array | None) -> None:
        """Take down that `out` overlaps no operand at these addresses."""
        if out is not None:
            if len(self.apart) >= _MOST_PLACES:
                self.apart.clear()
            self.apart.add(_places(q, cache, out))


def key_of(q: Any, cache: KVCache, out: Any, window: Any, options: tuple[Any, ...]) -> Any:
    """Return everything that the checks of a call depend on, apart from addresses; None if it cannot be remembered.

    Options of another type are another call: ``return_lse=1`` equals ``return_lse=True``, but is refused.
    """
    kind = type(cache.k)
    if type(q) is not kind:
        return None
    if out is window is None and all(map(is_, options, _PLAIN)):  # the types of these are known
        return q.shape, q.strides, q.dtype, cache._sizes
    asked = asked_for(kind, out, window, options)
    return None if asked is None else (q.shape, q.strides, q.dtype, cache._sizes, asked)


def lookup(key: Any) -> Kind | None:
    """Return what is known of calls with this key, or None."""
    try:
        return _kinds.get(key)
    except TypeError:  # an option is an array or a list, which cannot be looked up
        return None


def kind_of(key: Any, kind: Kind) -> Kind | None:
    """Return what is known of calls with this key, which is `kind` from now on if it is new.

    The result is None without a key, and for an engine that does not take part.
    """
    if key is None or not kind.engine.repeats_decode:
        return None
    try:
        found = _kinds.get(key)
    except TypeError:
        return None
    if found is not None:
        return found
    if len(_kinds) >= _MOST_KINDS:
        _kinds.clear()
    return _kinds.setdefault(key, kind)


def _places(q: Array, cache: KVCache, out: Array) -> tuple[int, int, int, int]:
    return q.data.ptr, out.data.ptr, cache.k.data.ptr, cache.v.data.ptr
