"""What the pages say of behaviour and of measurements is what happens and was measured, where no GPU is needed for it.

Each case names words of a page and checks what they say; a page that drops or changes the words has to change its case.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm.dtypes import DEVICE_DTYPES, FP8_RESULTS, HOST_DTYPES, accumulator_dtype, result_dtype
from bsrgemm.interop import mpi

from .test_docs import OTHERS, PAGES
from .test_readme import ROOT

HERE = {"block": 16, "device": "cpu"}


def matrix(dtype: Any = np.float64) -> Any:
    """4 x 4 in blocks of 2 x 2, two of them stored."""
    return bg.bsr_array((np.ones((2, 2, 2), dtype), ([0, 1], [0, 1])), shape=(4, 4))


@contextlib.contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    with pytest.raises(kinds or (TypeError, ValueError, NotImplementedError)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ------------------------------------------------------------------------------------ structure, dtypes
def block_sizes_divide() -> None:
    with refused(ValueError):
        bg.bsr_array(np.eye(4), blocksize=(3, 3))


def two_dimensions() -> None:
    with refused():
        bg.bsr_array(np.zeros((2, 4, 4)))


def a_batch_has_one_pattern() -> None:
    batch = bg.bsr_batch([matrix(), 2 * matrix()])
    np.testing.assert_array_equal((batch @ np.ones((2, 4)))[1], 2 * (matrix() @ np.ones(4)))
    x, info = bg.linalg.cg(bg.bsr_batch([bg.eye(4, blocksize=(2, 2))] * 2), np.ones((2, 4)))
    assert x.shape == (2, 4) and not info.any()
    assert bg.linalg.block_jacobi(bg.bsr_batch([bg.eye(4, blocksize=(2, 2))])).shape == (1, 4, 4)
    assert batch[1].toarray()[0, 0] == 2 and batch.tobsr().shape == (8, 8)
    for call in (
        lambda: batch.T, lambda: batch[:1], lambda: 2 * batch, lambda: batch + batch, lambda: bg.save_npz("x", batch),
        lambda: bg.linalg.minres(batch, np.ones((2, 4))), lambda: bg.linalg.chebyshev(batch),
    ):  # fmt: skip
        with refused(TypeError, ValueError, AttributeError):
            call()


def slices_on_boundaries() -> None:
    A = matrix()
    for key in (slice(0, 1), slice(0, 4, 2), 0):
        with refused(NotImplementedError):
            A[key]
    with refused(NotImplementedError):
        iter(A)
    assert A[:2, 2:].nnz == 0


def assignment_adds_no_blocks() -> None:
    A = matrix()
    with refused(ValueError):
        A[:2, 2:] = 1.0
    with refused(ValueError):
        A.assemble(np.ones((1, 2, 2)), [0], [1])
    A.setdiag(1.0, k=2)
    assert A.nnz == 12


def resize_and_reshape() -> None:
    A = matrix()
    with refused():
        A.resize((3, 4))
    assert A.reshape((2, 8)).format == "coo"


def dense_results_raise() -> None:
    A = matrix()
    for call in (lambda: A + 1, lambda: A.power(0), lambda: np.cos(A), lambda: 1 / A):
        with refused():
            call()


def writing_into_data_shows_in_a_lazy_transpose() -> None:
    A = matrix()
    lazy, copied = A.T, A.T.copy()
    A.data[0, 0, 0] = 7
    assert lazy.toarray()[0, 0] == 7 and copied.toarray()[0, 0] == 1


def no_long_double_on_the_gpu() -> None:
    assert np.dtype("g") in HOST_DTYPES and np.dtype("g") not in DEVICE_DTYPES
    for dtype in (object, "datetime64[s]"):
        with refused(TypeError):
            bg.bsr_array((2, 2), dtype=dtype)


def float8_is_no_dtype() -> None:
    with refused(TypeError):
        bg.bsr_array((2, 2), dtype=ml_dtypes.float8_e4m3fn)
    with refused(TypeError):
        bg.matmul(matrix(np.uint8), np.ones((4, 1)).astype(ml_dtypes.float8_e5m2), scale_a=1.0)


def sixteen_bit_floats_have_no_other_format() -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16):
        with refused(TypeError):
            matrix(dtype).tocsr()


def integer_sums_wrap() -> None:
    A = bg.bsr_array(np.full((1, 2), 100, np.int8), blocksize=(1, 2))
    assert (A @ np.ones(2, np.int8))[0] == -56


def results_keep_their_kind() -> None:
    for A, dtype in ((matrix(np.complex128), "float64"), (matrix(), "int64")):
        with refused(TypeError):
            bg.matmul(A, np.ones(4), out_dtype=dtype)


def extremes_take_no_out() -> None:
    A = matrix()
    for name in ("min", "max", "argmax"):
        with refused():
            getattr(A, name)(axis=0, out=np.zeros(4))
    with refused():
        bg.bsr_matrix(A).getnnz(axis=0)
    assert A.count_nonzero(axis=0).shape == (4,)


# --------------------------------------------------------------------------------------------- products
def fp8_results() -> None:
    A, x = matrix(np.uint8), np.ones(4).astype(ml_dtypes.float8_e4m3fn)
    for dtype in FP8_RESULTS:
        assert bg.matmul(A, x, scale_a=1.0, out_dtype=dtype).dtype == dtype
    assert {str(dtype) for dtype in FP8_RESULTS} == {"float32", "float16", "bfloat16"}
    with refused(TypeError):
        bg.matmul(A, x, scale_a=1.0, out_dtype="float64")


def tune_needs_a_gpu() -> None:
    with refused(TypeError):
        bg.tune(matrix(), 8)


def a_plan_keeps_sixteen_bytes_on_the_cpu() -> None:
    large = bg.eye(80, blocksize=(40, 40))
    for A, bytes_a_pair in ((matrix(), 0), (large, 16)):
        made = bg.plan(A, A)
        made(A, A)
        listed = made._pattern.__dict__.get("_whole")
        kept = 0 if listed is None else listed.left.nbytes + listed.right.nbytes
        assert kept == bytes_a_pair * made.pairs


def gradients_of_a_product() -> None:
    dA, dB = bg.matmul_backward(np.ones((4, 3)), matrix(), np.ones((4, 3)))
    np.testing.assert_array_equal(dA.toarray(), np.kron(np.eye(2), np.full((2, 2), 3.0)))
    np.testing.assert_array_equal(dB, matrix().toarray().T @ np.ones((4, 3)))


# --------------------------------------------------------------------------------------- linear systems
def preconditioners_take_square_blocks() -> None:
    for dtype in (np.float32, np.float64, np.complex64, np.complex128):
        assert bg.linalg.block_jacobi(bg.eye(4, blocksize=(2, 2), dtype=dtype)).dtype == dtype
    for make in (bg.linalg.block_jacobi, bg.linalg.chebyshev, bg.linalg.block_ssor, bg.linalg.ilu0, bg.linalg.ic0):
        with refused(TypeError):
            make(bg.eye(4, blocksize=(2, 2), dtype=np.float16))
        with refused(ValueError):
            make(bg.eye(4, blocksize=(2, 1)))


# -------------------------------------------------------------------------------------------- attention
def qkv(length: int = 32, dtype: Any = np.float64) -> Any:
    return np.random.default_rng(0).standard_normal((3, 1, 1, length, 8)).astype(dtype)


def one_dtype() -> None:
    q, k, v = qkv()
    with refused():
        bg.attention(q, k.astype(np.float32), v)


def a_mask_is_a_block_mask() -> None:
    with refused(TypeError):
        bg.attention(*qkv(), mask=np.ones((32, 32), bool))


def masks_that_differ() -> None:
    mask = bg.BlockMask.causal(32, **HERE)
    for other in (bg.BlockMask.causal(64, **HERE), bg.BlockMask.causal(32, block=32, device="cpu")):
        with refused(ValueError):
            mask & other


def no_mask_with_sequences() -> None:
    x = np.ones((32, 1, 8))
    with refused(ValueError):
        bg.attention(x, x, x, mask=bg.BlockMask.causal(32, **HERE), cu_seqlens_q=[0, 32], cu_seqlens_k=[0, 32])
    bg.attention(x, x, x, window=(3, 0), cu_seqlens_q=[0, 32], cu_seqlens_k=[0, 32])


def nothing_seen_gives_zero() -> None:
    out, lse = bg.attention(*qkv(), mask=~bg.BlockMask.full(32, **HERE), return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


def attention_has_gradients_and_no_bias() -> None:
    q, k, v = qkv()
    out, lse = bg.attention(q, k, v, return_lse=True)
    assert all(np.isfinite(d).all() for d in bg.attention_backward(out, q, k, v, out, lse))
    for name in ("bias", "attn_bias", "dropout"):
        with refused(TypeError):
            bg.attention(q, k, v, **{name: 0.0})


def fp8_has_no_gradients() -> None:
    q, k, v = qkv().astype(ml_dtypes.float8_e4m3fn)
    out, lse = bg.attention(q, k, v, q_scale=1.0, return_lse=True)
    with refused(TypeError):
        bg.attention_backward(out, q, k, v, out, lse)


# ------------------------------------------------------------------------------------- several processes
def what_a_distributed_matrix_has() -> None:
    D, b = mpi.partition(2 * bg.eye(8, blocksize=(2, 2))), np.ones(8)
    for M in (bg.linalg.block_jacobi(D), bg.linalg.chebyshev(D), bg.linalg.ilu0(D.interior), bg.linalg.ic0(D.interior)):
        for solver in (bg.linalg.cg, bg.linalg.minres, bg.linalg.bicgstab, bg.linalg.gmres, bg.linalg.fgmres):
            x, info = solver(D, b, M=M)
            assert info == 0 and np.allclose(x, 0.5)
    for call in (
        lambda: D @ D, lambda: bg.linalg.spsolve(D, b), lambda: bg.linalg.constrain(D, b, [0]),
        lambda: bg.linalg.ilu0(D), lambda: bg.linalg.ic0(D), lambda: bg.linalg.block_ssor(D),
    ):  # fmt: skip
        with refused(TypeError):
            call()


def what_a_ring_takes() -> None:
    q, k, v = qkv()
    for name in ("cu_seqlens_q", "out", "q_scale"):
        with refused(TypeError):
            mpi.ring_attention(q, k, v, comm=None, **{name: None})


# ----------------------------------------------------------------------------------------------- decode
def cache(**options: Any) -> bg.KVCache:
    return bg.KVCache(1, 1, 32, 8, dtype="float64", device="cpu", **options)


def number_of_queries() -> None:
    full = cache()
    full.append(*qkv()[1:])
    q = np.ones((1, 1, 17, 8))
    assert bg.attention_decode(q[:, :, :16], full).shape == (1, 1, 16, 8)
    with refused(ValueError):
        bg.attention_decode(q, full)


def pages_are_powers_of_two() -> None:
    for page in (16, 32):
        cache(page=page)
    for page in (8, 24, 512):
        with refused(ValueError):
            cache(page=page)


def a_full_cache_raises() -> None:
    full = cache()
    full.append(*qkv()[1:])
    before = full.k.copy()
    with refused(ValueError):
        full.append(*qkv()[1:])
    np.testing.assert_array_equal(full.k, before)
    assert full.lengths.tolist() == [32]


# --------------------------------------------------------------------------------------------- numerics
def promotion_of_bfloat16() -> None:
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    assert result_dtype(bfloat16, np.dtype("float16")) == np.float32
    for other in ("int16", "uint32", "int64"):
        assert result_dtype(bfloat16, np.dtype(other)) == np.result_type(np.float32, np.dtype(other))


def sums_are_kept_wide() -> None:
    for name, wanted in (
        ("float16", "float32"), ("float32", "float32"), ("float64", "float64"), ("complex64", "complex64"),
        ("int8", "int8"), ("bool", "bool"),
    ):  # fmt: skip
        assert accumulator_dtype(np.dtype(name)) == np.dtype(wanted)
    assert accumulator_dtype(np.dtype(ml_dtypes.bfloat16)) == np.float32


def out_is_not_read() -> None:
    assert np.isfinite(bg.matmul(matrix(), np.ones(4), out=np.full(4, np.nan))).all()


def attention_is_wide_enough() -> None:
    _, lse = bg.attention(*qkv(dtype=np.float16), return_lse=True)
    assert lse.dtype == np.float32
    assert bg.attention(*qkv(), return_lse=True)[1].dtype == np.float64


# ---------------------------------------------------------------------------------------------- linear systems
def defaults_of_solvers() -> None:
    for solve in (bg.linalg.cg, bg.linalg.minres, bg.linalg.gmres, bg.linalg.fgmres, bg.linalg.bicgstab):
        options = inspect.signature(solve).parameters
        assert (options["rtol"].default, options["atol"].default) == (1e-5, 0)


CASES: list[tuple[str, str, Callable[[], None]]] = [
    ("docs/limits.md", "A matrix has one block size, which divides its shape", block_sizes_divide),
    ("docs/limits.md", "Matrices have two dimensions", two_dimensions),
    ("docs/limits.md", "A batch of sparse matrices, `bg.bsr_batch`, has one pattern for all", a_batch_has_one_pattern),
    ("docs/limits.md", "takes a `bsr_batch`", a_batch_has_one_pattern),
    ("docs/limits.md", "Slices lie on block boundaries and have no step", slices_on_boundaries),
    ("docs/limits.md", "Assignment does not add blocks, and neither does `assemble`", assignment_adds_no_blocks),
    ("docs/limits.md", "`resize` goes to multiples of the block; `reshape` to", resize_and_reshape),
    ("docs/limits.md", "`A + 1`, `A.power(0)`, `np.cos(A)`, `1 / A` and the like raise", dense_results_raise),
    ("docs/limits.md", "shows in an `A.T` whose arrays", writing_into_data_shows_in_a_lazy_transpose),
    ("docs/limits.md", "The GPU has no long double. Nothing holds objects or datetimes", no_long_double_on_the_gpu),
    ("docs/limits.md", "float8 is not a dtype of a matrix", float8_is_no_dtype),
    ("docs/limits.md", "float16 and bfloat16 have no other sparse format", sixteen_bit_floats_have_no_other_format),
    ("docs/limits.md", "Integer sums wrap", integer_sums_wrap),
    ("docs/limits.md", "do not go from complex to real, or from float to integer", results_keep_their_kind),
    ("docs/limits.md", "take no `out`, as in scipy. `getnnz(axis)` raises", extremes_take_no_out),
    ("docs/limits.md", "gives float32, float16 or bfloat16", fp8_results),
    ("docs/limits.md", "`bg.tune` needs a matrix on the GPU", tune_needs_a_gpu),
    ("docs/limits.md", "16 on the CPU if BLAS multiplies the blocks", a_plan_keeps_sixteen_bytes_on_the_cpu),
    ("docs/limits.md", "Gradients are functions", gradients_of_a_product),
    ("docs/limits.md", "Preconditioners take square blocks of float32", preconditioners_take_square_blocks),
    ("docs/limits.md", "q, k and v have one dtype", one_dtype),
    ("docs/limits.md", "A mask is a `BlockMask`, not an array", a_mask_is_a_block_mask),
    ("docs/limits.md", "Masks of different shapes or blocks do not combine", masks_that_differ),
    ("docs/limits.md", "`mask` does not go together with `cu_seqlens_q`", no_mask_with_sequences),
    ("docs/limits.md", "There is no additive bias and no dropout", attention_has_gradients_and_no_bias),
    ("docs/limits.md", "fp8 has no gradients", fp8_has_no_gradients),
    ("docs/limits.md", "A matrix over the ranks of MPI has products with vectors", what_a_distributed_matrix_has),
    ("docs/limits.md", "`mpi.ring_attention` takes no fp8, no `cu_seqlens_q` and no `out`", what_a_ring_takes),
    ("docs/limits.md", "A sequence has 1 to 16 queries in a call", number_of_queries),
    ("docs/limits.md", "A page has a power of two of tokens", pages_are_powers_of_two),
    ("docs/limits.md", "A full cache raises, and nothing is written", a_full_cache_raises),
    ("docs/numerics.md", "bfloat16 with float16 gives float32", promotion_of_bfloat16),
    ("docs/numerics.md", "| float16, bfloat16 | float32 |", sums_are_kept_wide),
    ("docs/numerics.md", "`out` is not read when `beta` is 0", out_is_not_read),
    ("docs/numerics.md", "A query that sees no key gets 0, and -inf as its logarithm", nothing_seen_gives_zero),
    ("docs/numerics.md", "or in float64 if the operands or the result are float64", attention_is_wide_enough),
    ("docs/linear-systems.md", "`rtol` is 1e-5 and `atol` 0 unless you say otherwise", defaults_of_solvers),
    ("README.md", "assignment does not add blocks", assignment_adds_no_blocks),
]  # fmt: skip


@pytest.mark.parametrize(("page", "words", "holds"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_the_statement_is_on_its_page_and_holds(page: str, words: str, holds: Callable[[], None]) -> None:
    assert words in " ".join((ROOT / page).read_text(encoding="utf-8").split())
    holds()


# ------------------------------------------------------------------------------------------------ prose
WRITTEN = [*PAGES, *OTHERS]
#: The lab book is full of ratios, and says so.
_WITHOUT_A_ZERO = r"(?<![\w.])\.\d"
#: Words of a private vocabulary, and turns of phrase that have to be read twice.
AVOIDED = [
    r"\b[Bb]ehind\b",
    r"(?:^|[.!?:] +)Of ",
    r"\bas (?:it|they) lies?\b",
    r"\bsome \d",
    r"\bin the place of\b",
    r"\bbesides\b",
    r"\bhomes?\b",
    r"\bbut for\b",
    r"\b(?:is|are) told\b",
    _WITHOUT_A_ZERO,
]


def avoided(text: str) -> list[str]:
    """Where words that are to be avoided stand, outside of code and generated tables."""
    text = re.sub(r"^```.*?^```$|<!-- results:.*?<!-- /results:.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", text)
    return [found[0] for words in AVOIDED for found in re.finditer(words, text, re.MULTILINE)]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_is_in_plain_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "NOTES.md":
        text = re.sub(_WITHOUT_A_ZERO, "0", text)
    assert avoided(text) == []


def test_words_that_are_to_be_avoided_are_seen() -> None:
    text = "Keys behind it. Of A, that it stays. It keeps .5 of it; `a behind b`.\n\n```\nbehind\n```\n"
    assert avoided(text) == ["behind", ". Of ", ".5"]


def test_the_readme_fits_two_screens_without_its_tables() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    own = re.sub(r"<!-- bench:.*?<!-- /bench:.*?-->", "", text, flags=re.DOTALL)
    assert len(own.splitlines()) <= 100
