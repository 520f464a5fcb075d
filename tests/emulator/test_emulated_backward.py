"""The kernels for the gradients of attention, launched as they are, on the CPU, beside the host in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import backward_config, backward_launch
from bsrgemm._attention.host import ENGINE
from bsrgemm._kernels.forced_kernel import force_kernel
from bsrgemm.dtypes import BFLOAT16

from . import emulator

F16, F32, F64 = (np.dtype(x) for x in (np.float16, np.float32, np.float64))
#: By how much weights and their gradients are rounded, of the largest gradient.
ROUNDING = {F16: 3e-3, BFLOAT16: 2.4e-2, F32: 2e-5, F64: 1e-12}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


#: Tests whose softcap is too small for the kernels for Hopper.
SMALL_SOFTCAPS = (
    "test_a_small_softcap_is_left_to_the_portable_kernel",
    "test_a_softcap_whose_inverse_no_float32_holds",
)


class Emulated:
    """`bsrgemm.attention_backward` on NumPy arrays by the kernels, beside that of the host in float64."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.names: set[str] = set()

    def run(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        start, fuse, pair = backward_launch._separate, backward_launch._fused, backward_launch._paired

        def noted_fused(backend: Any, call: Any, config: Any) -> None:
            self.names.add(type(config).__name__)
            fuse(backend, call, config)

        def noted_pair(backend: Any, call: Any, config: Any) -> None:
            self.names.add(type(config).__name__)
            pair(backend, call, config)

        def noted(backend: Any, call: Any, config: Any, statistics: Any) -> None:
            self.names.add(type(config).__name__)
            start(backend, call, config, statistics)

        with self.monkeypatch.context() as patched:
            patched.setattr(ENGINE, "backward", lambda call: emulator.run_backward(call, emulator.guarded))
            patched.setattr(backward_launch, "_separate", noted)
            patched.setattr(backward_launch, "_fused", noted_fused)
            patched.setattr(backward_launch, "_paired", noted_pair)
            return bg.attention_backward(*args, **options)

    def check(self, q: Any, k: Any, v: Any, dout: Any, **options: Any) -> None:
        wide = [x.astype(np.float64) for x in (q, k, v, dout)]
        forward = {name: x for name, x in options.items() if name != "deterministic"}
        out, lse = bg.attention(*wide[:3], return_lse=True, **forward)
        want = bg.attention_backward(wide[3], *wide[:3], out, lse, **options)
        acc = np.float64 if q.dtype == F64 else np.float32
        delta = (out * wide[3]).sum(axis=-1)
        delta = delta.swapaxes(0, 1) if "cu_seqlens_q" in options else delta
        results = {f"d{name}": np.full_like(x, 77) for name, x in (("q", q), ("k", k), ("v", v))}
        got = self.run(dout, q, k, v, None, lse.astype(acc), delta=delta.astype(acc), **results, **options)
        for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
            bound = ROUNDING[q.dtype] * max(1, np.abs(y[np.isfinite(y)]).max(initial=0))
            np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=bound, err_msg=name)


@pytest.fixture(params=["sm_80", "sm_90a"])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Emulated]:
    with emulator.emulated(folder, emulator.guarded, arch=request.param):
        found = Emulated(monkeypatch)
        yield found
        kernels = {"sm_80": {"BackwardSm80", "BackwardFused"}, "sm_90a": {"BackwardSm90", "BackwardKeysSm90"}}
        small = {"BackwardSm80"} if request.node.name.split("[")[0] in SMALL_SOFTCAPS else set()
        assert found.names <= kernels[request.param] | small
        assert found.names


def operands(
    rng: np.random.Generator, S_q: int, S_k: int, D: int = 64, D_v: int = 0, heads: tuple[int, int] = (2, 1),
    dtype: Any = F16, batch: int = 1,
) -> tuple[Any, ...]:  # fmt: skip
    D_v = D_v or D
    shapes = ((heads[0], S_q, D), (heads[1], S_k, D), (heads[1], S_k, D_v), (heads[0], S_q, D_v))
    return tuple(rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes)


