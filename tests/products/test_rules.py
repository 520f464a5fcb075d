"""Which kernel may serve a product: what is counted in 31 bits, how K is walked, what a measured choice depends on."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from bsrgemm._kernels import card, element_types
from bsrgemm._kernels.card import Card
from bsrgemm._products import gemm_sm80, spmm, tuned
from bsrgemm._products.block_products import SpgemmSimt
from bsrgemm._products.call import Problem
from bsrgemm._products.gemm_simt import GemmSimt, Spmv
from bsrgemm._products.gemm_sm80 import GemmSm80
from bsrgemm._products.gemm_sm90 import GemmSm90
from bsrgemm._products.spmm import Spmm, SpmmF64, spmm_staged
from bsrgemm._products.spmv_small import SpmvSmall
from bsrgemm._products.swap_ab_sm90 import GemmTurnedSm90

F16, F32, F64 = (np.dtype(x) for x in ("float16", "float32", "float64"))
TENSOR = (GemmSm90, GemmTurnedSm90, GemmSm80)


def tensor_cores_serve(one: Problem) -> bool:
    return any(kernel.serves(one) for kernel in TENSOR)


def problem(a: Any = F16, arch: str = "sm_90a", **changes: Any) -> Problem:
    acc = F64 if a == F64 else np.dtype(np.int32) if a == np.int8 else F32
    c = np.dtype(np.int32) if a == np.int8 else a
    usual = Problem(
        arch,
        element_types.types(np.dtype(a), np.dtype(a), c, acc, np.dtype(np.int32)),
        *(64, 64, 512, 1, 100, 100, 2000, False, "C", "C", True, True),
    )
    return replace(usual, **changes)


#: Each counts something in 31 bits or less: the last value that fits, and the first that does not.
LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiles": (
        {"block_rows": 4, "batches": (2**31 - 1) // (17 * 9)},
        {"block_rows": 4, "batches": 2**31 // (17 * 9) + 1},
    ),
    "tiles of many columns": ({"N": 64 * (2**31 // 401 - 1)}, {"N": 64 * (2**31 // 401 + 1)}),
    "rows": ({"block_rows": 2**25 - 1, "N": 64 * 14}, {"block_rows": 2**25, "N": 64 * 14}),
    "columns": ({"block_cols": 2**25 - 1}, {"block_cols": 2**25}),
    "rows of blocks": ({"blocks": 2**25 - 1, "K": 16}, {"blocks": 2**25, "K": 16}),
    "columns of blocks": ({"blocks": 2**25 - 1, "R": 16}, {"blocks": 2**25, "R": 16}),
}


def test_a_copied_block_has_fewer_than_2_32_elements() -> None:
    """gemm_sm80 multiplies the lines of a block by their length in 32 bits."""
    narrow = problem(np.dtype(np.int8), "sm_80", R=2**27, K=1, line=16, blocks=2, block_rows=1)
    assert GemmSm80.serves(narrow)
    assert not GemmSm80.serves(replace(narrow, line=32))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_what_the_tensor_cores_count_fits_their_integers(limit: str, arch: str) -> None:
    fits, too_large = LIMITS[limit]
    assert tensor_cores_serve(problem(arch=arch, **fits))
    assert not tensor_cores_serve(problem(arch=arch, **too_large))


def test_a_product_without_blocks_is_left_to_the_plain_cores() -> None:
    assert not tensor_cores_serve(problem(blocks=0))


@pytest.mark.parametrize("a", [F16, np.dtype(np.uint8)], ids=str)
@pytest.mark.parametrize("R", [16, 32, 64, 128, 192])
def test_steps_and_tail_cover_k(a: Any, R: int) -> None:
    """A block is walked in steps of `depth` and one of `tail`; a kernel that reads registers knows no tail."""
    fp8 = a == np.uint8
    names = element_types.scaled(element_types.types(a, a, F16, F32, np.dtype(np.int32))) if fp8 else None
    unit = 32 if fp8 else 16
    served = 0
    for K in range(unit, 577, unit):
        one = problem(R=R, K=K, b_order="F") if names is None else replace(problem(R=R, K=K, b_order="F"), types=names)
        if not GemmSm90.serves(one):
            continue
        served += 1
        config = GemmSm90.best(one)
        assert config.row_tile_height == max(h for h in (16, 32, 64, 128) if R % h == 0)
        assert 0 <= config.tail < config.depth and (K - config.tail) % config.depth == 0
        if config.row_tile_height < 64:
            assert config.tail == 0
    assert served or (fp8 and R % 64)


def test_blocks_that_fill_no_row_tile_of_64_rows_are_multiplied_turned() -> None:
    """Only row-major operands of 16 bits, a result that is only written, and lines of 16 n bytes."""
    large = problem(K=48, N=8192, block_rows=200)
    for R in range(1, 513):
        assert GemmTurnedSm90.serves(replace(large, R=R)) == (R % 64 > 0)
    for change in (
        {"b_order": "F"},
        {"c_order": "F"},
        {"transposed": True},
        {"overwrite": False},
        {"K": 20},
        {"R": 100, "batches": 2},
        {"arch": "sm_80"},
    ):
        assert not GemmTurnedSm90.serves(replace(large, **{"R": 96, **change}))
    assert GemmTurnedSm90.serves(replace(large, R=96, K=20, line=24))


def test_stages_of_a_turned_product_fit_and_steps_cover_k() -> None:
    for R, K, N in itertools.product(
        (8, 24, 40, 48, 72, 80, 96, 100, 120, 160), range(8, 257, 8), (136, 256, 1528, 8192)
    ):
        config = GemmTurnedSm90.best(problem(R=R, K=K, N=N))
        assert config.stages >= 3 and config.shared_bytes <= 232_448
        assert 0 <= config.tail < config.depth and (-(-K // 16) * 16 - config.tail) % config.depth == 0
        columns = -(-N // config.tile_n) * config.tile_n
        assert 10 * columns <= 11 * (-(-N // 256) * 256)


def test_a_kernel_with_a_tail_is_told_how_long_it_is() -> None:
    assert GemmSm90.best(problem(K=80)).tail == 80 % GemmSm90.best(problem(K=80)).depth > 0
    assert GemmSm90.best(problem(K=96)).tail == 0


@pytest.mark.parametrize("a", [F16, F32, F64, np.dtype(np.int8)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_gemm_sm80_reads_whole_pieces_of_16_bytes(a: Any, transposed: bool) -> None:
    for R in range(8, 65, 8):
        for K in range(4, 65, 4):
            one = problem(a, "sm_80", R=R, K=K, transposed=transposed)
            if GemmSm80.serves(one):
                assert (R if transposed else K) * a.itemsize % 16 == 0


# ------------------------------------------------------------------------------------------ shared memory
SM80 = GemmSm80(problem().types, "MMA_F16", 64, 2, 128, 2, 256, 3, False, False)
STAGED = spmm_staged(problem(F32).types, 3, 3, 16)


@pytest.mark.parametrize(("config", "rules"), [(SM80, gemm_sm80), (STAGED, spmm)], ids=["gemm_sm80", "spmm"])
def test_a_kernel_runs_where_its_shared_memory_fits_exactly(
    config: Any, rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bytes_, runs in ((0, True), (-1, False)):
        monkeypatch.setattr(rules, "shared_kb", lambda arch, room=bytes_: (config.shared_bytes + room) / 1024)
        assert config.runs_on("sm_80") == runs


def test_two_ctas_share_a_multiprocessor_whose_shared_memory_they_fit_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CTA takes 1 KiB beside its own, and a multiprocessor has 1 KiB more than a CTA may have."""
    light = replace(SM80, tile_n=64, stages=3)
    for bytes_, ctas in ((0, 2), (-1, 1)):
        whole = 2 * (light.shared_bytes + 1024) + bytes_
        monkeypatch.setattr(gemm_sm80, "shared_kb", lambda arch, whole=whole: whole / 1024 - 1)
        assert light.ctas("sm_80") == ctas


