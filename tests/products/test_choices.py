"""Which kernel serves a product, with which constants and which grid, for a spread of problems.

choices.txt has a line for each problem, or a digest of many. A rule that was changed on purpose writes it anew, and the
difference shows what the change does: ``python -m tests.products.test_choices``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsrgemm._kernels.card import Card
from bsrgemm._kernels.element_types import Types, number
from bsrgemm._kernels.kernel import Kernel
from bsrgemm._products import choice, gemm_sm80, spmm, spmv_small
from bsrgemm._products.block_products import BLOCKS, BlockProblem, BlockProductsSm80, BlockProductsSm90, SpgemmSimt
from bsrgemm._products.call import Problem
from bsrgemm._products.gemm_simt import GemmSimt, Spmv
from bsrgemm._products.gemm_sm80 import GemmSm80
from bsrgemm._products.gemm_sm90 import GemmSm90
from bsrgemm._products.lists import LISTS
from bsrgemm._products.prepared import fastest
from bsrgemm._products.spgemm_pattern import SpgemmPattern
from bsrgemm._products.swap_ab_sm90 import GemmTurnedSm90
from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES

from .. import written_lists

PATH = Path(__file__).with_name("choices.txt")
_ACC = {"f16": "f32", "bf16": "f32", "e4m3": "f32", "i8": "u32", "boolean": "boolean", "i64": "u64"}
_RESULT = {"i8": "i32", "e4m3": "f16"}


def names(a: str, c: str | None = None, index: str = "i32") -> Types:
    """The types of a product of two operands of one type."""
    return Types(a, a, c or _RESULT.get(a, a), _ACC.get(a, a), index)


def written(x: Any) -> str:
    """A kernel on a line: its class and the values of all its fields, without their names."""
    if isinstance(x, Types):
        usual = names(x.a, index=x.index)
        return " ".join([x.a, *([x.b, x.c, x.acc] if x != usual else []), *(["i64"] if x.index == "i64" else [])])
    if isinstance(x, Problem):
        changes = {f.name: getattr(x, f.name) for f in fields(x) if getattr(x, f.name) != getattr(_USUAL, f.name)}
        return " ".join([written(x.types), *(f"{k}={written(v)}" for k, v in changes.items() if k != "types")])
    if is_dataclass(x) and not isinstance(x, type):
        return " ".join([type(x).__name__, *(written(getattr(x, f.name)) for f in fields(x))])
    if isinstance(x, bool):
        return "T" if x else "F"
    if isinstance(x, tuple):
        return "x".join(map(written, x))
    return str(x) or "-"


def digest(found: Iterable[Any]) -> str:
    """A digest of many kernels by what they are compiled and launched with: names of fields are not a part of it."""
    return written_lists.digest([f"{x.spec()} {x.threads} {getattr(x, 'shared_bytes', 0)}" for x in found])


# ------------------------------------------------------------------------------------------------ products with dense
_USUAL = Problem("sm_90a", names("f16"), 64, 64, 512, 1, 100, 100, 2000, False, "C", "C", True, True)


def problem(a: str = "f16", arch: str = "sm_90a", c: str | None = None, index: str = "i32", **changes: Any) -> Problem:
    return replace(_USUAL, arch=arch, types=names(a, c, index), **changes)


def sm90_problems() -> Iterator[Problem]:
    sides = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 24)
    orders = (("C", "C"), ("F", "C"), ("C", "F"), ("F", ""), ("", "C"), ("F", "F"))
    for R, K, (b, c) in islice(product(sides, sides, orders), 0, None, 7):
        yield problem(R=R, K=K, b_order=b, c_order=c)
        yield problem(R=R, K=K, b_order=b, c_order=c, transposed=True, overwrite=R != 64)
    for N, rows, batches in product((1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 192, 256, 257, 512), (1, 33, 100), (1, 5)):
        yield problem("bf16", N=N, block_rows=rows, batches=batches, blocks=100)
    for rows, R in ((132, 64), (133, 64), (66, 128), (67, 128), (131, 64)):
        yield problem(R=R, N=256, block_rows=rows)
    for R, K, N in product((48, 80, 96, 160, 240, 320), (16, 32, 80, 128), (128, 136, 256, 264, 1528, 8192)):
        yield problem(("f16", "bf16")[K % 3 % 2], R=R, K=K, N=N, block_rows=300)
    for K, R, c in product((32, 48, 64, 96, 128, 160, 256, 8), (64, 32), ("f16", "bf16", "f32", "f64")):
        yield problem("e4m3", c=c, K=K, R=R, b_order="F")
    for K, R, tf32 in product((8, 16, 24, 32, 40, 64, 4, 12), (64, 128, 32), (True, False)):
        yield problem("f32", K=K, R=R, b_order="F", tf32=tf32)
    for change in (
        {"tf32": True, "transposed": True},
        {"tf32": True, "b_order": "C"},
        {"c": "f64", "tf32": True},
        {"K": 24, "tf32": True, "N": 20},
    ):
        yield problem("f32", **{"b_order": "F", **change})
    for a, c in product(("f16", "bf16"), ("f16", "bf16", "f32", "f64")):
        yield problem(a, c=c)
    yield problem(aligned=False)
    yield replace(problem(), types=Types("f16", "bf16", "f16", "f32"))
    yield replace(problem(), types=Types("f16", "f16", "f16", "f64"))


def sm80_problems() -> Iterator[Problem]:
    archs = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_90", "sm_100", "sm_120")
    for a, R, arch in product(("f16", "f32", "f64", "i8"), (16, 32, 64, 128, 48), archs):
        yield problem(a, arch, R=R, block_rows=4000 // R * 20, N=4096, b_order="F", tf32=R == 32)
        yield problem(a, arch, R=R, transposed=True)
    for a, K, R in product(("f16", "f32", "f64", "i8", "i64", "c64"), (4, 8, 12, 16, 24, 32, 48, 64), (16, 24, 8)):
        yield problem(a, "sm_80", K=K, R=R)
    for a, c in product(("f16", "bf16", "f32", "f64", "i8"), ("f16", "bf16", "f32", "f64", "i32", "i64")):
        yield problem(a, "sm_80", c=c)
    for N in (127, 128, 129):
        yield problem("f16", "sm_80", block_rows=20000, N=N, blocks=80000)
    wide = 2 * 132 * 128 * 256
    for rows, batches in ((wide // 64 // 512, 1), (wide // 64 // 512 - 1, 1), (wide // 64 // 1024, 2)):
        yield problem("f16", "sm_80", block_rows=rows, batches=batches)
    yield problem("f64", "sm_80", b_order="")
    yield replace(problem(arch="sm_80"), types=Types("f16", "f16", "f16", "f64"))
    yield replace(problem("f64", "sm_80"), types=Types("f64", "f64", "f64", "f32"))


def small_problems() -> Iterator[Problem]:
    """Where the tensor cores, kernels for small blocks and kernels for any block meet."""
    columns = (1, 2, 3, 4, 15, 16, 17, 18, 64, 65, 66, 127, 128, 129, 130)
    sides = ((1, 1), (5, 5), (6, 6), (7, 16), (16, 16), (17, 16), (16, 17), (16, 32), (128, 64), (128, 129), (136, 64))
    for a, (R, K), N in islice(product(("f32", "f64", "f16"), sides, columns), 0, None, 2):
        yield problem(a, R=R, K=K, N=N)
    for a, N, change in product(
        ("f32", "f64"),
        (1, 16, 64),
        (
            {"transposed": True},
            {"aligned": False},
            {"b_order": "F"},
            {"c_order": "F"},
            {"arch": "sm_75"},
            {"index": "i64"},
            {"batches": 3},
            {"blocks": 2**31 - 1},
            {"blocks": 2**31},
            {"block_cols": 2**31 // 16 - 1, "K": 16},
            {"block_cols": 2**28 - 1, "R": 8, "K": 8},
            {"block_cols": 2**32 // 12, "R": 8, "K": 12},
            {"block_cols": 2**32 // 12 + 1, "R": 8, "K": 12},
            {"block_rows": 2**31 - 2**20 - 1, "R": 2, "K": 2},
            {"block_rows": 2**31 - 2**20, "R": 2, "K": 2},
            {"block_cols": 2**31 - 1, "R": 8, "K": 1},
            {"block_cols": 2**31, "R": 8, "K": 1},
        ),
    ):
        yield problem(a, **{"R": 16, "K": 16, "N": N, **change})
    # few columns of a small matrix, and how many blocks a row is taken to have
    for blocks, N in product((255, 256, 257), (1, 2, 15, 16)):
        yield problem("f16", N=N, blocks=blocks)
    for blocks in (0, 1, 50, 98, 99, 100, 101, 102, 103, 150, 196, 204, 205, 270, 900, 1380, 1450, 2700, 2800, 4000):
        yield problem("f64", R=3, K=3, N=1, blocks=blocks)
    yield problem("f64", R=3, K=3, N=1, blocks=3, block_rows=0)


H200 = Card("sm_90a", 132)


def grids(kernel: Any, one: Problem) -> str:
    """The launch that does not depend on lists: threads, shared memory, and the grid on 132 multiprocessors."""
    parts = [kernel.threads, kernel.shared_bytes]
    if isinstance(kernel, GemmSm90 | GemmTurnedSm90):
        parts += [kernel.stages, kernel.row_tiles, kernel.group(one.block_cols * one.K)]
    elif isinstance(kernel, GemmSm80):
        parts += [kernel.ctas(one.arch)]
    else:
        parts += kernel.grid(one, H200)
    return " ".join(map(str, parts))


def all_problems() -> list[Problem]:
    return [*sm90_problems(), *sm80_problems(), *small_problems()]


def gemm_choices() -> Iterator[tuple[str, str]]:
    """Every fifth problem as text, and all of them as digests."""
    every = all_problems()
    for one in every[::5]:
        kernel = fastest(one, H200, False)
        yield written(one), f"{written(kernel)} | {grids(kernel, one)}"
    for first in range(0, len(every), 32):
        some = every[first : first + 32]
        found = [f"{fastest(one, H200, False).spec()} {grids(fastest(one, H200, False), one)}" for one in some]
        yield f"from {written(some[0])}", f"{len(found)} {written_lists.digest(found)}"


def other_variants() -> Iterator[tuple[str, str]]:
    """What `tune` measures, as a digest."""
    some = all_problems()[::9]
    for one in (*some, problem(R=32), problem(R=16, N=64), problem("f32", "sm_80", R=32, N=4096, block_rows=4000)):
        found = list(choice.variants(one))
        yield written(one), f"{len(found)} {digest(found)}"


def copies_of_b() -> Iterator[tuple[str, str]]:
    """Which operands are copied, and for which kernel."""
    for a, N, blocks, order in product(("f16", "f64", "i64"), (1, 63, 64, 65, 128), (8, 15, 16, 17, 32), ("", "C")):
        one = problem(a, N=N, blocks=blocks, b_order=order)
        yield written(one), written(fastest(one, H200, True))
    for change in ({"batches": 8, "blocks": 2}, {"arch": "sm_75"}, {"R": 8}, {"arch": "sm_80"}, {"aligned": False}):
        one = problem(N=128, b_order="", **change)
        yield written(one), written(fastest(one, H200, True))
    for R, N, blocks, tf32 in product((16, 32, 64), (64, 96, 1024), (2000, 40000, 400000), (False, True)):
        one = problem("f32", R=R, K=32, N=N, blocks=blocks, tf32=tf32)
        yield written(one), written(fastest(one, H200, True))


# ------------------------------------------------------------------------------------------------ kernels by themselves
def plain_choices() -> Iterator[tuple[str, str]]:
    kinds = [names(a) for a in ("f16", "i8", "f32", "f64", "c64", "c128", "i64", "boolean")]
    for kind, R in product(kinds, (1, 2, 3, 4, 7, 8, 9)):
        ones = [replace(_USUAL, types=kind, R=R, K=5, N=N) for N in (2, 3, 31, 32, 33, 64, 65, 97, 128, 200)]
        some = [GemmSimt.best(one) for one in ones]
        yield f"spmm {kind.a} {R}", " ".join(f"{x.rows}.{x.cols}.{x.lanes}" for x in some)
    vectors: dict[str, list[str]] = {}
    for kind, (R, C), aligned, transposed in product(
        kinds,
        ((1, 1), (3, 2), (8, 8), (9, 8), (8, 9), (9, 2), (9, 3), (20, 15), (20, 16), (20, 17), (20, 4)),
        (False, True),
        (False, True),
    ):
        one = replace(_USUAL, types=kind, R=R, K=C, N=1, aligned=aligned, transposed=transposed, block_rows=1000)
        kernel = Spmv.best(one)
        vectors.setdefault(f"spmv {kind.a} {written(aligned)}{written(transposed)}", []).append(
            f"{R} {C}: {kernel.lanes}.{kernel.rows}.{kernel.block_r}.{kernel.block_c}.{kernel.vector}"
            f".{'.'.join(map(str, kernel.grid(one, H200)))}"
        )
    yield from ((name, " ; ".join(some)) for name, some in vectors.items())
    for mma, height in product(("MMA_F16", "MMA_TF32", "MMA_3XTF32", "MMA_F64"), (16, 32, 64, 128)):
        rooms = {room: list(gemm_sm80.tiles_of(mma, height, room)) for room in (98, 99, 100, 163, 164, 227)}
        text = " ; ".join(f"{room}: {' '.join(map(written, tiles))}" for room, tiles in rooms.items())
        yield f"tiles {mma} {height}", text
    for sides in ((1, 1, 1), (3, 2, 3), (10, 10, 10), (11, 1, 1), (1, 11, 1), (1, 1, 11), (12, 3, 12), (5, 20, 3)):
        simt = SpgemmSimt.of(names("f32"), *sides)
        yield f"spgemm_simt {sides}", f"{written(simt)} | {simt.grid(1000)} {simt.grid(1)}"


SIDES = [(n, n) for n in range(1, 17)] + [
    *((1, 2), (1, 3), (2, 1), (2, 3), (3, 2), (3, 4), (4, 3), (5, 4), (6, 5), (8, 3), (2, 8), (1, 16), (16, 1)),
    *((6, 16), (12, 4), (13, 11), (16, 8), (5, 2), (4, 9), (9, 3), (3, 5), (7, 8), (8, 7), (4, 1), (10, 2)),
]


def spmv_small_choices() -> Iterator[tuple[str, str]]:
    kinds = [names(a) for a in ("f32", "f64", "c64", "c128", "f16", "boolean", "i64")]
    kinds += [names(a, index="i64") for a in ("f32", "f64")]
    ways = ((True, False, False), (False, False, False), (False, True, False), (False, True, True))
    for kind, way in product(kinds, ways):
        rows = (1, 2, 3, 4, 5, 6, 7, 9, 12, 14, 15, 19, 27)
        found = [spmv_small.spmv_small(kind, R, K, *way, row) for (R, K), row in product(SIDES, rows)]
        yield f"spmv_small {written(kind)} {''.join(map(written, way))}", digest(found)
    for kind, (R, K), row in islice(product(kinds[:3], SIDES, (1, 2, 4, 9, 14, 15, 27)), 0, None, 13):
        yield f"spmv_small {kind.a} {R} {K} {row}", written(spmv_small.spmv_small(kind, R, K, False, True, True, row))


def spmm_small_choices() -> Iterator[tuple[str, str]]:
    kinds = [names(a) for a in ("f32", "f64", "c64", "c128", "f16", "boolean")]
    columns = (2, 3, 4, 6, 8, 12, 16, 31, 32, 64, 100, 128)
    for kind, way in product(kinds, product((False, True), repeat=2)):
        found = [spmm.spmm_small(kind, R, K, N, *way) for (R, K), N in product(SIDES, columns)]
        yield f"spmm_small {written(kind)} {''.join(map(written, way))}", digest(found)
    staged = [names(a, index=index) for a in ("f32", "f64") for index in ("i32", "i64")]
    for kind, room in product(staged, (227, 163, 99)):
        some = [spmm.spmm_staged(kind, R, K, N, room) for (R, K), N in product(SIDES, columns)]
        yield f"spmm_staged {written(kind)} {room}", digest(some)
    for kind, (R, K), N in islice(product((*kinds[:2], *staged), SIDES, (2, 16, 64)), 0, None, 13):
        if kind.of_one("f32") or kind.of_one("f64"):
            yield f"spmm_staged {written(kind)} {R} {K} {N}", written(spmm.spmm_staged(kind, R, K, N))
        yield f"spmm_small {kind.a} {R} {K} {N}", written(spmm.spmm_small(kind, R, K, N, False, True))
    for index, R, K in product(("i32", "i64"), (6, 8, 9, 16, 17, 32), (7, 8, 15, 16, 32)):
        some_f64 = [(spmm.spmm_f64(index, R, K, N), N) for N in (2, 16, 17, 64)]
        grids_of = [kernel.grid(replace(_USUAL, block_rows=1000, N=N, batches=3), H200) for kernel, N in some_f64]
        constants = [
            f"{kernel.pairs}.{kernel.together}.{kernel.ctas} {written(grid)}"
            for (kernel, _), grid in zip(some_f64, grids_of, strict=True)
        ]
        yield f"spmm_f64 {index} {R} {K}", " ; ".join(constants)


def block_choices() -> Iterator[tuple[str, str]]:
    dtypes = [*map(np.dtype, ("float16", "float32", "float64", "int8", "complex64")), BFLOAT16]
    sizes = ((16, 8, 16), (16, 16, 48), (24, 16, 16), (16, 16, 24), (16, 4, 16), (32, 2, 32), (64, 64, 64))
    sizes += ((128, 64, 128), (192, 64, 256), (64, 12, 32), (32, 64, 96), (16, 0, 16), (80, 40, 80), (256, 64, 192))
    for a, order, arch in product(dtypes, (None, "C", "F"), ("sm_90a", "sm_80", "sm_75")):
        tf32 = arch == "sm_80" and a == np.float32
        for out in dict.fromkeys((a, np.dtype(np.float32), np.dtype(np.float16))):
            served = []
            for R, K, N in sizes:
                one = BlockProblem(arch, a, a, out, R, K, N, order, tf32)
                found = [kernel.of(one) for kernel in (BlockProductsSm90, BlockProductsSm80)]
                served += [(f"{R} {K} {N}", kernel) for kernel in found if kernel is not None]
            if served:
                text = " ; ".join(f"{size}: {_block(kernel)}" for size, kernel in served[::4])
                yield (
                    f"{arch} {number_name(a)} {number_name(out)} {order} {tf32}",
                    (f"{len(served)} {digest(kernel for _, kernel in served)} {text}"),
                )
    mixed = BlockProblem("sm_90a", dtypes[0], dtypes[-1], dtypes[0], 64, 64, 64)
    yield "mixed", f"{BlockProductsSm90.of(mixed)} {BlockProductsSm80.of(mixed)}"


def _block(kernel: Any) -> str:
    return f"{written(kernel)} | {kernel.threads} {kernel.stages} {kernel.shared_bytes}"


def number_name(dtype: np.dtype[Any]) -> str:
    return "bfloat16" if dtype == BFLOAT16 else str(dtype)


# ------------------------------------------------------------------------------------------------ all that is compiled
def ahead_of_time() -> Iterator[tuple[str, str]]:
    """All variants by kernel and type: how many, how many are rare, on which cards they run; and their digest."""
    archs = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
    found: dict[str, list[Kernel]] = {}
    for family in (*choice.DENSE, *BLOCKS, *LISTS, SpgemmPattern):
        for kernel in family.every(DEVICE_DTYPES):
            kind = getattr(kernel, "types", None)
            found.setdefault(f"{family.__name__} {kind.a if kind else ''}".strip(), []).append(kernel)
    for name, some in sorted(found.items()):
        rare = [bool(x.rare) for x in some]
        running = [[x.runs_on(arch) for x in some] for arch in archs]
        counts = " ".join(str(sum(x)) for x in (rare, *running))
        specs = [str(x.spec()) for x in some]
        yield name, f"{len(some)} {counts} {written_lists.digest([*specs, str(rare), str(running)])}"


SECTIONS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "gemm": gemm_choices,
    "variants": other_variants,
    "copies of B": copies_of_b,
    "any block": plain_choices,
    "vectors": spmv_small_choices,
    "few columns": spmm_small_choices,
    "blocks of a product": block_choices,
    "ahead of time": ahead_of_time,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_choices_are_those_that_were_written_down(section: str) -> None:
    written_lists.compare(PATH, section, SECTIONS[section])


TENSOR = GemmSm90 | GemmTurnedSm90 | GemmSm80


def test_every_first_choice_is_compiled_ahead_of_time() -> None:
    """`every` promises the kernels of products of one dtype on tensor cores."""
    listed = {kernel for family in choice.DENSE for kernel in family.every(DEVICE_DTYPES)}
    served = 0
    for one in (*sm90_problems(), *sm80_problems()):
        kernel = fastest(one, H200, False)
        promoted = one.types == names(one.types.a, index=one.types.index) or one.types.a == "e4m3"
        if promoted and isinstance(kernel, TENSOR) and one.types.c != "f64":
            served += 1
            assert kernel in listed, one
            assert kernel.runs_on(one.arch)
    assert served > 300


def test_the_first_variant_is_that_of_the_rule_and_none_comes_twice() -> None:
    for one in all_problems()[::5]:
        found = list(choice.variants(one))
        assert found[0] == fastest(one, H200, False) and len(set(found)) == len(found), one


def test_types_of_sums_are_those_of_the_dtypes() -> None:
    for name in ("f16", "bf16", "f32", "f64", "c64", "c128", "i8", "i64", "boolean"):
        assert number(names(name).acc)


if __name__ == "__main__":
    written_lists.write(PATH, SECTIONS)
