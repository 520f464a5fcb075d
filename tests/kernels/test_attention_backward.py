"""All that is promised of the kernels for the gradients of attention: one table, beside the host in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import backward_kernel, backward_sm90
from bsrgemm._attention.choose import calls_of
from bsrgemm._kernels import workspace
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm.dtypes import BFLOAT16 as BF16

from ..devices import Device, Emulated
from .products import F16, F32, F64, few_ctas

CUDA = Path(__file__).resolve().parents[2] / "cuda"
#: By how much weights and their gradients are rounded, of the largest gradient.
ROUNDING = {F16: 3e-3, BF16: 2.4e-2, F32: 2e-5, F64: 1e-11}
NAMES = ("dq", "dk", "dv")
#: Class of the kernel -> its entry, and the card that it needs.
KERNELS = {
    "BackwardSm90": ("attention_backward_sm90", "sm_90a"),
    "BackwardKeysSm90": ("attention_backward_keys_sm90", "sm_90a"),
    "BackwardFused": ("attention_backward_fused", "sm_80"),
    "BackwardSm80": ("attention_backward_sm80", "sm_80"),
    "BackwardSimt": ("attention_backward_simt", "sm_75"),
}
SM90, KEYS, FUSED, SM80, SIMT = KERNELS
#: Bounds of sequences of different lengths among queries and keys, one of which has no queries.
SEQUENCES: dict[str, Any] = {"cu_seqlens_q": [0, 30, 30, 100], "cu_seqlens_k": [0, 70, 90, 140]}


@dataclass(frozen=True)
class Case:
    """Gradients: the lengths of queries and keys, the columns of keys and values, and the options."""

    lengths: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    #: heads of queries and of keys
    heads: tuple[int, int] = (2, 1)
    dtype: Any = F16
    batch: int = 1
    causal: bool = False
    window: tuple[int, int] | None = None
    align: str = "bottom-right"
    softcap: float | None = None
    scale: float | None = None
    #: a number of blocks in each row, the side of a block, and heads with a pattern; or the side of blocks of elements
    blocks: tuple[int, int, tuple[int, int]] | None = None
    elements: int = 0
    #: sums in any order too
    any_order: bool = False
    sequences: bool = False

    def __str__(self) -> str:
        changes = {name: x for name, x in vars(self).items() if name != "lengths" and x != getattr(USUAL, name)}
        return "-".join(map(str, [*self.lengths, *(f"{name}={x}" for name, x in changes.items())])).replace(" ", "")

    def served_by(self) -> Iterator[str]:
        """The kernels that compute it."""
        widest = max(self.dims)
        if self.dtype in (F16, BF16):
            yield SM90 if widest <= 128 else KEYS
            if min(self.dims) > 96 and widest <= 128 and self.softcap is None and self.any_order:
                yield FUSED
            yield SM80
        yield SIMT

    def options(self, rng: np.random.Generator) -> dict[str, Any]:
        found: dict[str, Any] = {"causal": self.causal, "window": self.window, "align": self.align}
        found |= {"softcap": self.softcap, "scale": self.scale}
        if self.blocks:
            per_row, block, heads = self.blocks
            found["mask"] = bg.BlockMask.random(
                *self.lengths, per_row=per_row, block=block, heads=heads, seed=block, device="cpu"
            )
        elif self.elements:
            dense = rng.random(self.lengths) < 0.3
            # A query that sees nothing, a key that nobody sees, a tile of them, and blocks that are not stored.
            dense[7], dense[:, 9], dense[:, 128:192], dense[64:128, :64] = False, False, False, False
            found["mask"] = bg.BlockMask.from_dense(dense, block=self.elements)
        return {name: x for name, x in (found | (SEQUENCES if self.sequences else {})).items() if x is not None}


USUAL = Case((0, 0))


def cases(*every: Case, kernels: tuple[str, ...] = tuple(KERNELS), large: tuple[Case, ...] = ()) -> Any:
    """A mark with all cases for each kernel that computes them; large ones run on a card alone."""
    params = [
        pytest.param(kernel, case, marks=mark, id=f"{kernel}-{case}")
        for some, mark in ((every, ()), (large, pytest.mark.large))
        for case in some
        for kernel in case.served_by()
        if kernel in kernels
    ]
    return pytest.mark.parametrize(("kernel", "case"), params)


def operands(rng: np.random.Generator, case: Case) -> list[Any]:
    """q, k, v and dout on the host."""
    (S_q, S_k), (D, D_v), (H, H_kv) = case.lengths, case.dims, case.heads
    shapes = ((H, S_q, D), (H_kv, S_k, D), (H_kv, S_k, D_v), (H, S_q, D_v))
    if case.sequences:
        return [rng.standard_normal((x[1], x[0], x[2])).astype(case.dtype) for x in shapes]
    return [rng.standard_normal((case.batch, *x)).astype(case.dtype) for x in shapes]


def wanted(some: Any, **options: Any) -> tuple[Any, ...]:
    """Result, logarithms and gradients in float64 on the host."""
    dlse = options.pop("dlse", None)
    q, k, v, dout = (x.astype(np.float64) for x in some)
    with np.errstate(all="ignore"):
        out, lse = bg.attention(q, k, v, return_lse=True, **options)
        return out, lse, *bg.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)


@contextmanager
def only(device: Device, kernel: str) -> Iterator[None]:
    """Inside, gradients are computed by a kernel, on a card that has it; on the emulator by few CTAs.

    What is remembered of calls without a mask is forgotten, so that they are prepared here.
    """
    entry, _ = KERNELS[kernel]
    calls_of(None).clear()
    with device.kernels() as names, force_kernel(kernel), few_ctas(1):
        yield
    others = {x for x, _ in KERNELS.values()} - {entry}
    assert entry in names and not others & set(names)


def gradients(device: Device, kernel: str, some: Any, **options: Any) -> list[np.ndarray[Any, Any]]:
    """dq, dk and dv by a kernel, written over what was there."""
    q, k, v, dout, out, lse, delta = (None if x is None else device.asarray(x) for x in some)
    results = {name: device.asarray(np.full_like(x, 113)) for name, x in zip(NAMES, some, strict=False)}
    if "mask" in options:
        options["mask"] = options["mask"].to_device("cuda")
    with only(device, kernel):
        bg.attention_backward(dout, q, k, v, out, lse, delta=delta, **results, **options)
    return [device.asnumpy(x).astype(np.float64) for x in results.values()]


def check(device: Device, kernel: str, some: Any, with_out: bool = False, **options: Any) -> None:
    """The gradients by a kernel, from sums of ``dout * out`` that are given, or from the result."""
    dtype = some[0].dtype
    acc = F64 if dtype == F64 else F32
    forward = {name: x for name, x in options.items() if name != "deterministic"}
    out, lse, *want = wanted(some, **forward)
    delta = (out * some[3].astype(np.float64)).sum(axis=-1)
    delta = delta.swapaxes(0, 1) if "cu_seqlens_q" in options else delta
    saved = (out.astype(dtype), lse.astype(acc), None) if with_out else (None, lse.astype(acc), delta.astype(acc))
    got = gradients(device, kernel, (*some, *saved), **options)
    for name, x, y in zip(NAMES, got, want, strict=True):
        bound = ROUNDING[dtype] * max(1, np.abs(y[np.isfinite(y)]).max(initial=0))
        np.testing.assert_allclose(x, y, rtol=0, atol=bound, err_msg=name)


def check_case(device: Device, kernel: str, case: Case, rng: np.random.Generator, **how: Any) -> None:
    """The gradients of a case by a kernel; also with sums in any order, if these are asked for."""
    some, options = operands(rng, case), case.options(rng)
    for deterministic in (False,) if kernel == FUSED else (True, False) if case.any_order else (True,):
        check(device, kernel, some, deterministic=deterministic, **how, **options)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture(autouse=True)
def card(request: pytest.FixtureRequest, device: Device) -> None:
    """The card that the kernel of a test needs; an emulated one has few CTAs, so that each has several tiles."""
    params = request.node.callspec.params
    device.needs(params.get("arch") or KERNELS[params.get("kernel", SM90)][1])
    if isinstance(device, Emulated):
        device.becomes(multiprocessors=1)


def of_kernels(*kernels: str) -> Any:
    return pytest.mark.parametrize("kernel", kernels)


# ------------------------------------------------------------------------------------------------ the table
@pytest.mark.before
@pytest.mark.sanitizer
@cases(
    Case((1, 1)),
    Case((20, 30)),
    Case((70, 150), causal=True),
    Case((130, 70), causal=True),  # the first rows see nothing
    Case((64, 300), window=(40, 3)),
    Case((33, 65), (128, 128), softcap=3.0, scale=-0.2),
    Case((70, 90), (32, 32), causal=True, align="top-left"),
    Case((70, 90), heads=(6, 2), dtype=BF16, batch=2, causal=True),
    Case((30, 90), (256, 256)),
    Case((30, 90), (40, 24), causal=True),  # tiles of which not all columns are there
    Case((70, 90), (32, 128)),
    Case((150, 40), (192, 96), causal=True),
    Case((70, 150), (136, 136), heads=(4, 2), dtype=BF16, window=(90, 10), any_order=True),
    Case((200, 150), causal=True, any_order=True),
    Case((150, 200), (128, 128), causal=True, any_order=True),
    Case((70, 300), (100, 100), scale=-0.2, align="top-left", causal=True, any_order=True),
    Case((70, 150), (128, 128), heads=(4, 2), dtype=BF16, batch=2, causal=True, any_order=True),
    Case((100, 140), causal=True, sequences=True),
    Case((100, 140), (128, 128), causal=True, sequences=True, any_order=True),
    Case((100, 140), (192, 192), causal=True, sequences=True),
    large=(
        *(Case((S, S), (D, D), causal=True) for S in (1, 63, 129, 515) for D in (64, 128, 192, 256)),
        *(Case(x, (128, 128), (6, 2), batch=2, window=(100, 30)) for x in ((300, 777), (777, 300), (1, 1000))),
        *(Case((200, 333), x, (4, 1), causal=True) for x in ((80, 80), (72, 40), (192, 128))),
        *(Case((200, 333), x, (4, 1), BF16, causal=True) for x in ((96, 96), (136, 200), (256, 256))),
        *(Case((150, 260), (D, D), x, batch=2, causal=True) for D in (128, 256) for x in ((7, 1), (14, 2), (16, 2))),
        *(Case((140, 300), (D, D), causal=True, scale=x) for D in (64, 256) for x in (-0.3, 0.0)),
        *(Case((515, 1030), (100, 100), (4, 2), dtype, 2, True, any_order=True) for dtype in (F16, BF16)),
    ),
)  # fmt: skip
def test_gradients_are_those_of_the_host(kernel: str, case: Case, device: Device, rng: np.random.Generator) -> None:
    check_case(device, kernel, case, rng)


@cases(
    Case((150, 200), blocks=(2, 32, (1, 1))),
    Case((150, 200), blocks=(1, 16, (1, 2)), window=(60, 20)),
    Case((100, 130), heads=(4, 2), batch=2, blocks=(2, 32, (2, 2))),  # two heads share a pattern
    Case((130, 200), blocks=(2, 64, (1, 1)), any_order=True),
    Case((150, 200), elements=64, causal=True, any_order=True),
    Case((150, 200), (128, 128), (2, 2), elements=64, causal=True, any_order=True),
    Case((200, 150), (128, 128), (2, 2), blocks=(2, 32, (1, 2)), any_order=True),
    Case((130, 200), (192, 100), elements=64, causal=True),
    Case((50, 70), (24, 40), (2, 2), F32, elements=16),
    large=tuple(
        Case((700, 900), (D, D), (4, 2), batch=2, blocks=(2, block, heads), causal=causal, any_order=True)
        for D in (64, 128, 192)
        for block, heads, causal in ((16, (1, 1), True), (64, (2, 2), False), (128, (1, 4), True), (256, (1, 4), False))
    ),
)
def test_masks_by_blocks_and_elements(kernel: str, case: Case, device: Device, rng: np.random.Generator) -> None:
    """Queries that see nothing, keys that nobody sees."""
    check_case(device, kernel, case, rng)


@cases(
    *(Case((140, 150), (D, D), causal=True, softcap=0.6) for D in (64, 128, 192, 256)),
    *(Case((140, 150), (D, D), softcap=30.0, scale=-0.3, elements=B) for D, B in ((64, 32), (128, 64), (192, 32))),
    kernels=(SM90, KEYS, SM80),
    large=tuple(
        Case((333, 515), (D, D), (4, 2), dtype, softcap=softcap, blocks=blocks, any_order=True)
        for D in (40, 64, 80, 128, 192, 256)
        for dtype, softcap in ((F16, 0.6), (BF16, 30.0))
        for blocks in (None, (2, 32, (1, 4)), (2, 64, (1, 4)), (2, 128, (1, 4)))
    ),
)
def test_softcap_with_bands_and_masks(kernel: str, case: Case, device: Device, rng: np.random.Generator) -> None:
    """Slopes near 0 and near 1."""
    check_case(device, kernel, case, rng)


@cases(
    *(Case((40, 70), (24, 40), (4, 2), dtype, causal=True) for dtype in (F32, F64)),
    *(Case((40, 70), (24, 40), (4, 2), dtype, softcap=2.0, window=(20, 5)) for dtype in (F16, BF16, F32, F64)),
    large=tuple(Case((130, 170), (64, 64), (4, 2), dtype, window=(100, 30)) for dtype in (F32, F64)),
    kernels=(SIMT,),
)
def test_cuda_cores_serve_every_dtype(kernel: str, case: Case, device: Device, rng: np.random.Generator) -> None:
    check_case(device, kernel, case, rng)


@pytest.mark.parametrize("arch", ["sm_86"])
@cases(Case((70, 90), causal=True), Case((70, 90), (128, 128)), Case((40, 70), (256, 256)), kernels=(SM80,))
def test_cards_with_less_shared_memory(
    kernel: str, case: Case, arch: str, device: Device, rng: np.random.Generator
) -> None:
    check_case(device, kernel, case, rng)


# ----------------------------------------------------------------------------------------------- races of threads
@pytest.mark.races
@cases(
    Case((200, 150), heads=(1, 1), causal=True),
    # Nobody waits for the look-up of a mask in a turn that is whole; its description is written over four turns later.
    Case((384, 128), heads=(1, 1)),
    Case((200, 150), heads=(1, 1), causal=True, softcap=5.0),
    Case((320, 70), heads=(1, 1), blocks=(1, 64, (1, 1))),  # several turns on the same 64 keys
    # Two tiles of keys follow each other, and the weights of several turns pass through the same memory.
    Case((200, 70), (192, 192), (1, 1), causal=True),
    Case((200, 150), (128, 128), (1, 1), causal=True, any_order=True),
    kernels=(SM90, KEYS, FUSED, SM80),
)
def test_turns_without_races(kernel: str, case: Case, device: Device, rng: np.random.Generator) -> None:
    check_case(device, kernel, case, rng)


@pytest.mark.races
@of_kernels(SM80)
def test_rows_that_are_not_finite_are_written_again_without_races(
    kernel: str, device: Device, rng: np.random.Generator
) -> None:
    """By other lanes of a warp than those that wrote them first."""
    some = operands(rng, Case((10, 10), heads=(1, 1)))
    some[2][:, :, 7, 5] = np.inf  # dq of all queries that see the key, and dk of all keys that those see
    out, lse, *want = wanted(some)
    assert all(np.isnan(x).any() for x in want[:2])
    got = gradients(device, kernel, (*some, out.astype(F16), lse.astype(F32), None))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))


# ------------------------------------------------------------------------------------------ infinity, NaN, softcaps
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@cases(
    Case((40, 70), causal=True),
    Case((40, 70), (128, 128), causal=True, any_order=True),
    Case((40, 70), (192, 192), causal=True),
    kernels=(SM90, KEYS, FUSED, SM80),
    large=tuple(Case((200, 300), (D, D), causal=True, softcap=x) for D in (128, 256) for x in (None, 3.0)),
)
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(
    kernel: str, case: Case, name: str, device: Device, rng: np.random.Generator
) -> None:
    some = dict(zip(("q", "k", "v", "dout"), operands(rng, case), strict=True))
    some[name][:, :, 33, 5] = np.nan
    options = case.options(rng)
    out, lse, *want = wanted(some.values(), **options)
    saved = (out.astype(F16), lse.astype(F32), None)
    got = gradients(device, kernel, (*some.values(), *saved), deterministic=kernel != FUSED, **options)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-3 * max(1, np.nanmax(np.abs(y), initial=0)))


@pytest.mark.parametrize("deterministic", [True, False])
@cases(*(Case((70, 100), (D, D), (1, 1)) for D in (64, 128, 192)), kernels=(SM90, KEYS))
def test_rows_that_are_computed_again_have_the_softcap(
    kernel: str, case: Case, deterministic: bool, device: Device, rng: np.random.Generator
) -> None:
    """An infinite key that the last query alone sees: 0 times infinity makes NaN of all sums of dq in its tile."""
    some = operands(rng, case)
    some[1][:, :, 99, 5] = np.inf
    check(device, kernel, some, causal=True, softcap=3.0, deterministic=deterministic)


@pytest.mark.sanitizer
@pytest.mark.parametrize("softcap", [400.0, 0.5])
@cases(*(Case((70, 100), (D, D), (1, 1)) for D in (64, 128, 256)), kernels=(SM90, KEYS))
def test_weights_that_are_zero_have_no_slope_under_a_softcap(
    kernel: str, case: Case, softcap: float, device: Device, rng: np.random.Generator
) -> None:
    """A logarithm of 0 would make NaN of them. The scores of a query are up to 150 apart."""
    q, k, v, dout = operands(rng, case)
    check(device, kernel, (20 * q, k, v, dout), softcap=softcap)


@pytest.mark.parametrize(("factor", "softcap", "scale"), [(40, 1e-3, None), (1, 1e-39, 0.01)])
@of_kernels(SM80)
def test_softcaps_that_are_too_small_for_hopper(
    kernel: str, factor: int, softcap: float, scale: float | None, device: Device, rng: np.random.Generator
) -> None:
    """The inverse of the second one fits into no float32."""
    q, k, v, dout = operands(rng, Case((70, 100), heads=(1, 1)))
    check(device, kernel, (factor * q, k, v, dout), softcap=softcap, scale=scale)


# ---------------------------------------------------------------------------------------------- what is written once
ONCE = {
    SM90: ("write_key_again(problem.rows, y, key + __ffs(redo) - 1);", "write_query(b, x, first + line, own[line]);"),
    KEYS: (
        "write_key_again(problem.rows, y, key + __ffs(redo) - 1);",
        "write_query(b(), x, query, statistic_of(query));",
    ),
    SM80: (
        "write_query(b, walk.y.tile, row + __ffs(redo) - 1);",
        "write_key(b, walk.y, row + __ffs(redo) - 1);",
    ),
    FUSED: (
        "write_query(b, x, first + line, own[line]);",
        "write_key(b, y, y.key + int(pair * 32 + half * 16) + __ffs(redo) - 1, statistic);",
    ),
}


@pytest.mark.emulated
@cases(
    Case((200, 150), causal=True, any_order=True),
    Case((70, 90), heads=(1, 1), blocks=(1, 64, (1, 1))),
    Case((200, 150), (192, 192), causal=True),
    Case((70, 90), (192, 192), heads=(1, 1), blocks=(1, 64, (1, 1))),
    Case((100, 150), (128, 128), causal=True, any_order=True),
    kernels=tuple(ONCE),
)
def test_ordinary_rows_are_not_computed_twice(
    kernel: str, case: Case, device: Emulated, rng: np.random.Generator
) -> None:
    """A wrong sum that is not finite would be mended by the care that is taken of infinity and NaN."""
    from ..emulator import emulator

    def forbidding(spec: Any) -> Any:
        return emulator.load(spec, emulator.builds(), ONCE[kernel])

    sources = "\n".join(path.read_text() for path in CUDA.glob("attention_backward_*.cu"))
    assert all(line in sources for line in ONCE[kernel])
    with patch.object(device.card, "emulated", forbidding):
        check_case(device, kernel, case, rng)


# ---------------------------------------------------------------------------------------- the walk over tiles of keys
@pytest.mark.parametrize("together", [1, 2])
@of_kernels(SM90, SM80)
def test_heads_that_are_walked_together(
    kernel: str, together: int, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three heads of keys, one or two at a time; a tile that nobody walks over keeps what was there."""
    monkeypatch.setattr(backward_kernel, "section", lambda *args: together)
    monkeypatch.setattr(backward_kernel, "_LEAST_SECTION", together)
    check_case(device, kernel, Case((70, 150), heads=(3, 3), causal=True), rng)


