"""Every kernel compiles for every target without a GPU: no error, no spill, no warning, in time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bsrgemm._attention import choose
from bsrgemm._attention.attention_sm90 import AttentionSm90
from bsrgemm._attention.forward import DIMS
from bsrgemm._attention.forward import Problem as AttentionProblem
from bsrgemm._kernels import card, element_types, jit
from bsrgemm._kernels.kernel import Kernel
from bsrgemm._products import choice
from bsrgemm._products.call import Problem
from bsrgemm._products.costs import H200
from bsrgemm._products.gemm_sm80 import GemmSm80
from bsrgemm._products.gemm_sm90 import GemmSm90
from bsrgemm._products.prepared import fastest
from bsrgemm._products.spmm import Spmm, SpmmF64, spmm_staged
from bsrgemm._products.spmv_small import SpmvSmall
from bsrgemm._products.swap_ab_sm90 import GemmTurnedSm90
from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES, accumulator_dtype

from ..conftest import LONG
from . import outcomes, variants
from .variants import TARGETS

pytest.importorskip("cupy")

#: A variant is to take 4 s of CPU time on a quiet core: the slowest took 2.8 s on one machine, 3.2 to 3.7 s on another
#: and 4.2 s beside other work; on a third, whose two cores are threads of one, 6.5 s. The long profile allows for that;
#: by default a variant is only to end.
SECONDS = 8.0 if LONG else 10.0
#: Tests that share the variants of a kernel, where these take more than about 8 s together.
PARTS = {
    "attention_sm80": 4,
    "attention_backward_sm80": 3,
    "gemm_sm80": 4,
    "attention_sm90": 3,
    "gemm_sm90": 3,
    "decode": 3,
    "block_products_sm80": 2,
}
#: Tests that share the variants of all kernels for one target.
LONG_PARTS, ALL_PARTS = 16, 64

#: Types of products with indices of 32 bits, by their elements.
_TYPES = {
    name: element_types.Types(name, name, name, acc)
    for name, acc in (("f32", "f32"), ("f64", "f64"), ("c64", "c64"), ("i64", "u64"))
}

#: Bytes that NVRTC 12.9 spills. Attention: wide heads, in kernels that have all 255 registers of a thread already
#: (attention_sm80) or all that 384 threads can have (attention_sm90). What these spills cost was not measured.
#: spmm: float64 blocks of 4 x 4 with the 24 warps of cards that have more shared memory. sm_86 and sm_89 can run that
#: variant, but the rule has 20 warps for them, which do not spill. attention_backward_sm90: the producer warps have 24
#: registers, all that the consumers leave; they wait for most of a turn. So do those of attention_backward_keys_sm90.
#: Of these bytes 4 and 16 came with places of a mask's blocks in 64 bits.
#: attention_backward_sm80: dv of 256 columns with a softcap, since its walk over tiles is in a header.
#: A rule has targets, the entry, the bytes, and definitions of the variants that it is for.
KNOWN_SPILLS: tuple[tuple[str, str, int, str], ...] = (
    ("sm_90a", "attention_sm90", 8, "ELEMENT_O=f32 HEAD_DIM=256 VALUE_DIM=256 TILE_Q=128 SCORES=2 MMA_K=16"),
    ("sm_90a", "attention_sm80", 20, "ELEMENT=f16 ELEMENT_O=f16 HEAD_DIM=96 VALUE_DIM=128 TILE_Q=128 SCORES=1"),
    *(
        (target, "attention_backward_sm80", bytes_, f"ELEMENT={a} ELEMENT_O={a} HEAD_DIM={D} VALUE_DIM={D_v} {more}")
        for target, bytes_, a, D, D_v, more in (
            ("sm_80 sm_90a", 4, "f16", 128, 128, "SCORES=1 ROLE=1 TILE_K=128"),
            ("sm_90a", 4, "f16", 96, 128, "SCORES=1 ROLE=1 TILE_K=128"),
            ("sm_100", 16, "f16", 256, 80, "SCORES=2 ROLE=0 TILE_K=32"),
            *(("sm_120", 20, a, D, 256, "SCORES=2 ROLE=3 TILE_Q=32") for a in ("f16", "bf16") for D in DIMS),
        )
    ),
    ("sm_90a", "attention_backward_sm90", 228, "SCORES=1"),
    ("sm_90a", "attention_backward_sm90", 320, "SCORES=2"),
    ("sm_90a", "attention_backward_keys_sm90", 192, "SCORES=1"),
    ("sm_90a", "attention_backward_keys_sm90", 304, "SCORES=2"),
    ("sm_86 sm_89", "spmm", 8, "ELEMENT_A=f64 INDEX=i32 BLOCK_R=4 BLOCK_C=4 THREADS=768"),
)
#: Bytes that 133 of the 1,680 variants of spmm with four blocks under way spill at most, in no pattern. Fewer CTAs,
#: which spill nothing, were 10 to 20 % slower on an H200 (complex64 and int64, 2 x 2).
FOUR_BLOCKS = 184


def _name(kernel: Kernel) -> str:
    """The kernel of a product, and whether its blocks come through shared memory."""
    return "spmm, staged" if isinstance(kernel, Spmm) and kernel.staged else kernel.spec().entry


def _known(spec: jit.KernelSpec, arch: str) -> int:
    """The bytes that a variant may spill."""
    if spec.entry == "spmm" and dict(spec.defines)["TOGETHER"] == 4:
        return FOUR_BLOCKS
    own = {f"{name}={value}" for name, value in spec.defines}
    rules = [rule for rule in KNOWN_SPILLS if arch in rule[0].split() and rule[1] == spec.entry]
    return max((bytes_ for *_, bytes_, defines in rules if own.issuperset(defines.split())), default=0)


def check(spec: jit.KernelSpec, arch: str) -> None:
    """Refuse what the compiler should not have had to say."""
    found = outcomes.outcome(spec, arch)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", found.log)]
    assert spills, f"no resource report in the log:\n{found.log}"
    assert f"entry function '{spec.entry}'" in found.log, (
        f"{spec.entry} is not among the kernels of the log:\n{found.log}"
    )
    assert max(spills) <= _known(spec, arch), f"{spec} for {arch}\n{found.log}"
    assert "warning" not in found.log.lower(), f"{spec} for {arch}\n{found.log}"
    assert not re.search(r"C75\d\d", found.log), f"{spec} for {arch}\n{found.log}"
    assert found.seconds <= SECONDS, f"{spec} for {arch} took {found.seconds:.1f} s"


@pytest.mark.parametrize(("kernel", "part"), [(k, part) for k in variants.kernels() for part in range(PARTS.get(k, 1))])
def test_spanning_variants_compile_cleanly(kernel: str, part: int) -> None:
    jobs = [(spec, target) for target in TARGETS for spec in variants.quick(kernel, target)]
    mine = jobs[part :: PARTS.get(kernel, 1)]
    assert mine
    for spec, target in mine:
        check(spec, target)


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS))
@pytest.mark.parametrize("target", TARGETS)
def test_many_variants_compile_cleanly(target: str, part: int) -> None:
    for spec in variants.long(target)[part::LONG_PARTS]:
        check(spec, target)


@pytest.mark.parametrize(
    ("target", "element", "index", "block"),
    [
        ("sm_86", "f64", "i32", (4, 4)),
        ("sm_90a", "f32", "i32", (16, 1)),
    ],
    ids=str,
)
def test_spmm_has_registers_for_its_sums(target, element, index, block) -> None:
    """Variants that spilled 8 to 72 bytes when the rules promised more warps."""
    names = replace(_TYPES[element], index=index)
    spec = spmm_staged(names, *block, 64, card.shared_kb(target)).spec()
    assert _known(spec, target) == 0
    check(spec, target)


@pytest.mark.every_variant
@pytest.mark.parametrize("part", range(ALL_PARTS))
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles_cleanly(target: str, part: int) -> None:
    for spec in [spec for kernel in variants.kernels() for spec in variants.every(kernel, target)][part::ALL_PARTS]:
        check(spec, target)


def test_every_kernel_of_the_sources_is_listed_and_every_listed_one_is_there() -> None:
    assert variants.listed_kernels() == set(variants.kernels())


def test_the_span_compiles_every_kernel_for_every_target_that_it_runs_on_but_two_between_others() -> None:
    for kernel, target in itertools.product(variants.kernels(), TARGETS):
        mine = target not in variants.BETWEEN or target == variants.turn_of(kernel)
        assert bool(variants.quick(kernel, target)) == (mine and bool(variants.every(kernel, target))), (kernel, target)
    for target in variants.BETWEEN:
        assert sum(bool(variants.quick(kernel, target)) for kernel in variants.kernels()) >= 5


@pytest.mark.long
def test_the_long_profile_compiles_every_kernel_for_every_target_that_it_runs_on() -> None:
    for target in TARGETS:
        met = {spec.entry for spec in variants.long(target)}
        assert met == {kernel for kernel in variants.kernels() if variants.every(kernel, target)}


@pytest.mark.parametrize("kernel", variants.kernels())
def test_the_span_gives_every_constant_every_value_and_the_quick_one_some_of_them(kernel: str) -> None:
    def values(specs: list[jit.KernelSpec], kind: type = object) -> dict[str, set[str | int]]:
        found: dict[str, set[str | int]] = {}
        for name, value in (d for spec in specs for d in spec.defines if isinstance(d[1], kind)):
            found.setdefault(name, set()).add(value)
        return found

    own = variants.MEASURED
    if "__CUDA_ARCH__" in variants.text_of(kernel):  # every path on Ampere, every type on the measured card
        assert values(variants.quick(kernel, own), str) == values(variants.every(kernel, own), str)
        own = variants.AMPERE
    every, quick = values(variants.every(kernel, own)), values(variants.quick(kernel, own))
    assert values(variants.span(kernel, own)) == every
    assert quick.keys() == every.keys() and all(variants.some_of(every[name]) <= quick[name] for name in every)


def test_of_many_numbers_the_smallest_the_middle_one_and_the_largest_are_some() -> None:
    assert variants.some_of({"f32", "f16", 64, 80, 96, 128, 192, 256}) == {"f32", "f16", 64, 96, 256}
    assert variants.some_of({1, 2}) == {1, 2} and variants.some_of({"u32"}) == {"u32"}


def test_the_span_compiles_every_element_type_in_a_product() -> None:
    met = {dict(spec.defines)["ELEMENT_A"] for spec in variants.quick("gemm_simt", variants.MEASURED)}
    assert met == {element_types.element(dtype) for dtype in DEVICE_DTYPES} | {"e4m3"}


# --------------------------------------------------------------------------------- kept outcomes
@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source of one small kernel, and a cache of its own."""
    root = tmp_path / "cuda"
    root.mkdir()
    (root / "tiny.cu").write_text('extern "C" __global__ void tiny(int* x) { x[threadIdx.x] = SIZE; }\n')
    monkeypatch.setenv(outcomes.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("bsrgemm._kernels.jit.cuda_root", lambda: root)
    yield root / "tiny.cu"


TINY = jit.KernelSpec("tiny.cu", "tiny", (("SIZE", 3),))


def test_an_outcome_is_compiled_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(TINY, "sm_80")
    monkeypatch.setattr(jit, "compile_cubin", lambda *args: pytest.fail("compiled again"))
    check(TINY, "sm_80")


def test_a_spill_fails_from_the_cache_too(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ptxas info: Compiling entry function 'tiny' for 'sm_80'\n"
    said += "ptxas info: 0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads"
    monkeypatch.setattr(jit, "compile_cubin", lambda *args: jit.Compiled(b"", said, 0.0))
    with pytest.raises(AssertionError, match="8 bytes spill"):
        check(TINY, "sm_80")
    monkeypatch.setattr(jit, "compile_cubin", lambda *args: pytest.fail("compiled again"))
    with pytest.raises(AssertionError, match="8 bytes spill"):
        check(TINY, "sm_80")


def test_kernels_of_one_source_share_an_outcome_that_names_them(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_text(tiny.read_text() + tiny.read_text().replace("tiny", "other"))
    check(TINY, "sm_80")
    monkeypatch.setattr(jit, "compile_cubin", lambda *args: pytest.fail("compiled again"))
    check(replace(TINY, entry="other"), "sm_80")
    with pytest.raises(AssertionError, match="third is not among the kernels"):
        check(replace(TINY, entry="third"), "sm_80")


@pytest.mark.parametrize("change", ["source", "target", "define", "options", "compiler", "damage"])
def test_an_outcome_of_anything_else_is_compiled(change: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = outcomes.outcome(TINY, "sm_80")
    spec, target = TINY, "sm_80"
    if change == "source":
        tiny.write_text(tiny.read_text().replace("threadIdx.x", "blockIdx.x"))
    elif change == "target":
        target = "sm_86"
    elif change == "define":
        spec = replace(TINY, defines=(("SIZE", 4),))
    elif change == "options":
        monkeypatch.setattr(jit, "options", lambda *args, was=jit.options: (*was(*args), "--use_fast_math"))
    elif change == "compiler":
        monkeypatch.setattr(outcomes, "compiler", lambda: ("another",))
    else:
        where = outcomes.folder()
        assert where is not None
        (entry,) = where.glob("*.json")
        entry.write_text(entry.read_text().replace("bytes spill", "bytes spelt"))
    done: list[str] = []

    def compiled(spec: jit.KernelSpec, arch: str) -> jit.Compiled:
        done.append(arch)
        return jit.Compiled(b"", first.log, 0.0)

    monkeypatch.setattr(jit, "compile_cubin", compiled)
    outcomes.outcome(spec, target)
    assert done == [target]


def test_an_empty_variable_keeps_no_outcome(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(outcomes.VARIABLE, "")
    outcomes.outcome(TINY, "sm_80")
    assert outcomes.folder() is None and not (tmp_path / "cache").exists()


# ----------------------------------------------------------------------------------- the choices
def test_fp8_attention_is_listed() -> None:
    listed = set(AttentionSm90.every(DEVICE_DTYPES))
    names = [np.dtype(x) for x in ("uint8", "float32")]
    for D, D_v in itertools.product((1, 16, 64, 80, 96, 128, 160, 256), repeat=2):
        for how, out, writes in itertools.product((0, 1, 2), ("float16", "float32", BFLOAT16), (False, True)):
            for rows, keys, fine in itertools.product((1, 10**6), (1, 10**6), (False, True)):
                sizes = (D, D_v, how, True, writes, rows, keys, fine)
                problem = AttentionProblem("sm_90a", names[0], np.dtype(out), names[1], *sizes, fp8=True)
                config = choose.choose(problem)
                assert isinstance(config, AttentionSm90) and config in listed
                assert config.fp8 and config.head_dim >= D and config.value_dim >= D_v
                assert config.store_tiles == (writes and out != "float32")
                for change in ({"arch": "sm_89"}, {"reads": False}, {"head_dim": 257}):
                    assert choose.choose(replace(problem, **change)).spec().entry == "attention_simt"


def chosen(problem: Problem) -> Kernel:
    """The kernel with the shortest predicted time, without copies of operands."""
    return fastest(problem, H200, False)


def test_only_listed_kernels_are_chosen() -> None:
    listed = {kernel for family in choice.DENSE for kernel in family.every(DEVICE_DTYPES)}
    for R, C in itertools.product((1, 3, 16, 32, 33, 48, 64, 96, 128, 192), (1, 2, 8, 15, 16, 32, 48, 64, 80, 144)):
        for N, dtype in itertools.product((1, 2, 9, 16, 64, 100, 4096), DEVICE_DTYPES):
            wide = np.dtype(np.int32) if element_types.element(dtype) == "i8" else dtype
            for transposed, index in ((False, "i4"), (False, "i8"), (True, "i4")):
                acc = accumulator_dtype(wide)
                names = element_types.types(dtype, dtype, wide, acc, np.dtype(index))
                for order, tf32 in itertools.product(("C", "F", ""), (False, True)):
                    problem = Problem(
                        "sm_90a", names, R, C, N, 1, 10, 10, 30, transposed, order, order, True, True, tf32
                    )
                    config = chosen(problem)
                    if isinstance(config, GemmSm80 | GemmSm90 | GemmTurnedSm90):
                        config = replace(config, types=replace(config.types, index="i32"))
                    elif wide != dtype or isinstance(config, SpmvSmall | Spmm | SpmmF64):
                        continue
                    assert config in listed, config


@pytest.mark.parametrize(
    ("dtype", "block", "b_order", "kernel", "plain", "vector"),
    [
        ("float16", (128, 128), "C", "gemm_sm90", "gemm_simt", "gemm_few"),
        ("float16", (16, 16), "F", "gemm_sm90", "spmm", "spmv_small"),
        ("float16", (16, 16), "", "spmm", "spmm", "spmv_small"),
        ("float16", (24, 16), "C", "gemm_turned_sm90", "gemm_simt", "spmv"),
        ("float32", (32, 32), "C", "gemm_sm80", "gemm_simt", "spmv"),
        ("float64", (32, 32), "C", "spmm_f64", "gemm_simt", "spmv"),
        ("float64", (3, 3), "C", "spmm, staged", "gemm_simt", "spmv_small"),
        ("complex64", (32, 32), "C", "gemm_simt", "gemm_simt", "spmv"),
        ("int16", (17, 3), "C", "gemm_simt", "gemm_simt", "spmv"),
    ],
)
def test_the_kernel_follows_from_the_problem(dtype, block, b_order, kernel, plain, vector) -> None:
    dtype = np.dtype(dtype)
    names = element_types.types(dtype, dtype, dtype, accumulator_dtype(dtype), np.dtype("i4"))
    problem = Problem("sm_90a", names, *block, 100, 1, 10, 10, 30, False, b_order, "C", True, True)
    assert _name(chosen(problem)) == kernel
    assert _name(chosen(replace(problem, N=1))) == vector
    assert _name(chosen(replace(problem, aligned=False))) == plain
    assert _name(chosen(replace(problem, arch="sm_75"))) in ("spmm", "gemm_simt")
    assert all(c.spec().entry for c in choice.variants(problem))


@pytest.mark.parametrize(
    ("dtype", "block", "entries"),
    [
        ("float32", (16, 16), {2: "spmm, staged", 64: "spmm, staged", 72: "spmm, staged"}),
        ("float64", (16, 16), {2: "spmm_f64", 3: "spmm", 16: "spmm_f64", 64: "spmm_f64", 65: "gemm_sm80"}),
        ("float64", (128, 128), {2: "spmm_f64", 64: "gemm_sm80", 66: "gemm_sm80"}),
        ("float64", (20, 20), {16: "spmm_f64", 128: "spmm_f64", 130: "spmm_f64"}),
        ("float64", (144, 16), {16: "gemm_sm80"}),
        ("float16", (16, 16), {16: "gemm_sm90"}),
        ("float16", (32, 32), {1: "gemm_few", 8: "gemm_few", 9: "gemm_sm90"}),
    ],
    ids=str,
)
def test_few_columns_read_blocks_once(dtype, block, entries) -> None:
    dtype = np.dtype(dtype)
    names = element_types.types(dtype, dtype, dtype, accumulator_dtype(dtype), np.dtype("i4"))
    problem = Problem("sm_90a", names, *block, 1, 1, 1000, 1000, 30_000, False, "C", "C", True, True)
    assert {N: _name(chosen(replace(problem, N=N))) for N in entries} == entries
    for other in (replace(problem, transposed=True), replace(problem, c_order="F")):
        assert _name(chosen(replace(other, N=16))) not in ("spmm, staged", "spmm_f64")