@pytest.mark.parametrize(
    ("lengths", "dims", "options"),
    [
        ((1, 1), (64, 64), {}),
        ((20, 30), (64, 64), {}),
        ((70, 150), (64, 64), {"causal": True}),
        ((130, 70), (64, 64), {"causal": True}),  # the first rows see nothing
        ((64, 300), (64, 64), {"window": (40, 3)}),
        ((33, 65), (128, 128), {"softcap": 3.0, "scale": -0.2}),
        ((70, 90), (32, 32), {"causal": True, "align": "top-left"}),
        ((30, 90), (256, 256), {}),
        ((30, 90), (40, 24), {"causal": True}),  # tiles of which not all columns are there
        ((70, 90), (32, 128), {}),
        ((150, 40), (192, 96), {"causal": True}),
    ],
    ids=str,
)
def test_bands_at_odd_lengths_and_head_dims(lengths, dims, options, emulated, rng) -> None:
    emulated.check(*operands(rng, *lengths, *dims), **options)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize(
    "options", [{"softcap": 0.6}, {"softcap": 30.0, "scale": -0.3, "deterministic": False}], ids=str
)
def test_softcap_with_bands_and_masks(dim, options, emulated, rng) -> None:
    """Slopes near 0 and near 1; keys that nobody sees, queries that see nothing."""
    some = operands(rng, 140, 150, dim, heads=(2, 1))
    emulated.check(*some, causal=True, **options)
    dense = rng.random((140, 150)) < 0.3
    dense[7], dense[:, 9] = False, False
    for block in (32, 64):
        emulated.check(*some, mask=bg.BlockMask.from_dense(dense, block=block), **options)


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_weights_that_are_zero_have_no_slope_under_a_softcap(dim, emulated, rng) -> None:
    """A logarithm of 0 would make NaN of them. The scores of a query are up to 150 apart."""
    q, k, v, dout = operands(rng, 70, 100, dim, heads=(1, 1))
    q *= 20
    emulated.check(q, k, v, dout, softcap=400.0)
    emulated.check(q, k, v, dout, softcap=0.5)


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(("dim", "deterministic"), [(64, True), (128, True), (128, False), (192, True)])
def test_rows_that_are_computed_again_have_the_softcap(dim, deterministic, emulated, rng) -> None:
    """An infinite key that the last query alone sees: 0 times infinity makes NaN of all sums of dq in its tile."""
    q, k, v, dout = operands(rng, 70, 100, dim, heads=(1, 1))
    k[:, :, 99, 5] = np.inf
    emulated.check(q, k, v, dout, causal=True, softcap=3.0, deterministic=deterministic)


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
def test_a_small_softcap_is_left_to_the_portable_kernel(emulated, rng) -> None:
    q, k, v, dout = operands(rng, 70, 100, 64, heads=(1, 1))
    emulated.check(40 * q, k, v, dout, softcap=1e-3)
    assert emulated.names == {"BackwardSm80"}


@pytest.mark.races
@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("dim", [64, 192])
def test_turns_under_a_softcap_without_races(dim, emulated, rng) -> None:
    emulated.check(*operands(rng, 200, 150, dim, heads=(1, 1)), causal=True, softcap=5.0)


def test_a_softcap_whose_inverse_no_float32_holds(emulated, rng) -> None:
    emulated.check(*operands(rng, 20, 30, 64, heads=(1, 1)), softcap=1e-39, scale=0.01)


def test_bfloat16_and_groups(emulated, rng) -> None:
    emulated.check(*operands(rng, 70, 90, 64, heads=(6, 2), dtype=BFLOAT16, batch=2), causal=True)


@pytest.mark.races
def test_turns_that_are_whole_and_not_in_two_tiles_of_keys(emulated, rng) -> None:
    emulated.check(*operands(rng, 200, 150, heads=(1, 1)), causal=True)


@pytest.mark.races
def test_many_whole_turns_in_one_tile_of_keys(emulated, rng) -> None:
    # Nobody waits for the look-up of a mask in a turn that is whole; its description is written over four turns later.
    emulated.check(*operands(rng, 384, 128, heads=(1, 1)))


