"""Masks from dense booleans, BSR matrices and lists of blocks, conversions back, and moves between devices."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from .._array.arrays import leaf
from .._array.base import BsrBase, no_bsr
from .._array.construct import from_sparse
from .._backend import registry, structure
from .._backend.base import Array
from .checks import host_array
from .mask_base import Grid, MaskBase, check_heads, check_shape, pack, unpack, whole_kinds


class Conversions(MaskBase):
    """Constructors from data, and the methods that give a mask in another form or on another device."""

    @classmethod
    def from_dense(cls, allowed: Any, *, block: Any = 128) -> Self:
        """Build a mask from booleans, on the device that holds them.

        Parameters
        ----------
        allowed : array of bool, shape (S_q, S_k) or (batch, heads, S_q, S_k)
            True where a query may attend to a key; a NumPy or CuPy array, or a tensor of a library that offers DLPack,
            such as torch and JAX.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.

        Returns
        -------
        BlockMask
            A mask with one pattern, or with a pattern for each batch and head.

        Raises
        ------
        TypeError
            If `allowed` is not an array or a tensor of booleans.
        ValueError
            If `allowed` has neither 2 nor 4 dimensions, or `block` is out of range.

        Notes
        -----
        If the mask is on a GPU, this waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> import numpy as np
        >>> bg.BlockMask.from_dense(np.eye(32, dtype=bool), block=16)
        <BlockMask 32 x 32, blocks 16 x 16, 2 stored (0 whole), density 0.031>
        """
        backend = registry.backend_of(allowed) or registry.foreign_backend(allowed)
        if backend is not None and not backend.is_sparse(allowed):
            allowed = registry.adopted(backend, allowed, "allowed")
        if backend is None or not backend.is_dense(allowed):
            raise TypeError(f"allowed: wanted a NumPy or CuPy array, got {type(allowed).__name__}")
        if allowed.dtype != np.bool_:
            raise TypeError(f"allowed: wanted booleans, got dtype {allowed.dtype}")
        if allowed.ndim not in (2, 4):
            raise ValueError(f"allowed: wanted 2 or 4 dimensions, got {allowed.ndim}")
        grid = Grid(allowed.shape[-2], allowed.shape[-1], block, backend.name)
        xp = backend.xp
        if allowed.ndim == 4 and not allowed.shape[0] * allowed.shape[1]:
            raise ValueError(f"allowed: wanted at least one batch and one head, got shape {tuple(allowed.shape)}")
        heads = check_heads(allowed.shape[:2]) if allowed.ndim == 4 else (1, 1)
        (rows, cols), (bq, bk) = grid.counts, grid.block
        patterns = heads[0] * heads[1]
        full = xp.zeros((patterns, rows * bq, cols * bk), bool)
        full[:, : grid.shape[0], : grid.shape[1]] = allowed.reshape(patterns, *grid.shape)
        tiles = full.reshape(patterns * rows, bq, cols, bk).transpose(0, 2, 1, 3)
        row, col = xp.nonzero(tiles.any(axis=(2, 3)))  # synchronize!
        return cls._from_masks(grid, heads, row * cols + col, pack(xp, tiles[row, col]))

    @classmethod
    def from_bsr(cls, A: Any) -> Self:
        """Allow the stored blocks of a BSR matrix; if it is boolean, only their True elements.

        Parameters
        ----------
        A : bsr_array, bsr_matrix or a BSR matrix of SciPy
            Its shape is (S_q, S_k), its block size becomes that of the mask.

        Returns
        -------
        BlockMask
            A mask with one pattern, on the device of `A`.

        Raises
        ------
        TypeError
            If `A` is not in BSR format.
        ValueError
            If a side of the blocks is not a multiple of 16 from 16 to 256.

        Notes
        -----
        If the mask is on a GPU, this waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> import numpy as np
        >>> A = bg.from_dense(np.eye(32), blocksize=(16, 16))
        >>> bg.BlockMask.from_bsr(A)
        <BlockMask 32 x 32, blocks 16 x 16, 2 stored (2 whole), density 0.500>
        """
        if getattr(A, "format", None) != "bsr":
            raise TypeError(f"A: wanted a BSR matrix, got {no_bsr(A, 'A')}; BlockMask.from_dense takes booleans")
        backend = registry.backend_of(A)
        assert backend is not None
        try:
            grid = Grid(A.shape[0], A.shape[1], A.blocksize, backend.name)
        except ValueError as error:
            raise ValueError(f"A: {error}; A.tobsr(blocksize=...) converts it") from None
        if A.dtype != np.bool_:
            return cls._from_whole(grid, (1, 1), A.indptr, A.indices)
        if not isinstance(A, BsrBase):  # a class of SciPy
            parts = from_sparse(backend, A, None, False, None)
            A = leaf(backend, True)((0, 0), dtype=A.dtype)._new(parts.blocks, parts.shape)
        data, indices, indptr = A._canonical()
        key = structure.block_keys(backend, indices, indptr, grid.counts[1])
        return cls._from_masks(grid, (1, 1), key, pack(backend.xp, data))

    @classmethod
    def from_block_indices(
        cls, indptr: Any, indices: Any, *, shape: tuple[int, int], block: Any = 128, heads: tuple[int, int] = (1, 1)
    ) -> Self:
        """Allow whole blocks, which are given by the block columns of each block row.

        Parameters
        ----------
        indptr : array of int, shape (patterns * block rows + 1,)
            First entry of each block row in `indices`, counted through all patterns, and ``len(indices)`` at the end.
        indices : array of int
            Block columns in any order. A block that is listed twice counts once. The mask is on the device of this
            array.
        shape : (int, int)
            Numbers of queries and keys.
        block : int or (int, int)
            Queries and keys of a block: multiples of 16 up to 256.
        heads : (int, int)
            Numbers of patterns along the batch and along the heads.

        Returns
        -------
        BlockMask
            A mask of shape `shape` with ``heads[0] * heads[1]`` patterns.

        Raises
        ------
        ValueError
            If `indptr` does not climb from 0 to ``len(indices)``, a block column is outside the mask, or another
            argument is out of range.

        Notes
        -----
        If the mask is on a GPU, this waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.from_block_indices([0, 1, 3], [0, 0, 1], shape=(32, 32), block=16)
        <BlockMask 32 x 32, blocks 16 x 16, 3 stored (3 whole), density 0.750>
        """
        backend = registry.backend_of(indices) or registry.host()
        xp = backend.xp
        given = (("indptr", indptr), ("indices", indices))
        indptr, indices = (
            xp.asarray(host_array(name, x, "integers in one dimension") if isinstance(x, list | tuple) else x)
            for name, x in given
        )
        if not indices.size:  # NumPy makes an empty list an array of floats
            indices = indices.astype(np.int64)
        grid = Grid(*check_shape(shape), block, backend.name)
        heads = check_heads(heads)
        rows, cols = grid.counts
        wanted = heads[0] * heads[1] * rows + 1
        if indptr.ndim != 1 or len(indptr) != wanted or indptr.dtype.kind not in "iu":
            raise ValueError(f"indptr: wanted {wanted} integers, got {indptr.dtype} of shape {tuple(indptr.shape)}")
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueError(
                f"indices: wanted integers in one dimension, got {indices.dtype} of shape {tuple(indices.shape)}"
            )
        good = bool((indptr[0] == 0) & (indptr[-1] == len(indices)) & (indptr[1:] >= indptr[:-1]).all())
        if not good:
            got = backend.to_host(indptr)  # synchronize!
            raise ValueError(f"indptr: wanted numbers that climb from 0 to {len(indices)}, got {got}")
        if len(indices) and not bool((indices.min() >= 0) & (indices.max() < cols)):
            low, high = int(indices.min()), int(indices.max())  # synchronize!
            raise ValueError(f"indices: wanted block columns from 0 to {cols - 1}, got {low} to {high}")
        return cls._from_whole(grid, heads, indptr.astype(np.int64), indices.astype(np.int64))

    def to_dense(self) -> Array:
        """The mask as booleans, for small masks.

        Returns
        -------
        array of bool, shape (S_q, S_k), or (batch, heads, S_q, S_k) for several patterns
            True where a query may attend to a key, on the device of the mask.

        Notes
        -----
        The array takes S_q * S_k bytes for each pattern. Nothing waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.causal(3, block=16, device="cpu").to_dense()
        array([[ True, False, False],
               [ True,  True, False],
               [ True,  True,  True]])
        """
        xp = self._backend.xp
        (rows, cols), (bq, bk) = self._grid.counts, self.block
        patterns = self.heads[0] * self.heads[1]
        tiles = xp.zeros((patterns * rows, cols, bq, bk), bool)
        masks = xp.concatenate([unpack(xp, self.bits, bk), xp.ones((1, bq, bk), bool)])
        tiles[self._rows(), self.indices] = masks[self.kinds]
        by_query = tiles.reshape(patterns, rows, cols, bq, bk).transpose(0, 1, 3, 2, 4)
        dense = by_query.reshape(patterns, rows * bq, cols * bk)
        dense = dense[:, : self.shape[0], : self.shape[1]]
        return dense[0] if self.heads == (1, 1) else dense.reshape(*self.heads, *self.shape)

    def to_bsr(self) -> Any:
        """The mask as a boolean BSR array.

        Returns
        -------
        bsr_array of bool, shape (S_q, S_k)
            Its blocks are those of the mask, on the same device.

        Raises
        ------
        ValueError
            If the mask has several patterns, or a length is not a multiple of the block.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.causal(32, block=16, device="cpu").to_bsr().nnz
        768
        """
        if self.heads != (1, 1):
            raise ValueError(
                f"to_bsr: wanted one pattern, got {self.heads[0]} x {self.heads[1]}; to_dense() takes several"
            )
        if any(n % b for n, b in zip(self.shape, self.block, strict=True)):
            raise ValueError(
                f"to_bsr: {self.shape} is no multiple of the block {self.block}; to_dense() takes any length"
            )
        xp = self._backend.xp
        masks = xp.concatenate([unpack(xp, self.bits, self.block[1]), xp.ones((1, *self.block), bool)])
        arrays = (masks[self.kinds], self.indices.copy(), self.indptr.copy())
        return leaf(self._backend, True)(arrays, shape=self.shape)

    def to_device(self, device: str) -> Self:
        """Move the mask to another device.

        Parameters
        ----------
        device : {"cpu", "cuda"}
            The name of the device.

        Returns
        -------
        BlockMask
            This mask if it is there already, otherwise a copy.

        Raises
        ------
        ValueError
            If `device` is not the name of a device.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.

        Notes
        -----
        A copy from the GPU waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> mask = bg.BlockMask.causal(32, block=16, device="cpu")
        >>> mask.to_device("cpu") is mask
        True
        """
        backend = registry.by_name(device)
        if backend is self._backend:
            return self
        indptr, indices, bits = (
            backend.from_host(self._backend.to_host(x)) for x in (self.indptr, self.indices, self.bits)
        )
        if len(bits):
            kinds = backend.from_host(self._backend.to_host(self.kinds))
        else:
            kinds = whole_kinds(backend.xp, len(indices))
        return type(self)(backend, self.shape, self.block, self.heads, indptr, indices, kinds, bits)

    def get(self) -> Self:
        """The mask on the host.

        Returns
        -------
        BlockMask
            This mask if it is on the host already, otherwise a copy.

        Notes
        -----
        A copy from the GPU waits for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> bg.BlockMask.causal(32, block=16).get().device
        'cpu'
        """
        return self.to_device("cpu")