@pytest.mark.parametrize("cut", [(0, 2), (1, 3), (0, 8)], ids=str)
@cases(
    *(
        Case((140, 300), (D, D), heads, any_order=True, **how)
        for D, heads in ((64, (1, 1)), (128, (4, 1)), (64, (6, 2)))
        for how in ({"causal": True}, {}, {"elements": 32}, {"elements": 64})
    ),
    kernels=(SM90,),
    large=tuple(Case((500, 700), (D, D), (4, 1), any_order=True, blocks=(3, 64, (1, 4))) for D in (64, 128)),
)
def test_tiles_of_keys_that_are_cut(
    kernel: str, case: Case, cut: tuple[int, int], device: Device, rng: np.random.Generator, monkeypatch: Any
) -> None:
    """Shares of turns, of whole heads, and shares without any turn, which add zeros."""
    monkeypatch.setattr(backward_sm90, "cut", lambda *given: cut)
    check_case(device, kernel, case, rng)


@cases(
    kernels=(SM90,),
    large=tuple(
        Case((2000, 1700), (D, D), heads, any_order=True, **how)
        for D in (64, 128)
        for heads, how in (((8, 1), {"causal": True}), ((2, 2), {}), ((4, 2), {"window": (600, 0)}))
    ),
)
def test_few_tiles_are_cut_by_rule(kernel: str, case: Case, device: Device, rng: np.random.Generator) -> None:
    check_case(device, kernel, case, rng)