def test_sums_in_any_order(emulated, rng) -> None:
    emulated.check(*operands(rng, 200, 150, heads=(2, 1)), causal=True, deterministic=False)
    mask = bg.BlockMask.random(200, 150, per_row=2, block=32, seed=1)
    emulated.check(*operands(rng, 200, 150, 128, heads=(2, 2)), mask=mask, deterministic=False)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("emulated", "line"),
    [
        ("sm_90a", "write_query(b, x, first + line, own[line]);"),  # dq, after all sums have been made
        ("sm_80", "write_query(b, walk.y.tile, row + __ffs(redo) - 1);"),  # dq
        ("sm_80", "write_key(b, walk.y, row + __ffs(redo) - 1);"),  # dk and dv
    ],
    indirect=["emulated"],
)
def test_ordinary_rows_are_not_computed_twice(line, deterministic, emulated, folder, rng) -> None:
    """A wrong sum that is not finite would be mended by the care that is taken of infinity and NaN."""
    with emulator.forbidden(folder, line):
        emulated.check(*operands(rng, 200, 150, heads=(2, 1)), causal=True, deterministic=deterministic)


@pytest.mark.parametrize("together", [1, 2])
def test_heads_that_are_walked_together(together, emulated, rng, monkeypatch) -> None:
    """Three heads of keys, one or two at a time; a tile that nobody walks over keeps what was there."""
    monkeypatch.setattr(backward_launch.heuristics, "section", lambda *args: together)
    monkeypatch.setattr(backward_launch, "_LEAST_SECTION", together)
    emulated.check(*operands(rng, 70, 150, heads=(3, 3)), causal=True)


def test_masks_by_blocks_and_elements(emulated, rng) -> None:
    some = operands(rng, 150, 200)
    emulated.check(*some, mask=bg.BlockMask.random(150, 200, per_row=2, block=32, seed=1))
    dense = rng.random((150, 200)) < 0.3
    dense[7], dense[:, 9] = False, False  # a query that sees nothing, a key that nobody sees
    emulated.check(*some, mask=bg.BlockMask.from_dense(dense, block=64), causal=True)
    emulated.check(*some, mask=bg.BlockMask.random(150, 200, per_row=1, block=16, heads=(1, 2)), window=(60, 20))
    some = operands(rng, 100, 130, heads=(4, 2), batch=2)  # two heads share a pattern
    emulated.check(*some, mask=bg.BlockMask.random(100, 130, per_row=2, block=32, heads=(2, 2), seed=3))


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(("dim", "deterministic"), [(64, True), (128, True), (128, False)])
def test_masks_of_64_keys(dim, deterministic, emulated, rng) -> None:
    some, options = operands(rng, 130, 200, dim, heads=(2, 1)), {"deterministic": deterministic}
    emulated.check(*some, mask=bg.BlockMask.random(130, 200, per_row=2, block=64, seed=1), **options)
    dense = rng.random((130, 200)) < 0.3
    dense[7], dense[:, 9] = False, False  # a query that sees nothing, a key that nobody sees
    dense[64:128, :192] = False  # not all blocks are stored
    emulated.check(*some, mask=bg.BlockMask.from_dense(dense, block=64), causal=True, **options)


@pytest.mark.races
@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
def test_turns_of_64_keys_without_races(emulated, rng) -> None:
    mask = bg.BlockMask.random(320, 70, per_row=1, block=64, seed=1)  # several turns on the same keys
    emulated.check(*operands(rng, 320, 70, 64, heads=(1, 1)), mask=mask)


CUTS = [(0, 2), (1, 3), (0, 8)]


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(64, (1, 1)), (128, (4, 1)), (64, (6, 2))], ids=str)
def test_tiles_of_keys_that_are_cut(dim, heads, cut, deterministic, emulated, rng, monkeypatch) -> None:
    """Shares of turns, of whole heads, and shares without any turn, which add zeros."""
    monkeypatch.setattr(backward_config, "cut", lambda *given: cut)
    some = operands(rng, 140, 300, dim, heads=heads)
    emulated.check(*some, causal=True, deterministic=deterministic)
    emulated.check(*some, deterministic=deterministic)
    dense = rng.random((140, 300)) < 0.3
    dense[7], dense[:, 9], dense[:, 128:256] = False, False, False  # also a tile of keys that nobody sees
    for block in (32, 64):
        emulated.check(*some, mask=bg.BlockMask.from_dense(dense, block=block), deterministic=deterministic)


