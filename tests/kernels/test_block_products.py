"""All that is promised of block_products_sm90 and block_products_sm80: results in blocks, of pairs or of samples."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._products import block_products, pairs, sampled
from bsrgemm._products.costs import H200
from bsrgemm._products.sampled_dense import SampledDense

from ..devices import Device, Emulated
from ..gpu.repeats import differing
from .products import BF16, C64, C128, F16, F32, F64, Bsr, Case, matrix, numbers

SHAPES = [(64, 64, 64), (128, 128, 128), (64, 72, 128), (128, 64, 64), (48, 80, 112), (16, 8, 16)]


@pytest.fixture(autouse=True)
def never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns are too small for a dense product, or too many of their blocks are stored."""
    monkeypatch.setattr(SampledDense, "served", False)


@pytest.fixture(params=["sm_90a", "sm_80"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def card(arch: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of one multiprocessor, which has many tiles, and whose L2 holds nothing. The kernel of "sm_80" runs on
    every card since."""
    device.needs(arch)
    if arch == "sm_80":
        monkeypatch.setattr(block_products.BlockProductsSm90, "of", lambda *_: None)
    if isinstance(device, Emulated):
        device.becomes(1, l2_bytes=0)


def kernel_of(arch: str) -> str:
    return "block_products_sm90" if arch == "sm_90a" else "block_products_sm80"


# ------------------------------------------------------------------------------- pairs
def paired(device: Device, *given: Any, dtype: Any = F32, rows: int = 0) -> np.ndarray[Any, Any]:
    """The sums of products of pairs of blocks on the tensor cores."""
    found = pairs.pair_products(*map(device.asarray, given), dtype, rows)
    assert found is not None
    return device.asnumpy(found)


def sums_of_pairs(a: Any, ia: Any, b: Any, ib: Any, starts: Any) -> np.ndarray[Any, Any]:
    """The same in float64; pairs with a block that is not there add nothing."""
    out = np.zeros((len(starts), a.shape[1], b.shape[2]))
    for s, (first, last) in enumerate(pairwise(np.clip([*starts, len(ia)], 0, len(ia)))):
        for p, q in zip(ia[first:last], ib[first:last], strict=True):
            if 0 <= p < len(a) and 0 <= q < len(b):
                out[s] += a[p].astype(float) @ b[q].astype(float)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_are_multiplied_and_added_up(shape: Any, arch: str, device: Device, rng: np.random.Generator) -> None:
    """One block has no pair, and two pairs are garbage."""
    R, K, N = shape
    a, b = numbers(rng, (7, R, K), F16), numbers(rng, (7, K, N), F16)
    ia, ib = np.array([0, 1, 2, 3, 4, 5, 6, 0, 1, 2]), np.array([6, 5, 4, 3, 2, 1, 0, 6, 2**40, -3])
    given = a, ia, b, ib, np.array([0, 3, 4, 4, 8])
    with device.kernels() as kernels:
        got = paired(device, *given)
    assert kernel_of(arch) in kernels
    np.testing.assert_array_equal(got, sums_of_pairs(*given))


@pytest.mark.emulated
@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("seeds", [range(4), range(4, 32)], ids=["few", "many"])
def test_many_blocks_without_pairs_between_others(
    seeds: range, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that is slow to look at a tile must find it, though nothing in the tile holds the other lanes up."""
    a, b = numbers(rng, (6, 64, 64), F16), numbers(rng, (6, 64, 64), F16)
    lengths = np.zeros(60, int)
    lengths[[0, 9, 10, 31, 47, 59]] = 1
    given = a, np.arange(6), b, np.arange(6)[::-1], np.cumsum(lengths) - lengths
    for seed in seeds:
        monkeypatch.setenv("BSRGEMM_EMULATOR_SEED", str(seed))
        np.testing.assert_array_equal(paired(device, *given), sums_of_pairs(*given))


@pytest.mark.parametrize("rows", [0, 1, 16, 18, 40, 100])
def test_pairs_in_many_tiles(rows: int, device: Device, rng: np.random.Generator) -> None:
    """Warpgroups take turns, over more stages than the ring has; in strips of 16 rows of one block to three."""
    a, b = numbers(rng, (40, 64, 200), BF16), numbers(rng, (40, 200, 64), BF16)
    given = a, np.arange(40), b, np.arange(40)[::-1], np.arange(40)
    np.testing.assert_array_equal(paired(device, *given, rows=rows), sums_of_pairs(*given))


@pytest.mark.sanitizer
@pytest.mark.parametrize("bad", [-7, 2**31 - 1, -(2**31), 2**40])
@pytest.mark.parametrize("which", ["left", "right", "starts"])
@pytest.mark.parametrize("shape", [(64, 64, 64), (16, 16, 16)], ids=str)
def test_pairs_that_were_spoiled_touch_nothing_outside_and_add_nothing(
    shape: Any, which: str, bad: int, device: Device, rng: np.random.Generator
) -> None:
    R, K, N = shape
    lists = {"left": [0, 1, 2, 0, 1], "right": [3, 2, 1, 0, 3], "starts": [0, 2, 4]}
    lists[which][1] = bad
    left, right, starts = map(np.array, lists.values())
    given = numbers(rng, (3, R, K), F16), left, numbers(rng, (4, K, N), F16), right, starts
    np.testing.assert_array_equal(paired(device, *given), sums_of_pairs(*given))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64, C64, C128], ids=str)
@pytest.mark.parametrize("shape", [(7, 5, 9), (1, 1, 1), (33, 3, 17), (16, 12, 16), (20, 8, 40)], ids=str)
def test_odd_and_complex_blocks_are_copied_for_the_tensor_cores(
    shape: Any, dtype: Any, arch: str, device: Device, rng: np.random.Generator
) -> None:
    """Blocks get zeros at their ends, complex ones become real ones, and an infinity stays in its row."""
    R, K, N = shape
    a, b = numbers(rng, (5, R, K), dtype), numbers(rng, (6, K, N), dtype)
    ia, ib, starts = np.array([0, 1, 2, 3, 4, 0, 1]), np.array([5, 4, 3, 2, 1, 0, -3]), np.array([0, 2, 4, 4])
    want = np.zeros((4, R, N), complex if dtype.kind == "c" else float)
    for s, (first, last) in enumerate(pairwise([*starts, 7])):
        for p, q in zip(ia[first:last], ib[first:last], strict=True):
            want[s] += a[p].astype(want.dtype) @ b[q].astype(want.dtype) if q >= 0 else 0
    with device.kernels() as kernels, force_kernel("BlockProducts"):
        got = paired(device, a, ia, b, ib, starts, dtype=dtype)
    assert any(name.startswith("block_products") for name in kernels)
    np.testing.assert_array_equal(got.astype(want.dtype), want)
    if dtype.kind != "c":
        a[0, R - 1, K - 1], b[0] = np.inf, 1
        with force_kernel("BlockProducts"):
            spoiled = ~np.isfinite(paired(device, a, ia, b, ib, starts, dtype=dtype).astype(float))
        assert set(map(tuple, np.argwhere(spoiled)[:, :2])) == {(0, R - 1), (3, R - 1)}


def test_blocks_are_copied_where_that_is_predicted_to_be_faster() -> None:
    """Many products of large blocks pay for copies, few of small ones do not."""
    half = np.dtype(np.float16)
    large, small = (block_products.BlockProblem("sm_80", half, half, half, n, n, n) for n in (100, 3))
    assert pairs.pays(large, (4, 4), (1000, 4), H200) and not pairs.pays(small, (4, 4), (10, 4), H200)


# ------------------------------------------------------------------------------- samples
def pattern_of(there: np.ndarray[Any, Any], block: tuple[int, int], dtype: Any = F16) -> Bsr:
    """The pattern of a matrix that has blocks there, with values that nobody reads."""
    row, col = np.nonzero(there)
    indptr = np.searchsorted(row, np.arange(len(there) + 1)).astype("i4")
    shape = (there.shape[0] * block[0], there.shape[1] * block[1])
    return Bsr(np.zeros((len(row), *block), dtype), col.astype("i4"), indptr, shape)


#: How X and Y lie, K or rows and columns first; with a number, lines have gaps between them.
ORDERS = [*product("CF", "CF"), ("F48", "C48"), ("C48", "F48")]


def copies(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """Let the launch copy an operand whose lines are not along K, or let no copy be worth it."""
    if wanted:
        monkeypatch.setattr(block_products, "_LINE_CYCLES", 1e9)
    else:
        monkeypatch.setattr(sampled, "_COPY_RATE", 1e-30)


def check_samples(
    device: Device,
    arch: str,
    pattern: Bsr,
    K: int,
    rng: np.random.Generator,
    orders: tuple[str, str] = ("C", "C"),
    **how: Any,
) -> list[str]:
    """``X @ Y`` at the blocks of a pattern, by the kernel of this architecture; all kernels that were launched."""
    dtype, (R, C) = pattern.data.dtype, pattern.data.shape[1:]
    X, Y = numbers(rng, (pattern.shape[0], K), dtype), numbers(rng, (K, pattern.shape[1]), dtype)
    with device.kernels() as kernels:
        got = bg.sddmm(device.lying(X, orders[0]), device.lying(Y, orders[1]), pattern.on(device), **how)
    assert kernel_of(arch) in kernels
    row = np.repeat(np.arange(len(pattern.indptr) - 1), np.diff(pattern.indptr))
    product = (X.astype(float) @ Y.astype(float)).reshape(len(pattern.indptr) - 1, R, -1, C).swapaxes(1, 2)
    np.testing.assert_array_equal(device.asnumpy(got.data).astype(float), product[row, pattern.indices])
    return kernels


#: Each order of both operands, and each size of both sides; all others are large.
SAMPLED = [
    *(((64, 64), ("C", "C")), ((128, 128), ("F", "C")), ((128, 128), ("C", "F")), ((128, 64), ("F", "F"))),
    *(((48, 80), ("F", "C")), ((32, 32), ("C", "F")), ((32, 32), ("F", "C")), ((16, 16), ("F", "F"))),
    *(((64, 16), ("F48", "C48")), ((16, 64), ("C48", "F48"))),
]
SAMPLED_BLOCKS = [(64, 64), (128, 128), (128, 64), (48, 80), (80, 48), (32, 32), (16, 16), (16, 64), (64, 16)]


@pytest.mark.races
@pytest.mark.parametrize(
    ("block", "orders"),
    [
        *SAMPLED,
        *(
            pytest.param(block, orders, marks=pytest.mark.large)
            for block, orders in product(SAMPLED_BLOCKS, ORDERS)
            if (block, orders) not in SAMPLED
        ),
    ],
    ids=str,
)
def test_sampled_products(
    block: Any, orders: Any, arch: str, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launch copies what it can read; X of 16-bit floats needs blocks of 64 rows before Hopper."""
    copies(monkeypatch, False)
    there = rng.random((3, 7)) < 0.7
    there[1] = False
    kernels = check_samples(device, arch, pattern_of(there, block), 136, rng, orders)
    assert "rearrange" not in kernels


@pytest.mark.sanitizer
@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("orders", ORDERS, ids=str)
@pytest.mark.parametrize(("block", "shape", "K"), [((16, 16), (9, 5), 72), ((48, 80), (3, 2), 8)], ids=str)
def test_operands_are_copied_where_that_is_faster(
    block: Any,
    shape: Any,
    K: int,
    orders: Any,
    arch: str,
    device: Device,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the launch, which is kept: later operands are copied, too. More than one tile of the copy, and less.

    Tiles of one block row read X in lines of 128 bytes in both orders.
    """
    copies(monkeypatch, True)
    there = rng.random(shape) < 0.7
    pattern = pattern_of(there, block)
    kernels = check_samples(device, arch, pattern, K, rng, orders)
    assert ("rearrange" in kernels) == (orders[1][0] == "C")
    on_card = pattern.on(device)
    for n in range(2):
        X, Y = numbers(rng, (pattern.shape[0], K), F16), numbers(rng, (K, pattern.shape[1]), F16)
        operands = device.lying(X, orders[0]), device.lying(Y, orders[1])
        with device.kernels() as kernels:
            got = bg.sddmm(*operands, on_card)
        assert bool(kernels) == (n == 0)
        want = (X.astype(float) @ Y.astype(float)) * np.kron(there, np.ones(block))
        np.testing.assert_array_equal(device.asnumpy(got.toarray()).astype(float), want)


def test_the_order_of_operands_does_not_change_a_bit(
    arch: str, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies(monkeypatch, False)
    pattern = pattern_of(rng.random((2, 5)) < 0.7, (64, 32)).on(device)
    X, Y = rng.standard_normal((128, 136)).astype(F16), rng.standard_normal((136, 160)).astype(F16)
    results = [
        device.asnumpy(bg.sddmm(device.lying(X, x), device.lying(Y, y), pattern).data) for x, y in product("CF", "CF")
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_gradients_of_weights_over_a_batch_read_operands_as_they_lie(
    arch: str, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``x @ W``: X of the sampled product is the transpose of x, row by row, and its Y is dy as it lies."""
    copies(monkeypatch, False)
    there = rng.random((3, 4)) < 0.6
    W = pattern_of(there, (64, 64))
    x, dy = numbers(rng, (2, 40, W.shape[0]), F16), numbers(rng, (2, 40, W.shape[1]), F16)
    with device.kernels() as kernels:
        _, dW = bg.matmul_backward(device.asarray(dy), device.asarray(x), W.on(device))
    assert kernel_of(arch) in kernels and "rearrange" not in kernels
    want = sum(a.T.astype(float) @ b.astype(float) for a, b in zip(x, dy, strict=True)) * np.kron(
        there, np.ones((64, 64))
    )
    np.testing.assert_array_equal(device.asnumpy(dW.toarray()).astype(float), want)


@pytest.mark.races
@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(("block", "cols"), [((64, 64), 30), ((128, 128), 20)], ids=str)
def test_one_cta_has_more_tiles_and_stages_than_it_holds(
    block: Any, cols: int, arch: str, device: Device, rng: np.random.Generator
) -> None:
    """What comes next takes the places of what all lanes have read."""
    check_samples(device, arch, pattern_of(np.ones((1, cols), bool), block), 64, rng, ("F", "C"))


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("block", [(128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("lengths", [(5, 2), (6, 1, 3), (2, 0, 5), (1, 2, 3, 1), (3, 3, 3, 2), (7,)], ids=str)
def test_sampled_rows_that_begin_and_end_anywhere_in_wide_and_narrow_tiles(
    lengths: Any, block: Any, arch: str, device: Device, rng: np.random.Generator
) -> None:
    there = np.zeros((len(lengths), 7), bool)
    for row, n in zip(there, lengths, strict=True):
        row[rng.permutation(7)[:n]] = True
    check_samples(device, arch, pattern_of(there, block), 64, rng)


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
def test_sampled_rows_far_from_each_other(arch: str, device: Device, rng: np.random.Generator) -> None:
    """More block rows without blocks between two others than a warp looks at together; rows have whole tiles."""
    there = np.zeros((150, 5), bool)
    there[[0, 40, 41, 149]] = True
    check_samples(device, arch, pattern_of(there, (64, 64)), 64, rng)


@pytest.mark.parametrize("arch", ["sm_80"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "block", "orders"),
    [
        *((F32, (32, 32), ("F", "C")), (F32, (16, 48), ("F", "F")), (F64, (16, 16), ("F", "C"))),
        *((F64, (64, 32), ("C", "F")), (F64, (128, 16), ("F48", "F48")), (F32, (128, 128), ("C", "C"))),
    ],
    ids=str,
)
def test_floats_of_32_and_64_bits(
    dtype: Any, block: Any, orders: Any, arch: str, device: Device, rng: np.random.Generator
) -> None:
    """Sampled, by one product of tf32 and by three; and pairs, also where the last step along K is not whole."""
    there = np.zeros((2, 5), bool)
    there[0, [0, 2, 4]] = there[1, 1] = True
    for how in ({}, {"precision": "tf32"}) if dtype == F32 else ({},):
        check_samples(device, arch, pattern_of(there, block, dtype), 44, rng, orders, **how)
    a, b = numbers(rng, (3, block[0], 44), dtype), numbers(rng, (3, 44, block[1]), dtype)
    given = a, np.array([0, 1, 2]), b, np.array([2, 0, 9]), np.array([0, 2])
    np.testing.assert_array_equal(paired(device, *given, dtype=dtype), sums_of_pairs(*given))


@pytest.mark.sanitizer
@pytest.mark.parametrize("bad", [-7, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("which", ["indices", "indptr"])
@pytest.mark.parametrize("block", [(64, 64), (16, 16)], ids=str)
def test_sampled_products_of_spoiled_index_arrays_touch_nothing_outside(
    block: Any, which: str, bad: int, device: Device, rng: np.random.Generator
) -> None:
    """A block without a column is zero."""
    (R, C), K = block, 64
    there = np.array([[True, False, True], [False, True, False]])
    pattern = pattern_of(there, block).on(device)
    X, Y = numbers(rng, (2 * R, K), F16), numbers(rng, (K, 3 * C), F16)
    getattr(pattern, which)[1] = bad
    got = device.asnumpy(bg.sddmm(device.asarray(X), device.asarray(Y), pattern).data).astype(float)
    if which == "indices":
        product = (X.astype(float) @ Y.astype(float)).reshape(2, R, 3, C).swapaxes(1, 2)
        np.testing.assert_array_equal(got, [product[0, 0], np.zeros(block), product[1, 1]])


# ------------------------------------------------------------------------------- on a card alone
@pytest.mark.large
@pytest.mark.parametrize("shape", [*SHAPES, (256, 72, 192)], ids=str)
def test_large_products_repeat_bit_by_bit(shape: Any, arch: str, device: Device, rng: np.random.Generator) -> None:
    R, K, N = shape
    there = rng.random((2, 40, 40)) < 0.3
    A, B = (pattern_of(x, block) for x, block in zip(there, ((R, K), (K, N)), strict=True))
    A.data[...], B.data[...] = numbers(rng, A.data.shape, F16), numbers(rng, B.data.shape, F16)
    on_a, on_b = A.on(device), B.on(device)
    with device.kernels() as kernels:
        first = on_a @ on_b
    assert kernel_of(arch) in kernels
    want = A.dense @ B.dense
    np.testing.assert_array_equal(device.asnumpy(first.toarray()), want.astype(F16))
    assert differing(lambda: (on_a @ on_b).data, first.data, 50) == 0


#: Numbers whose rounding to tf32 overflows, or nearly so.
LARGE = (3.4020e38, float(np.finfo(F32).max), -float(np.finfo(F32).max))


@pytest.mark.parametrize("arch", ["sm_80"], indirect=True)
@pytest.mark.parametrize("fill", [np.inf, -np.inf, np.nan, *LARGE, 2.0**-149])
def test_float32_of_any_size_is_what_float32_arithmetic_gives(
    fill: float, arch: str, device: Device, rng: np.random.Generator
) -> None:
    a, b = np.diag(np.full(32, 0.5, F32)), rng.standard_normal((32, 32)).astype(F32)
    a[3] = rng.integers(1, 3, 32)  # every number meets all that are not finite
    b[3, 5] = b[7] = fill
    one = np.zeros(1, np.int64)
    pairs = paired(device, a[None], one, b[None], one, one)[0]
    P = bg.bsr_array((device.asarray(np.ones((1, 32, 32), F32)), *map(device.asarray, (one, np.array([0, 1])))))
    samples = device.asnumpy(bg.sddmm(device.asarray(a), device.asarray(b), P).data)[0]
    with np.errstate(all="ignore"):
        want = sum(np.where(a[:, [k]] == 0, 0, a[:, [k]].astype(F64) * b[k]) for k in range(32)).astype(F32)
        meets = (a[:, :, None] == 0) & ~np.isfinite(b)
        want[meets.any(axis=1)] = np.nan  # 0 times infinity
    for got in (pairs, samples):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("which", ["X", "Y"])
@pytest.mark.parametrize("shift", [1, 4])
def test_factors_of_samples_at_any_address(shift: int, which: str, arch: str, device: Device) -> None:
    """Contiguous factors that do not begin at a multiple of 16 bytes, row by row or column by column, are copied."""
    device.needs(arch)
    rng = np.random.default_rng(3)
    A = matrix(rng, Case(F16, (16, 16), 40), unique=True)
    X, Y = (rng.integers(-2, 3, shape).astype(F16) for shape in ((A.shape[0], 48), (48, A.shape[1])))

    def moved(x: Any) -> Any:
        found = device.asarray(np.zeros(x.size + 8, F16))[shift : shift + x.size].reshape(x.shape)
        found[...] = device.asarray(x)
        return found

    put = (moved(X), device.asarray(Y)) if which == "X" else (device.asarray(X), moved(Y.T.copy()).T)
    pattern = A.on(device)
    pattern.data[...] = 1
    got = device.asnumpy(bg.sddmm(*put, pattern).toarray()).astype(float)
    want = (X.astype(float) @ Y.astype(float)) * (device.asnumpy(pattern.toarray()) != 0)
    np.testing.assert_array_equal(got, want)