@pytest.mark.races
@of_kernels(SM90)
def test_shares_without_races(kernel: str, device: Device, rng: np.random.Generator, monkeypatch: Any) -> None:
    monkeypatch.setattr(backward_sm90, "cut", lambda *given: (0, 2))
    check_case(device, kernel, Case((200, 150), causal=True), rng)


@of_kernels(SM90)
def test_counters_of_shares_are_zero_again(
    kernel: str, device: Device, rng: np.random.Generator, monkeypatch: Any
) -> None:
    """The next call would take its first share for the last one otherwise."""
    monkeypatch.setattr(backward_sm90, "cut", lambda *given: (0, 3))
    taken, counts = [], []
    counters = workspace._counters_of

    def noted(stream: Any, count: int) -> Any:
        counts.append(count)
        taken.append(counters(stream, count))
        return taken[-1]

    monkeypatch.setattr(workspace, "_counters_of", noted)
    check_case(device, kernel, Case((140, 300), causal=True), rng)
    assert taken and not any(device.asnumpy(x).any() for x in taken)
    assert counts == [2 + 3]  # one for each tile of keys


# ------------------------------------------------------------------------------------- operands, memory, graphs
BLOCKS = (None, (4, 64, (1, 4)))


@of_kernels(SM90, KEYS, SM80, SIMT)
def test_operands_and_results_of_any_strides(kernel: str, device: Device, rng: np.random.Generator) -> None:
    """Rows between heads, rows that are not a multiple of 16 bytes, and results with gaps that keep what they have."""
    D = 192 if kernel == KEYS else 60
    some = operands(rng, Case((40, 70), (D, D), (4, 2), batch=2))
    out, lse, *want = wanted(some)
    turned = [device.asarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in some]
    saved = (device.asarray(out.astype(F16)), device.asarray(lse.astype(F32)))
    for pitch, step in ((D, 1), (D + 1, 1), (2 * D, 2)):
        room = [device.asarray(np.full((2, x.shape[2], x.shape[1], pitch), 77, F16)) for x in some[:3]]
        given = {name: x[..., : D * step : step].swapaxes(1, 2) for name, x in zip(NAMES, room, strict=True)}
        with only(device, kernel):
            bg.attention_backward(turned[3], *turned[:3], *saved, **given)
        for x, y in zip(given.values(), want, strict=True):
            np.testing.assert_allclose(device.asnumpy(x).astype(float), y, rtol=0, atol=3e-3 * np.abs(y).max())
        rooms = map(device.asnumpy, room)
        assert all(((x[..., D:] if step == 1 else x[..., 1::2]) == 77).all() for x in rooms)