def test_one_cta_has_all_warps_where_its_shared_memory_fits_exactly() -> None:
    for size in (1, 2, 3, 4, 6, 8):
        for a in (F32, F64):
            for N in (4, 16, 64):
                names, room = problem(a).types, 1
                large = spmm_staged(names, size, size, N, 10**6)
                few = spmm_staged(names, size, size, N, room)
                assert few.threads == 128 and few.ctas >= 1
                if size * size * a.itemsize <= 32:
                    assert large == few
                    continue
                assert large.ctas == 1 and large.threads > 128
                kilobytes = -(-large.shared_bytes // 1024)
                if (size, a) == (4, F64) and kilobytes <= 99:  # as many warps as the next test wants
                    continue
                assert spmm_staged(names, size, size, N, kilobytes) == large
                assert spmm_staged(names, size, size, N, kilobytes - 1) == few


def test_float64_blocks_of_4_columns_have_fewer_warps_where_float64_units_are_few() -> None:
    for R, fewer in ((3, False), (4, True), (5, True)):
        names = problem(F64).types
        assert spmm_staged(names, R, 4, 16, card.shared_kb("sm_80")).threads == 768
        for arch in ("sm_86", "sm_89", "sm_120"):
            config = spmm_staged(names, R, 4, 16, card.shared_kb(arch))
            assert config.threads == (640 if fewer else 768)


@pytest.mark.parametrize(
    "sides, N, few", [((2, 4), 16, False), ((3, 3), 16, True), ((3, 4), 16, True), ((13, 1), 16, False)]
)
def test_few_blocks_of_65_to_100_bytes_are_copied_at_a_time(sides: tuple[int, int], N: int, few: bool) -> None:
    for lanes_suffice, columns in ((True, N), (False, 4)):
        found = spmm_staged(problem(F64).types, *sides, columns)
        room = found.chunk * sides[0] * sides[1] * 8
        assert (room <= 600) == (few and lanes_suffice) and room <= 1600


# ------------------------------------------------------------------------------------------ measured choices
#: A value other than the usual one for each field of a problem.
OTHERS: dict[str, Any] = {
    "arch": "sm_80",
    "types": element_types.types(F32, F32, F32, F32, np.dtype(np.int32)),
    "b_order": "F",
    "c_order": "F",
}


@pytest.mark.parametrize("name", [f.name for f in fields(Problem)])
def test_a_measured_choice_is_for_one_problem_in_every_field(name: str) -> None:
    usual = problem()
    value = getattr(usual, name)
    other = OTHERS.get(name, (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int) else None)
    assert other is not None and other != value
    assert tuned.signature(replace(usual, **{name: other})) != tuned.signature(usual)


# ------------------------------------------------------------------------------------------------- grids
H200 = Card("sm_90a", 132)


def grids(kernel: Any, *rows: int, N: int = 1, batches: int = 1, R: int = 1, card: Card = H200) -> list[Any]:
    """The grids of a kernel for so many block rows."""
    return [kernel.grid(problem(F32, block_rows=n, N=N, batches=batches, R=R), card) for n in rows]


def test_no_grid_is_larger_than_a_card_launches() -> None:
    """The kernels loop over what exceeds the grid."""
    names, much, x, yz = problem(F32).types, 2**50, 2**31 - 1, 65535
    all_much = {"N": much, "batches": much, "R": much}
    assert grids(GemmSimt(names, 8, 4, 32), much, N=much, R=much) == [(x, yz, yz)]
    assert grids(Spmv(names, 8, 8, 0, 0), much, R=much) == [(x, yz)]
    assert SpgemmSimt(names, 8).grid(much) == (x,)
    assert grids(SpmmF64("i32", 8, 8, 1, 3, 6), much, **all_much) == [(x, yz, yz)]
    assert grids(replace(STAGED, chunk=0), much, N=much, batches=3) == [(x, yz)]
    assert grids(STAGED, much, **all_much) == [(STAGED.ctas * 132, yz, yz)]
    vector = SpmvSmall(names, 3, 3, 4, 1, 1, 2, False)
    assert grids(vector, much) == [(x // 2,)] and grids(replace(vector, in_chunks=True), much) == [(4 * 132,)]


def test_a_grid_has_as_many_ctas_as_rows_need() -> None:
    names = problem(F32).types
    vector = SpmvSmall(names, 3, 3, 4, 1, 1, 2, False, rows_together=2)  # 32 groups of lanes, two rows each
    assert grids(vector, 0, 1, 64, 65) == [(1,), (1,), (1,), (2,)]
    chunks = replace(vector, in_chunks=True)  # a warp has eight groups
    assert grids(chunks, 0, 1, 8, 9, 8 * 528, 8 * 528 + 1) == [(n,) for n in (1, 1, 1, 2, 528, 528)]
    tiles = SpmmF64("i32", 20, 8, 2, 3, 6)  # three tiles of 8 rows: two warps for a block row
    assert grids(tiles, 1, 2, 3, N=33, batches=3) == [(1, 2, 3), (1, 2, 3), (2, 2, 3)]
    plain = replace(STAGED, chunk=0, threads=128, lanes=4, width=4)
    assert grids(plain, 1, 2, 4, 5, N=17, batches=3) == [(1, 2), (2, 2), (3, 2), (4, 2)]
    staged, small = replace(plain, chunk=4, ctas=2), Card("sm_90a", 5)
    found = grids(staged, 1, 4, 5, 40, 41, N=16, batches=3, card=small)
    assert found == [(n, 1, 3) for n in (1, 1, 2, 10, 10)]


def test_kernels_that_number_rows_and_batches_with_31_bits_leave_more_to_others() -> None:
    """Warps of spmm with staging look at rows after the last one, three steps of the grid ahead."""
    for dtype, block in ((np.dtype(np.float32), 2), (np.dtype(np.float64), 8)):
        names = element_types.types(dtype, dtype, dtype, dtype, np.dtype(np.int32))
        sizes = ("sm_90a", names, block, block, 4, 1, 1000, 1000, 30_000, False, "C", "C", True, True)
        usual = Problem(*sizes)
        longer = replace(usual, block_rows=2**31 - 1000)
        assert SpmmF64.serves(usual) == (block == 8) and Spmm.best(usual).staged == (block == 2)
        assert not SpmmF64.serves(longer) and not Spmm.best(longer).staged
    assert not SpmmF64.serves(replace(usual, batches=2**31))
