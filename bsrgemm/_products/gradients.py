"""Gradients of products: of `matmul` with one or two BSR operands, and of `sddmm`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._array.base import BsrBase, kind_of, no_bsr
from .._array.convert import Conversions
from .._backend.base import Array, Blocks
from ..dtypes import accumulator_dtype, result_dtype
from .matmul import checked_factor, dense_operand, matmul
from .sddmm import check_structure, dense_matrix, sddmm


def matmul_backward(dC: Any, A: Any, B: Any, *, alpha: Any = 1) -> tuple[Any, Any]:
    """Return the gradients of ``C = alpha * (A @ B)``, of which at least one operand is a BSR matrix.

    Parameters
    ----------
    dC : array, bsr_array or bsr_matrix
        The gradient of a scalar with respect to C, of the shape of C. If both operands are BSR matrices it is one too,
        in blocks of the height of those of `A` and the width of those of `B`.
    A, B : bsr_array, bsr_matrix or array
        The operands, as `matmul` takes them: the dense one may be a vector, a matrix or a batch of matrices. A BSR
        operand may be a transpose that is not built, such as ``W.T``. All arrays are on the same device.
    alpha : number
        The factor of the product.

    Returns
    -------
    dA, dB : array, bsr_array or bsr_matrix
        The gradients with respect to `A`, ``conj(alpha) * (dC @ B.conj().T)``, and to `B`,
        ``conj(alpha) * (A.conj().T @ dC)``. That of a BSR operand has the blocks that the operand stores, and no others
        are computed; over a batch it is summed. The gradient of a real operand is real.

    Raises
    ------
    TypeError
        If neither operand is a BSR matrix, if `dC` or an operand is not an array on the same device or has a dtype that
        is not supported, if `dC` is dense and both operands are BSR matrices, or if `alpha` is not a suitable number.
    ValueError
        If the shapes do not agree, or the blocks of `dC` are not of the size of those of ``A @ B``.

    See Also
    --------
    sddmm : the product that computes the gradient of a BSR operand, with notes on waiting for the GPU.
    vjp : the result of a product together with the function that returns its gradients.

    Notes
    -----
    Nothing dense is made of a BSR operand, and nothing is transposed by copying, with one exception: of two BSR
    operands, the products ``dC @ B.conj().T`` and ``A.conj().T @ dC`` are computed as BSR matrices with all their
    blocks before those of `A` and `B` are taken. Sums over a batch are made in the dtype of the sums, and rounded once.

    On the GPU, the work is queued on CuPy's current stream. The call waits for the GPU only where `sddmm` or `matmul`
    does: when it must search for duplicate blocks in a matrix that is not known to be in canonical format, and for the
    product of two BSR matrices.

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

    A layer ``x @ W.T`` with sparse weights:

    >>> dx, dWt = bg.matmul_backward(np.ones((5, 4)), np.ones((5, 4)), A.T)
    >>> dx.shape, dWt.T.toarray()[0]
    ((5, 4), array([5., 5., 0., 0.]))
    """
    sparse = A if isinstance(A, BsrBase) else B
    if isinstance(sparse, BsrBase):
        with sparse._backend.recording(dC, A, B):
            if isinstance(A, BsrBase) and isinstance(B, BsrBase):
                return _of_two(dC, A, B, alpha)
            if sparse is B:
                return _of_one(dC, B, A, alpha, left=True)
            dB, dA = _of_one(dC, A, B, alpha, left=False)
            return dA, dB
    raise TypeError(
        f"A: wanted a bsr_array or bsr_matrix, got {kind_of(A)}, and B is no such matrix either, but {kind_of(B)}"
    )


def sddmm_backward(dS: Any, X: Any, Y: Any, pattern: Any, *, alpha: Any = 1) -> tuple[Array, Array]:
    """Return the gradients of ``S = sddmm(X, Y, pattern, alpha=alpha)``.

    Parameters
    ----------
    dS : bsr_array or bsr_matrix of shape (M, N)
        The gradient of a scalar with respect to S, with the blocks of S in the same order.
    X, Y : arrays of shape (M, K) and (K, N)
        The dense operands of the product.
    pattern : bsr_array or bsr_matrix of shape (M, N)
        The pattern of the product. Its values are not read.
    alpha : number
        The factor of the product.

    Returns
    -------
    dX, dY : arrays of shape (M, K) and (K, N)
        The gradients with respect to `X`, ``conj(alpha) * (dS @ Y.conj().T)``, and to `Y`,
        ``conj(alpha) * (X.conj().T @ dS)``. The gradient of a real operand is real.

    Raises
    ------
    TypeError
        If `dS` or `pattern` is not a BSR matrix, if an operand is not a dense array on the same device or has a dtype
        that is not supported, or if `alpha` is not a suitable number.
    ValueError
        If the shapes do not agree, or if `dS` has other blocks than S.

    See Also
    --------
    sddmm : the product.

    Notes
    -----
    The call waits for the GPU where `sddmm` does with an `out`: to compare the structure of `dS` with that of `pattern`
    if they do not share their index arrays, and to search for duplicate blocks in a pattern that is not known to be in
    canonical format.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> pattern = bg.eye(4, blocksize=(2, 2))
    >>> X, Y = np.arange(8.0).reshape(4, 2), np.ones((2, 4))
    >>> S = bg.sddmm(X, Y, pattern)
    >>> dX, dY = bg.sddmm_backward(S, X, Y, pattern)
    >>> dX[:, 0], dY[0]
    (array([ 2., 10., 18., 26.]), array([ 10.,  10., 114., 114.]))
    """
    for x, name in ((pattern, "pattern"), (dS, "dS")):
        if not isinstance(x, BsrBase):
            raise TypeError(f"{name}: wanted a bsr_array or bsr_matrix, got {no_bsr(x, name)}")
    if dS._backend is not pattern._backend:
        raise TypeError(
            f"dS: wanted a matrix on {pattern._backend.name!r}, where the pattern is, got {dS._backend.name!r}"
        )
    X, Y = (dense_matrix(pattern, x, name) for x, name in ((X, "X"), (Y, "Y")))
    if (X.shape[0], Y.shape[1]) != pattern._shape or X.shape[1] != Y.shape[0]:
        raise ValueError(
            f"sddmm_backward: dimension mismatch: X is {tuple(X.shape)}, Y is {tuple(Y.shape)}, "
            f"pattern is {pattern._shape}"
        )
    if pattern._origin is not None and dS._origin is not None:  # transposes that are not built yet
        turned = sddmm_backward(dS._source()[0], Y.T, X.T, pattern._source()[0], alpha=alpha)
        return turned[1].T, turned[0].T
    if pattern._has_duplicates:
        pattern = pattern._new(pattern._canonical(), canonical=True)
    check_structure(dS, pattern, "dS")
    factor = _conjugate(alpha)
    with pattern._backend.recording(dS, X, Y):
        dX, dY = matmul(dS, _adjoint(Y), alpha=factor), matmul(_adjoint(X), dS, alpha=factor)
        return _like(dX, X), _like(dY, Y)


def _of_one(dC: Any, A: Any, x: Any, alpha: Any, *, left: bool) -> tuple[Array, Any]:
    """Return the gradients of ``A @ x`` with respect to x and to A, or of ``x @ A`` if x is on the `left`."""
    names = ("B", "A") if left else ("A", "B")
    X, dC = dense_operand(A, x, names[1]), dense_operand(A, dC, "dC")
    rows, cols = A._shape
    taken, given = (rows, cols) if left else (cols, rows)
    side = -1 if left or X.ndim == 1 else -2
    wanted = list(X.shape)
    wanted[side] = given
    if X.shape[side] != taken or list(dC.shape) != wanted:
        shapes = {"dC": tuple(dC.shape), names[0]: A._shape, names[1]: tuple(X.shape)}
        raise ValueError(
            "matmul_backward: dimension mismatch: " + ", ".join(f"{n} is {shapes[n]}" for n in ("dC", "A", "B"))
        )
    factor, turned = _conjugate(alpha), _adjoint(A)
    line = (None, slice(None)) if left else (slice(None), None)
    wide, dwide = (X[line], dC[line]) if X.ndim == 1 else (X, dC)
    operands = (_adjoint(wide), dwide) if left else (dwide, _adjoint(wide))
    dA = _sampled(*operands, A, factor)
    dX = matmul(dC, turned, alpha=factor) if left else matmul(turned, dC, alpha=factor)
    return _like(dX, X), _like(dA, A)


def _sampled(X: Array, Y: Array, pattern: Any, alpha: Any) -> Any:
    """Return ``alpha * (X @ Y)`` at the blocks of a pattern, summed over a batch in the dtype of the sums."""
    if X.ndim == 2:
        return sddmm(X, Y, pattern, alpha=alpha)
    if pattern._origin is not None:  # a transpose that is not built yet
        return _sampled(Y.swapaxes(-1, -2), X.swapaxes(-1, -2), pattern._source()[0], alpha).T
    if pattern._has_duplicates:
        pattern = pattern._new(pattern._canonical(), canonical=True)
    dtype = result_dtype(X.dtype, Y.dtype)
    total = pattern._with_data(pattern._backend.xp.zeros(pattern.data.shape, accumulator_dtype(dtype)))
    # The sum has the index arrays of the pattern, so that their comparison does not wait for the GPU.
    checked_factor(alpha, dtype, "alpha")
    for one, other in zip(X, Y, strict=True):
        sddmm(one, other, total, alpha=alpha, beta=1, out=total)
    return total.astype(dtype)


def _of_two(dC: Any, A: Any, B: Any, alpha: Any) -> tuple[Any, Any]:
    """Return the gradients of the product of two BSR matrices, at their blocks."""
    if not isinstance(dC, BsrBase):
        raise TypeError(
            f"dC: wanted a bsr_array or bsr_matrix, since A and B are, got {kind_of(dC)}; "
            "bsrgemm.bsr_array(dC, blocksize=...) makes one"
        )
    for x, name in ((B, "B"), (dC, "dC")):
        if x._backend is not A._backend:
            raise TypeError(f"{name}: wanted a matrix on {A._backend.name!r}, where A is, got {x._backend.name!r}")
    if A._shape[1] != B._shape[0] or dC._shape != (A._shape[0], B._shape[1]):
        raise ValueError(f"matmul_backward: dimension mismatch: dC is {dC._shape}, A is {A._shape}, B is {B._shape}")
    blocksize = (A.blocksize[0], B.blocksize[1])
    if dC.blocksize != blocksize:
        raise ValueError(
            f"dC: wanted the blocksize of A @ B, {blocksize}, got {dC.blocksize}; dC.tobsr({blocksize}) has it"
        )
    dtype = result_dtype(dC.dtype, result_dtype(A.dtype, B.dtype))
    factor = checked_factor(_conjugate(alpha), dtype, "alpha")
    found = (_taken(dC @ _adjoint(B), A), _taken(_adjoint(A) @ dC, B))
    dA, dB = found if factor == 1 else (factor * x for x in found)
    return _like(dA, A), _like(dB, B)


def _taken(S: Any, pattern: Any) -> Any:
    """Return the blocks of S at those of a pattern, 0 where S has none."""
    backend = pattern._backend
    xp = backend.xp
    if pattern._has_duplicates:
        pattern = pattern._new(pattern._canonical(), canonical=True)
    keys = []
    for blocks in (have := S._canonical(), wanted := pattern._validated):
        row = backend.expand(blocks.indptr, len(blocks.indices)).astype(np.int64)
        keys.append(row * pattern._block_shape[1] + blocks.indices)
    if not len(have.indices) or not len(wanted.indices):
        return pattern._with_data(xp.zeros(wanted.data.shape, S.dtype))
    place = xp.minimum(xp.searchsorted(keys[0], keys[1]), len(keys[0]) - 1)
    stored = keys[0][place] == keys[1]
    data = xp.where(stored[:, None, None], have.data[place], S.dtype.type(0))
    return pattern._new(Blocks(data, wanted.indices.copy(), wanted.indptr.copy()))


def _adjoint(x: Any) -> Any:
    """Return the conjugate transpose of a BSR matrix, or of the matrices or the vector in a dense array, as a view."""
    turned: Any = x
    if x.dtype.kind == "c":
        turned = x.conj()
    if isinstance(x, BsrBase):
        assert isinstance(turned, Conversions)
        return turned.T
    return turned.swapaxes(-1, -2) if x.ndim > 1 else turned


def _conjugate(alpha: Any) -> Any:
    """Return the conjugate of a factor; whatever is not a number is left for the product to refuse."""
    return alpha.conjugate() if isinstance(alpha, complex | np.complexfloating) else alpha


def _like(gradient: Any, operand: Any) -> Any:
    """Return the gradient with respect to an operand, which is real if the operand is."""
    return gradient.real if gradient.dtype.kind == "c" and operand.dtype.kind != "c" else gradient
