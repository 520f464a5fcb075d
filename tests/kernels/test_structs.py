"""Argument structs: laid out as C lays them out, packed by name, and checked by the compiler."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import pytest

from bsrgemm._attention import arguments as attention_arguments
from bsrgemm._kernels.structs import Complex, Struct, TensorMap, fields
from bsrgemm._products import arguments as product_arguments

C_TYPES: dict[str, Any] = {
    "P": ctypes.c_uint64, "q": ctypes.c_int64, "Q": ctypes.c_uint64, "i": ctypes.c_int32, "I": ctypes.c_uint32,
    "f": ctypes.c_float, "d": ctypes.c_double, "?": ctypes.c_bool,
}  # fmt: skip

STRUCTS = [
    *(product_arguments.product(acc) for acc in ("f32", "f64", "u32", "u64", "boolean")),
    *(product_arguments.gemm_sm80(acc) for acc in ("f32", "f64", "u32")),
    product_arguments.SCHEDULE,
    product_arguments.LONG_ROWS,
    product_arguments.BLOCK_PRODUCTS_SM80,
    product_arguments.SPGEMM_PATTERN,
    product_arguments.STORED_PATTERN,
    product_arguments.WORK_LIST,
    attention_arguments.attention("f32"),
    attention_arguments.attention("f64"),
    attention_arguments.ATTENTION_VALUES,
    attention_arguments.DECODE,
]


def as_ctypes(layout: Struct) -> type[ctypes.Structure]:
    """The same struct in the words of ctypes, which lays it out as the C compiler of this machine does."""
    members = [(name, as_ctypes(kind) if isinstance(kind, Struct) else C_TYPES[kind]) for name, kind in layout.fields]
    return type(layout.name, (ctypes.Structure,), {"_fields_": members})


@pytest.mark.parametrize("layout", STRUCTS, ids=lambda x: f"{x.name}-{x.size}")
def test_structs_lie_as_those_of_c(layout: Struct) -> None:
    twin = as_ctypes(layout)
    assert ctypes.sizeof(twin) == layout.size
    assert {name: getattr(twin, name).offset for name, _ in layout.fields} == layout.offsets


def test_complex_numbers_are_aligned_to_both_parts() -> None:
    layout = product_arguments.product("c128")
    assert layout.alignment == 16 and layout.offsets["beta"] == 16 and layout.offsets["data"] == 32
    assert layout.size % 16 == 0


def test_tensor_maps_are_aligned_to_64_bytes() -> None:
    layout = Struct("Maps", (("count", "i"), ("a", TensorMap()), ("last", "i")))
    assert layout.offsets == {"count": 0, "a": 64, "last": 192} and layout.size == 256 and layout.alignment == 64


def test_every_field_is_packed_where_it_lies() -> None:
    layout = Struct("Sample", (("a", "i"), ("b", "d"), ("c", Complex("f")), ("d", "P")))
    packed = layout.pack(a=-3, b=2.5, c=1 - 2j, d=2**60)
    assert struct.unpack_from("=i", packed, layout.offsets["a"]) == (-3,)
    assert struct.unpack_from("=d", packed, layout.offsets["b"]) == (2.5,)
    assert struct.unpack_from("=2f", packed, layout.offsets["c"]) == (1, -2)
    assert struct.unpack_from("=Q", packed, layout.offsets["d"]) == (2**60,)
    assert len(packed) == layout.size


@pytest.mark.parametrize("values", [{"a": 1}, {"a": 1, "b": 2, "c": 3}])
def test_a_field_that_is_missing_or_unknown_is_named(values: dict[str, int]) -> None:
    layout = Struct("Sample", fields("i", "a b"))
    with pytest.raises(TypeError, match=r"Sample.*\['[bc]'\]"):
        layout.pack(**values)


def test_a_patch_writes_its_fields_and_no_others() -> None:
    inner = Struct("Inner", fields("q", "x y z"))
    layout = Struct("Outer", (("head", "i"), ("inner", inner), ("tail", "i")))
    packed = layout.pack(head=7, inner=inner.pack(x=1, y=2, z=3), tail=9)
    layout.patch("inner.y", "inner.z").write(packed, 20, 30)
    assert packed == layout.pack(head=7, inner=inner.pack(x=1, y=20, z=30), tail=9)


@pytest.mark.parametrize("names", [("a", "c"), ("b", "a")])
def test_a_patch_over_other_fields_is_refused(names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="not neighbours"):
        Struct("Sample", fields("i", "a b c")).patch(*names)


def test_the_compiler_is_told_of_inner_structs_too() -> None:
    told = dict(product_arguments.gemm_sm80("f32").defines())
    schedule = product_arguments.product("f32").size
    line = schedule + product_arguments.SCHEDULE.size
    assert told["GEMM_SM80_OFFSETS"] == f"0,{schedule},{line},{line + 4}"
    assert {"GEMM_SM80_BYTES", "PRODUCT_BYTES", "PRODUCT_OFFSETS", "SCHEDULE_BYTES", "SCHEDULE_OFFSETS"} <= told.keys()


@pytest.mark.parametrize("acc", ["f32", "f64", "c64", "c128", "u32", "u64", "boolean"])
def test_alpha_and_beta_have_the_size_of_the_sums(acc: str) -> None:
    from bsrgemm._kernels.element_types import number

    assert product_arguments.product(acc).offsets["beta"] == np.dtype(number(acc)).itemsize
