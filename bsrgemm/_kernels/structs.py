"""Kernel arguments as named structs, which are packed here by name and checked by the compiler in the CUDA sources.

A `Struct` has the fields of the C struct of the same name, in the same order. `KernelSpec.structs` passes its size and
the offsets of its fields to the compiler, where ``CHECK_LAYOUT`` of cuda/common/layout.cuh asserts that they agree.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from operator import itemgetter
from typing import Any

#: Size of a tensor map, and the alignment of its address, in bytes.
TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT = 128, 64
#: Allowed format characters of the module `struct`: pointers, integers, floats, booleans. Each is aligned to its size.
_TYPES = "PqQiIfd?"


@dataclass(frozen=True)
class TensorMap:
    """The type of a field that holds a tensor map."""

    size: int = TENSOR_MAP_BYTES
    alignment: int = _TENSOR_MAP_ALIGNMENT


@dataclass(frozen=True)
class Complex:
    """The type of a field that holds a complex number: two parts, aligned to the size of both together."""

    part: str

    @property
    def size(self) -> int:
        return 2 * struct.calcsize(self.part)

    @property
    def alignment(self) -> int:
        return self.size


@dataclass(frozen=True)
class Struct:
    """The layout of a C struct: its name in the CUDA sources, and its fields in order with a type for each.

    A type is a format character of the module `struct` ("P" for a pointer, "q", "Q", "i", "I", "f", "d" or "?"), a
    `Complex`, a `TensorMap` or another `Struct`.

    >>> point = Struct("Point", (("x", "d"), ("y", "d"), ("tag", "i")))
    >>> point.size, point.offsets
    (24, {'x': 0, 'y': 8, 'tag': 16})
    >>> point.defines()
    (('POINT_BYTES', 24), ('POINT_OFFSETS', '0,8,16'))
    """

    name: str
    fields: tuple[tuple[str, Any], ...]

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The offset of each field, in bytes."""
        found, end = {}, 0
        for field, kind in self.fields:
            end = -(-end // _alignment(kind)) * _alignment(kind)
            found[field] = end
            end += _size(kind)
        return found

    @cached_property
    def alignment(self) -> int:
        """The alignment of the struct, in bytes."""
        return max(_alignment(kind) for _, kind in self.fields)

    @cached_property
    def size(self) -> int:
        """The size of the struct in bytes, including the padding at its end."""
        last, kind = self.fields[-1]
        return -(-(self.offsets[last] + _size(kind)) // self.alignment) * self.alignment

    def pack(self, **values: Any) -> bytearray:
        """Return the bytes of the struct.

        Every field is named. A field that holds a struct or a tensor map takes the bytes of it.
        """
        packed = bytearray(self.size)
        self.fill(packed, values)
        return packed

    def fill(self, packed: bytearray | memoryview, values: dict[str, Any]) -> None:
        """Write the values of all fields, by their names, over the bytes of a struct."""
        ordered, layout = self._packer
        try:
            if len(values) != len(self.fields):
                raise KeyError
            fields_in_order = ordered(values)
        except KeyError:
            wrong = sorted(values.keys() ^ self.offsets.keys())
            raise TypeError(
                f"{self.name}: wanted a value for each field and no other value; these fields differ: {wrong}"
            ) from None
        if self._has_complex:
            pairs = zip(self.fields, fields_in_order, strict=True)
            fields_in_order = [
                part
                for (_, kind), value in pairs
                for part in ((value.real, value.imag) if isinstance(kind, Complex) else (value,))
            ]
        layout.pack_into(packed, 0, *fields_in_order)

    @cached_property
    def _packer(self) -> tuple[Any, struct.Struct]:
        """The function that puts the values of all fields in order, and the format in which they are packed."""
        layout, end = "=", 0
        for field, kind in self.fields:
            at = self.offsets[field]
            layout += f"{at - end}x{_format(kind)}"
            end = at + _size(kind)
        return itemgetter(*(field for field, _ in self.fields)), struct.Struct(layout)

    @cached_property
    def _has_complex(self) -> bool:
        return any(isinstance(kind, Complex) for _, kind in self.fields)

    def patch(self, *names: str) -> Patch:
        """Return a writer for neighbouring fields in bytes that `pack` returned.

        A field of an inner struct is named "inner.x". The same fields have the same writer.
        """
        return _patch(self, names)

    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """Return the -D definitions with the size and the field offsets of this struct and of its inner structs."""
        macro = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.name).upper()
        own = ((f"{macro}_BYTES", self.size), (f"{macro}_OFFSETS", ",".join(map(str, self.offsets.values()))))
        inner = {kind: None for _, kind in self.fields if isinstance(kind, Struct)}
        return (*own, *(define for kind in inner for define in kind.defines()))

    def place(self, name: str) -> tuple[int, Any]:
        """Return the offset and the type of a field."""
        outer, _, inner = name.partition(".")
        kind = dict(self.fields)[outer]
        if not inner:
            return self.offsets[outer], kind
        at, kind = kind.place(inner)
        return self.offsets[outer] + at, kind


@dataclass(frozen=True, slots=True)
class Patch:
    """A writer for some neighbouring fields of a struct."""

    layout: struct.Struct
    at: int

    def write(self, packed: bytearray | memoryview, *values: Any) -> None:
        """Write the values of the fields into the bytes of a struct; a complex number counts as two values."""
        self.layout.pack_into(packed, self.at, *values)


@cache
def _patch(layout: Struct, names: tuple[str, ...]) -> Patch:
    places = [layout.place(name) for name in names]
    format_, end = "=", places[0][0]
    for at, kind in places:
        if not 0 <= at - end < _alignment(kind):
            raise ValueError(f"{layout.name}: {', '.join(names)} are not neighbours in this order")
        format_ += f"{at - end}x{_format(kind)}"
        end = at + _size(kind)
    return Patch(struct.Struct(format_), places[0][0])


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Return fields of one type, given their names separated by blanks.

    >>> fields("i", "R K")
    (('R', 'i'), ('K', 'i'))
    """
    return tuple((name, kind) for name in names.split())


def _portable(kind: str) -> str:
    """Return a format character whose size does not depend on the machine: a pointer becomes a 64-bit integer."""
    assert kind in _TYPES
    return "Q" if kind == "P" else kind


def _format(kind: Any) -> str:
    """How a field of this type is packed; a struct or a tensor map by its bytes."""
    if isinstance(kind, str):
        return _portable(kind)
    return f"2{kind.part}" if isinstance(kind, Complex) else f"{kind.size}s"


def _size(kind: Any) -> int:
    return struct.calcsize(f"={_portable(kind)}") if isinstance(kind, str) else int(kind.size)


def _alignment(kind: Any) -> int:
    return _size(kind) if isinstance(kind, str) else int(kind.alignment)