@pytest.mark.races
@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
def test_shares_without_races(emulated, rng, monkeypatch) -> None:
    monkeypatch.setattr(backward_config, "cut", lambda *given: (0, 2))
    emulated.check(*operands(rng, 200, 150, heads=(2, 1)), causal=True)


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
def test_counters_of_shares_are_zero_again(emulated, rng, monkeypatch) -> None:
    """The next call would take its first share for the last one otherwise."""
    monkeypatch.setattr(backward_config, "cut", lambda *given: (0, 3))
    found, wanted = [], []
    counters = backward_launch.counters

    def noted(count: int) -> Any:
        wanted.append(count)
        found.append(counters(count))
        return found[-1]

    monkeypatch.setattr(backward_launch, "counters", noted)
    emulated.check(*operands(rng, 140, 300, heads=(2, 1)), causal=True)
    assert found and not any(np.asarray(x).any() for x in found)
    assert wanted == [2 + 3]  # one for each tile of keys


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
def test_wide_heads_with_masks_and_groups(emulated, rng) -> None:
    """Values have fewer columns than keys, and the last 64 of 192 are empty."""
    dense = rng.random((130, 200)) < 0.3
    dense[7], dense[:, 9] = False, False  # a query that sees nothing, a key that nobody sees
    dense[:, 128:192] = False  # a tile of keys that nobody sees
    mask = bg.BlockMask.from_dense(dense, block=64)
    emulated.check(*operands(rng, 130, 200, 192, 100, heads=(2, 1)), mask=mask, causal=True)
    some = operands(rng, 70, 150, 136, heads=(4, 2), dtype=BFLOAT16)
    emulated.check(*some, window=(90, 10), deterministic=False)
    assert emulated.names == {"BackwardKeysSm90"}


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
def test_wide_heads_in_sequences_of_different_lengths(emulated, rng) -> None:
    """A tile of 128 queries has two pieces of statistics, which are numbered by tiles of 64."""
    some = [rng.standard_normal((n, h, 192)).astype(F16) for n, h in ((260, 2), (240, 1), (240, 1), (260, 2))]
    emulated.check(*some, cu_seqlens_q=[0, 30, 30, 260], cu_seqlens_k=[0, 70, 90, 240], causal=True)


@pytest.mark.races
@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
def test_turns_of_wide_heads_without_races(emulated, rng) -> None:
    # Two tiles of keys follow each other, and the weights of several turns pass through the same memory.
    emulated.check(*operands(rng, 200, 70, 192, heads=(1, 1)), causal=True)


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("name", ["q", "v"])
def test_infinity_in_wide_heads_reaches_those_who_see_it_and_no_others(name, emulated, rng) -> None:
    some = dict(zip(("q", "k", "v", "dout"), operands(rng, 40, 70, 192, heads=(2, 1)), strict=True))
    some[name][:, :, 33, 5] = np.nan
    wide = {key: x.astype(np.float64) for key, x in some.items()}
    out, lse = bg.attention(wide["q"], wide["k"], wide["v"], causal=True, return_lse=True)
    want = bg.attention_backward(wide["dout"], wide["q"], wide["k"], wide["v"], out, lse, causal=True)
    got = emulated.run(some["dout"], some["q"], some["k"], some["v"], out.astype(F16), lse.astype(F32), causal=True)
    for x, y in zip(got, want, strict=True):
        bad = np.isnan(y)
        np.testing.assert_array_equal(np.isnan(x.astype(np.float64)), bad)
        np.testing.assert_allclose(
            x.astype(np.float64)[~bad], y[~bad], rtol=0, atol=3e-3 * np.abs(y[~bad]).max(initial=1)
        )


