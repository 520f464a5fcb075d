"""Messages call things by names that users know: no private name, no `builtins`, no representation of a class."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi

A = bg.bsr_array(2 * np.eye(8) - np.eye(8, k=1) - np.eye(8, k=-1), blocksize=(2, 2))
Q = np.ones((1, 1, 16, 16), np.float32)
#: What a user may pass by mistake.
JUNK: tuple[Any, ...] = (
    None, 5, "x", [1], (), {"a": 1}, {1}, object(), np.float64(1), np.ones(3), np.ones((3, 5)), np.ones((2, 2), object),
    scipy.sparse.csr_array(np.eye(4)), scipy.sparse.bsr_array(np.eye(4)), scipy.sparse.bsr_matrix(np.eye(4)),
    bg.eye(4), bg.bsr_matrix(np.eye(6), blocksize=(3, 3)), bg.bsr_batch([A, A]), linalg.block_jacobi(A), linalg.ilu0(A),
    bg.BlockMask.causal(32, device="cpu"), bg.KVCache(1, 1, 32, 16, device="cpu"), slice(3), np.matmul,
)  # fmt: skip
#: By name: a call of which operands are replaced by junk, one after the other.
GOOD: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "matmul": (bg.matmul, (A, np.ones(8))),
    "sddmm": (bg.sddmm, (np.ones((8, 3)), np.ones((3, 8)), A)),
    "attention": (bg.attention, (Q, Q, Q)),
    "attention, mask": (lambda mask: bg.attention(Q, Q, Q, mask=mask), (bg.BlockMask.full(16, device="cpu"),)),
    "attention, out": (lambda out: bg.attention(Q, Q, Q, out=out), (Q.copy(),)),
    "attention, lengths": (lambda a, b: bg.attention(Q[0], Q[0], Q[0], cu_seqlens_q=a, cu_seqlens_k=b), ([0, 16],) * 2),
    "attention_decode": (bg.attention_decode, (Q[:, :, :1], bg.KVCache(1, 1, 32, 16, device="cpu"))),
    "append": (lambda k, v: bg.KVCache(1, 1, 32, 16, device="cpu").append(k, v), (Q, Q)),
    "merge_states": (bg.merge_states, ([Q, Q], [Q[..., 0]] * 2)),
    "matmul_backward": (bg.matmul_backward, (np.ones((8, 3)), A, np.ones((8, 3)))),
    "sddmm_backward": (bg.sddmm_backward, (A, np.ones((8, 3)), np.ones((3, 8)), A)),
    "vjp": (bg.vjp, (bg.matmul, A, np.ones(8))),
    "vjp, attention": (lambda *x: bg.vjp(bg.attention, *x), (Q, Q, Q)),
    "norm": (bg.norm, (A,)),
    "kron": (bg.kron, (A, A)),
    "vstack": (bg.vstack, ([A, A],)),
    "block_diag": (bg.block_diag, ([A, A],)),
    "bsr_array": (bg.bsr_array, (A,)),
    "bsr_batch": (bg.bsr_batch, ([A, A],)),
    "from_dense": (bg.from_dense, (np.eye(4), (2, 2))),
    "A + x": (lambda x: A + x, (A,)),
    "A * x": (lambda x: A * x, (2,)),
    "A @ x": (lambda x: A @ x, (np.ones(8),)),
    "A[i]": (lambda i: A[i], (slice(0, 2),)),
    "A[0] = x": (lambda x: A.copy().__setitem__((slice(0, 2), slice(0, 2)), x), (np.ones((2, 2)),)),
    "A.data = x": (lambda x: setattr(A.copy(), "data", x), (A.data,)),
    "A.indices = x": (lambda x: setattr(A.copy(), "indices", x), (A.indices,)),
    "scale_block_rows": (A.scale_block_rows, (np.ones(4),)),
    "batch @ x": (lambda x: bg.bsr_batch([A, A]) @ x, (np.ones((2, 8)),)),
    "with_data": (bg.bsr_batch([A, A]).with_data, (np.ones((2, *A.data.shape)),)),
    "mask & x": (lambda x: bg.BlockMask.full(16, device="cpu") & x, (bg.BlockMask.full(16, device="cpu"),)),
    "BlockMask.stack": (lambda x: bg.BlockMask.stack(x), ([bg.BlockMask.full(16, device="cpu")],)),
    "BlockMask.from_bsr": (bg.BlockMask.from_bsr, (bg.eye(32, blocksize=(16, 16)),)),
    "BlockMask.from_dense": (bg.BlockMask.from_dense, (np.eye(32, dtype=bool),)),
    "save_npz": (bg.save_npz, ("", A)),
    **{name: (getattr(linalg, name), (A, np.ones(8))) for name in ("cg", "gmres", "fgmres", "minres", "bicgstab")},
    "cg, M": (lambda M: linalg.cg(A, np.ones(8), M=M), (linalg.ilu0(A),)),
    "cg, x0": (lambda x0: linalg.cg(A, np.ones(8), x0), (np.ones(8),)),
    "cg of a batch": (lambda b, x0, M: linalg.cg(bg.bsr_batch([A, A]), b, x0, M=M), (np.ones((2, 8)), None, None)),
    "spsolve": (linalg.spsolve, (A, np.ones(8))),
    "spsolve_triangular": (linalg.spsolve_triangular, (bg.eye(8, blocksize=(2, 2)), np.ones(8))),
    "lobpcg": (lambda A, X: linalg.lobpcg(A, X), (A, np.eye(8)[:, :1])),
    "constrain": (linalg.constrain, (A, np.ones(8), [0], 0.0)),
    **{name: (getattr(linalg, name), (A,)) for name in ("block_jacobi", "chebyshev", "block_ssor", "ilu0", "ic0")},
    "smoothed_aggregation": (linalg.smoothed_aggregation, (A, np.ones((8, 1)))),
    "refresh": (linalg.smoothed_aggregation(A).refresh, (A,)),
    "from_pyamg": (linalg.from_pyamg, (None,)),
    "rigid_body_modes": (linalg.rigid_body_modes, (np.ones((4, 2)),)),
    "M @ r": (linalg.ilu0(A).__matmul__, (np.ones(8),)),
    "partition": (mpi.partition, (A,)),
    "zigzag_split": (lambda x: mpi.zigzag_split(x, 0, 1), (Q,)),
}  # fmt: skip
PRIVATE = re.compile(r"\bbuiltins\b|<class|<locals>|<lambda>|(?<![\w.\[(])_[a-zA-Z]\w*")


def _messages(call: Callable[..., Any], operands: tuple[Any, ...]) -> Iterator[str]:
    given = [(*operands[:k], junk, *operands[k + 1 :]) for k in range(len(operands)) for junk in JUNK]
    for arguments in [*given, operands[:-1], (*operands, *operands, *operands)]:
        if len(arguments) != len(operands) and call.__name__ == "<lambda>":
            continue
        try:
            call(*arguments)
        except Exception as error:
            yield f"{type(error).__name__}: {error}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GOOD)
def test_messages_have_no_private_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a name may be that of a file
    found = set(_messages(*GOOD[name]))
    assert name in ("A[i]", "bsr_array") or found
    shown = {text for text in found if PRIVATE.search(re.sub(r"'[^']*'|at 0x\w+", "", text))}
    assert not shown


def test_a_missing_operand_of_a_pullback_names_the_function_that_was_called() -> None:
    for function, operands in ((bg.matmul, "A, B"), (bg.sddmm, "X, Y, pattern"), (bg.attention, "q, k, v")):
        name = function.__name__
        for given in ((), (A,), (A,) * 5):
            with pytest.raises(TypeError) as caught:
                bg.vjp(function, *given)
            assert str(caught.value).startswith(f"{name}: ") and f"wanted vjp({name}, {operands}), and" in str(
                caught.value
            )
    _, pullback = bg.vjp(bg.matmul, A, np.ones(8))
    with pytest.raises(TypeError, match=r"^pullback\(\) missing 1 required positional argument: 'dC'"):
        pullback()
