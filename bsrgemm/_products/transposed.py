"""A transposed copy whose values follow those of its matrix, for products that cannot read the matrix transposed."""

from __future__ import annotations

from typing import Any


def transposed_copy(A: Any) -> Any:
    """Return the transpose of `A` in arrays of its own. It is stored on `A` and reused while `A` has the same pattern.

    The values are copied in every call, because the user may have changed those of `A`.
    """
    blocks, stored = A._blocks, A.__dict__.get("_transposed_copy")
    if (
        stored is None
        or any(a is not b for a, b in zip(stored[0], blocks, strict=True))
        or stored[1] != A._shape
        or not stored[2].holds()
    ):
        unwritten = A._state()
        order = A._backend.xp.argsort(blocks.indices, kind="stable")  # the order that `Backend.transpose` has, too
        stored = A._transposed_copy = (blocks, A._shape, unwritten, A._transpose_now(), order)
        return stored[3]
    *_, T, order = stored
    T.data[...] = blocks.data[order].transpose(0, 2, 1)
    return T
