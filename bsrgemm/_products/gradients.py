"""Gradients of products."""

from __future__ import annotations

from typing import Any

from .._array.base import BsrBase
from .._array.convert import Conversions
from .._backend.base import Array
from .matmul import matmul
from .sddmm import dense_matrix, sddmm


def matmul_backward(dC: Any, A: Any, B: Any) -> tuple[Any, Array]:
    """Return the gradients of ``C = A @ B`` for a BSR `A` and a dense `B`.

    Parameters
    ----------
    dC : array of shape (M, N)
        The gradient of a scalar with respect to C.
    A : bsr_array or bsr_matrix of shape (M, K)
        The BSR operand of the product.
    B : array of shape (K, N)
        The dense operand of the product. `dC` and `B` are on the same device as `A`.

    Returns
    -------
    dA : bsr_array or bsr_matrix of shape (M, K)
        The gradient with respect to `A`: ``dC @ B.conj().T``, computed only for the blocks that `A` stores.
    dB : array of shape (K, N)
        The gradient with respect to `B`: ``A.conj().T @ dC``.

    Raises
    ------
    TypeError
        If `A` is not a BSR matrix, or if `dC` or `B` is not a dense array on the same device as `A` or has a dtype
        that is not supported.
    ValueError
        If `dC` or `B` does not have two dimensions, or if the shapes do not agree.

    See Also
    --------
    sddmm : the product that computes dA, with notes on waiting for the GPU.

    Notes
    -----
    On the GPU, the work is queued on CuPy's current stream. The call waits for the GPU only where `sddmm` or `matmul`
    does: when it must search for duplicate blocks in a matrix that is not known to be in canonical format.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    >>> dA, dB = bg.matmul_backward(np.ones((4, 3)), A, np.ones((4, 3)))
    >>> dA.toarray()
    array([[3., 3., 0., 0.],
           [3., 3., 0., 0.],
           [0., 0., 3., 3.],
           [0., 0., 3., 3.]])
    >>> dB[0]
    array([1., 1., 1.])
    """
    if not isinstance(A, BsrBase):
        raise TypeError(f"A: wanted a bsr_array or bsr_matrix, got {type(A).__name__}")
    dC, B = (dense_matrix(A, x, name) for x, name in ((dC, "dC"), (B, "B")))
    if A._shape[1] != B.shape[0] or tuple(dC.shape) != (A._shape[0], B.shape[1]):
        raise ValueError(
            f"matmul_backward: dimension mismatch: dC is {tuple(dC.shape)}, A is {A._shape}, B is {tuple(B.shape)}"
        )
    assert isinstance(A, Conversions)
    turned = A.conj().T if A.dtype.kind == "c" else A.T
    return sddmm(dC, B.conj().T if B.dtype.kind == "c" else B.T, A), matmul(turned, dC)