@pytest.mark.parametrize("with_delta", [True, False])
@of_kernels(SM90, KEYS, SM80, SIMT)
def test_gradients_of_the_logarithms_and_given_sums(
    kernel: str, with_delta: bool, device: Device, rng: np.random.Generator
) -> None:
    """On the CUDA cores the gradient of the result is in float32."""
    D = 192 if kernel == KEYS else 100
    some = operands(rng, Case((60, 70), (D, D), (4, 2)))
    dlse = rng.standard_normal(some[3].shape[:3])
    out, lse, *want = wanted(some, dlse=dlse)
    delta = (some[3].astype(np.float64) * out).sum(axis=-1).astype(F32)
    some[3] = some[3].astype(F32) if kernel == SIMT else some[3]
    saved = (None, lse.astype(F32), delta) if with_delta else (out.astype(F16), lse.astype(F32), None)
    got = gradients(device, kernel, (*some, *saved), dlse=device.asarray(dlse.astype(F32)))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-3 * np.abs(y).max())


@of_kernels(SM90, SM80)
def test_memory_beside_the_gradients(kernel: str, device: Device, rng: np.random.Generator, monkeypatch: Any) -> None:
    """On Hopper, dq in float32, two numbers for each query and one for each tile of 64; otherwise two numbers."""
    taken, pool = [], device.cupy.cuda.MemoryPool()
    monkeypatch.setattr(backward_sm90, "cut", lambda *given: backward_kernel.NOTHING_CUT)
    some = operands(rng, Case((130, 70)))
    _, lse, *_ = wanted(some)
    q, k, v, dout = map(device.asarray, some)
    saved = [device.asarray(lse.astype(F32)) for _ in range(2)]
    results = {name: device.asarray(x) for name, x in zip(NAMES, some, strict=False)}

    def call() -> None:
        bg.attention_backward(dout, q, k, v, None, saved[0], delta=saved[1], **results)

    def noted(size: int) -> Any:
        taken.append(size)
        return pool.malloc(size)

    with only(device, kernel):
        call()
        with device.cupy.cuda.using_allocator(noted):
            call()
    of_queries = 2 * 130 * 2 * 4 if kernel == SM80 else 2 * 4 * (64 * 64 + 2 * 64 + 1) * 4
    assert sum(taken) == -(-of_queries // 512) * 512  # as CuPy rounds


@pytest.mark.parametrize("masked", [False, True])
@cases(
    Case((130, 150)), Case((60, 70), (192, 192)), Case((60, 70), (128, 128), any_order=True),
    kernels=(SM90, KEYS, FUSED, SM80),
)  # fmt: skip
def test_a_captured_backward_can_be_replayed(
    kernel: str, case: Case, masked: bool, device: Device, rng: np.random.Generator, monkeypatch: Any
) -> None:
    """Its memory, and the lists of a mask that is gone, are the graph's as long as it is there."""
    if kernel == SM90:
        monkeypatch.setattr(backward_sm90, "cut", lambda *given: (0, 3))
    some = operands(rng, case)
    options: dict[str, Any] = {"deterministic": kernel != FUSED}
    mask = bg.BlockMask.random(*case.lengths, per_row=1, block=32, seed=1, device="cpu") if masked else None
    out, lse, *want = wanted(some, mask=mask)
    there = [device.asarray(x) for x in (*some, out.astype(F16), lse.astype(F32))]
    results = {name: device.asarray(np.full_like(x, 7)) for name, x in zip(NAMES, some, strict=False)}

    masks = [] if mask is None else [mask.to_device("cuda")]

    def run() -> None:
        q, k, v, dout, *saved = there
        with force_kernel(kernel), few_ctas(1):
            bg.attention_backward(dout, q, k, v, *saved, mask=masks[0] if masks else None, **options, **results)

    with only(device, kernel):
        run()
    for x in results.values():
        x.fill(7)
    graph = device.captured(run)
    there.clear()
    masks.clear()
    intact = device.bystanders()
    for _ in range(2):
        graph.launch()
    device.synchronize()
    assert intact()
    for x, y in zip(results.values(), want, strict=True):
        np.testing.assert_allclose(device.asnumpy(x).astype(float), y, rtol=0, atol=3e-3 * max(1, np.abs(y).max()))


@cases(
    Case((200, 190), causal=True), Case((200, 190), (192, 192)), kernels=(SM90, KEYS, SM80),
    large=tuple(Case((1500, 1500), (D, D), (8, 4), window=(300, 0), blocks=x) for D in (128, 256) for x in BLOCKS),
)  # fmt: skip
def test_sums_in_one_order_repeat_bit_by_bit(kernel: str, case: Case, device: Device, rng: np.random.Generator) -> None:
    some, options = operands(rng, case), case.options(rng)
    out, lse, *_ = wanted(some, **options)
    saved = (out.astype(F16), lse.astype(F32), None)
    times = 2 if isinstance(device, Emulated) else 20
    first, *others = (gradients(device, kernel, (*some, *saved), **options) for _ in range(times))
    for again in others:
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("in_turn", [True, False])
@of_kernels(SM90)
def test_gradients_in_an_order_that_is_not_that_of_the_queries(
    kernel: str, block: int, in_turn: bool, device: Device, rng: np.random.Generator, monkeypatch: Any
) -> None:
    """Entries of random masks are put in turn, unless so many blocks are stored that it does not pay."""
    if not in_turn:
        monkeypatch.setattr(backward_sm90, "_LARGEST_SHARE", 0)
    case = Case((520, 512), (128, 128), blocks=(2, block, (1, 2)))
    some, options = operands(rng, case), case.options(rng)
    with device.kernels() as names:
        check(device, kernel, some, **options)
    assert ("turn_order" in names) is in_turn