def test_memory_beside_the_gradients(emulated, rng, monkeypatch) -> None:
    """On Hopper, dq in float32, two numbers for each query and one for each tile of 64; otherwise two numbers."""
    taken = []
    empty = backward_launch.cupy.empty
    monkeypatch.setattr(backward_launch.cupy, "empty", lambda *args: taken.append(empty(*args)) or taken[-1])
    emulated.check(*operands(rng, 130, 70, 64, heads=(2, 1)))
    of_queries = 2 * 130 * 2 * 4 if emulated.names == {"BackwardSm80"} else 2 * 4 * (64 * 64 + 2 * 64 + 1) * 4
    assert sum(x.nbytes for x in taken) == -(-of_queries // 16) * 16


def test_sequences_of_different_lengths(emulated, rng, monkeypatch) -> None:
    packed = backward_launch._packed

    def checked(call: Any, lists: Any, *args: Any, **how: Any) -> Any:
        assert lists.fields["sequence_count"] == 3
        return packed(call, lists, *args, **how)

    monkeypatch.setattr(backward_launch, "_packed", checked)
    some = [rng.standard_normal((n, h, 64)).astype(F16) for n, h in ((100, 2), (140, 1), (140, 1), (100, 2))]
    emulated.check(*some, cu_seqlens_q=[0, 30, 30, 100], cu_seqlens_k=[0, 70, 90, 140], causal=True)


def test_strides_and_results_of_any_strides(emulated, rng) -> None:
    q, k, v, dout = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in operands(rng, 40, 70, heads=(4, 2), batch=2))
    wide = [x.astype(np.float64) for x in (q, k, v, dout)]
    out, lse = bg.attention(*wide[:3], return_lse=True)
    want = bg.attention_backward(wide[3], *wide[:3], out, lse)
    for pitch, step in ((64, 1), (65, 1), (128, 2)):
        room = [np.full((2, x.shape[2], x.shape[1], pitch), 77, F16) for x in (q, k, v)]
        given = [x[..., : 64 * step : step].swapaxes(1, 2) for x in room]
        emulated.run(dout, q, k, v, out.astype(F16), lse.astype(F32), dq=given[0], dk=given[1], dv=given[2])
        for x, y in zip(given, want, strict=True):
            np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=3e-3 * np.abs(y).max())
        assert all((x[..., 64:] == 77).all() if step == 1 else (x[..., 1::2] == 77).all() for x in room)


@pytest.mark.races
@pytest.mark.parametrize("emulated", ["sm_80"], indirect=True)
def test_rows_that_are_not_finite_are_written_again_without_races(emulated, rng) -> None:
    """By other lanes of a warp than those that wrote them first."""
    some = operands(rng, 10, 10, heads=(1, 1))
    some[2][:, :, 7, 5] = np.inf  # dq of all queries that see the key, and dk of all keys that those see
    wide = [x.astype(np.float64) for x in some]
    out, lse = bg.attention(*wide[:3], return_lse=True)
    want = bg.attention_backward(wide[3], *wide[:3], out, lse)
    got = emulated.run(some[3], *some[:3], out.astype(F16), lse.astype(F32))
    assert all(np.isnan(x).any() for x in want[:2])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(x.astype(np.float64)), np.isnan(y))


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(name, emulated, rng) -> None:
    some = dict(zip(("q", "k", "v", "dout"), operands(rng, 40, 70, heads=(2, 1)), strict=True))
    some[name][:, :, 33, 5] = np.nan
    wide = {key: x.astype(np.float64) for key, x in some.items()}
    out, lse = bg.attention(wide["q"], wide["k"], wide["v"], causal=True, return_lse=True)
    want = bg.attention_backward(wide["dout"], wide["q"], wide["k"], wide["v"], out, lse, causal=True)
    got = emulated.run(some["dout"], some["q"], some["k"], some["v"], out.astype(F16), lse.astype(F32), causal=True)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(x.astype(np.float64)), np.isnan(y))


class TestFused:
    """The portable kernel in one pass: heads of 128 columns, sums in any order."""

    @pytest.fixture(autouse=True)
    def _emulated(self, monkeypatch, folder) -> Iterator[None]:
        with emulator.emulated(folder, emulator.guarded, arch="sm_80"):
            self.emulated = Emulated(monkeypatch)
            yield
            assert self.emulated.names == {"BackwardFused"}

    def check(self, some: Any, **options: Any) -> None:
        self.emulated.check(*some, deterministic=False, **options)

    @pytest.mark.parametrize(
        ("lengths", "dim", "options"),
        [
            ((1, 1), 128, {}),
            ((150, 200), 128, {"causal": True}),
            ((200, 70), 128, {"causal": True}),  # the first rows see nothing
            ((70, 300), 100, {"scale": -0.2, "align": "top-left", "causal": True}),  # not all columns are there
            ((100, 200), 128, {"window": (150, 30)}),
        ],
        ids=str,
    )
    def test_bands_at_odd_lengths(self, lengths, dim, options, rng) -> None:
        self.check(operands(rng, *lengths, dim), **options)

    def test_bfloat16_groups_and_batches(self, rng) -> None:
        self.check(operands(rng, 70, 150, 128, heads=(4, 2), dtype=BFLOAT16, batch=2), causal=True)

    @pytest.mark.races
    def test_several_turns_on_two_tiles_of_keys_without_races(self, rng) -> None:
        self.check(operands(rng, 200, 150, 128, heads=(1, 1)), causal=True)

    def test_masks(self, rng) -> None:
        some = operands(rng, 150, 200, 128, heads=(2, 2))
        self.check(some, mask=bg.BlockMask.random(150, 200, per_row=2, block=32, heads=(1, 2), seed=1))
        dense = rng.random((150, 200)) < 0.3
        dense[7], dense[:, 9] = False, False  # a query that sees nothing, a key that nobody sees
        self.check(some, mask=bg.BlockMask.from_dense(dense, block=64), causal=True)

    def test_sequences_of_different_lengths(self, rng) -> None:
        some = [rng.standard_normal((n, h, 128)).astype(F16) for n, h in ((100, 2), (140, 1), (140, 1), (100, 2))]
        self.check(some, cu_seqlens_q=[0, 30, 30, 100], cu_seqlens_k=[0, 70, 90, 140], causal=True)

    @pytest.mark.parametrize(
        "line",
        [
            "write_query(b, x, first + line, own[line]);",
            "write_key(b, y, y.key + int(pair * 32 + half * 16) + __ffs(redo) - 1, statistic);",
        ],
    )
    def test_ordinary_rows_are_not_computed_twice(self, line, folder, rng) -> None:
        with emulator.forbidden(folder, line):
            self.check(operands(rng, 100, 150, 128, heads=(2, 1)), causal=True)

    @pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
    def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(self, name, rng) -> None:
        some = dict(zip(("q", "k", "v", "dout"), operands(rng, 40, 70, 128, heads=(2, 1)), strict=True))
        some[name][:, :, 33, 5] = np.nan
        wide = {key: x.astype(np.float64) for key, x in some.items()}
        out, lse = bg.attention(wide["q"], wide["k"], wide["v"], causal=True, return_lse=True)
        want = bg.attention_backward(wide["dout"], wide["q"], wide["k"], wide["v"], out, lse, causal=True)
        q, k, v, dout = (some[key] for key in ("q", "k", "v", "dout"))
        given = (dout, q, k, v, out.astype(F16), lse.astype(F32))
        got = self.emulated.run(*given, causal=True, deterministic=False)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.isnan(x.astype(np.float64)), np.isnan(y))


@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32, F64], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 2.0, "window": (20, 5)}], ids=str)
def test_plain_cores(dtype, options, monkeypatch, folder, rng) -> None:
    with emulator.emulated(folder, emulator.guarded, arch="sm_75"), force_kernel("BackwardSimt"):
        emulated = Emulated(monkeypatch)
        emulated.check(*operands(rng, 40, 70, 24, 40, heads=(4, 2), dtype=dtype), **options)
        some = operands(rng, 50, 70, 24, 40, heads=(2, 2), dtype=dtype)
        emulated.check(*some, mask=bg.BlockMask.from_dense(rng.random((50, 70)) < 0.3, block=16))
        assert emulated.names == {"BackwardSimt"}
