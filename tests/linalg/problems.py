"""Systems to solve: chains, plates and matrices that break a method."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

import bsrgemm as bg


def laplacian(n: int, block: int = 1, dtype: Any = np.float64) -> Any:
    """A chain of n nodes with `block` coupled unknowns each: symmetric positive definite."""
    chain = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    inner = np.eye(block) + 0.3 * np.ones((block, block))
    return bg.bsr_array(np.kron(chain, inner).astype(dtype), blocksize=(block, block))


def connections(rng: np.random.Generator, n: int, density: float, symmetric: bool) -> Any:
    """Random connections of n nodes in CSR; each node has one with itself."""
    S: Any = sp.eye_array(n) + sp.random_array((n, n), density=density, rng=rng)
    return sp.csr_array(S + S.T if symmetric else S)


def plate(n: int) -> tuple[Any, Any]:
    """Plane elasticity of n x n nodes in a frame that is held, 2 x 2 blocks, and the positions of its nodes."""
    from bench.solvers.problems import plate as made

    problem = made(2 * n * n)
    y, x = np.mgrid[:n, :n].reshape(2, -1)
    return bg.bsr_array(problem.A), np.stack([x, y], axis=1).astype(np.float64)


def lopsided(n: int, dtype: Any = np.float64) -> Any:
    """Convection and diffusion along a line: not symmetric."""
    dense = 3 * np.eye(n) - 1.6 * np.eye(n, k=1) - 0.8 * np.eye(n, k=-1)
    if np.dtype(dtype).kind == "c":
        dense = dense + 0.5j * np.eye(n, k=2)
    return bg.bsr_array(dense.astype(dtype), blocksize=(2, 2))


def hermitian(n: int, dtype: Any = np.float64) -> Any:
    """A Hermitian positive definite matrix, complex if the dtype is."""
    dense = 4 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    if np.dtype(dtype).kind == "c":
        dense = dense + 0.5j * (np.eye(n, k=1) - np.eye(n, k=-1))
    return bg.bsr_array(dense.astype(dtype), blocksize=(2, 2))


def numbers(shape: Any, dtype: Any = np.float64, seed: int = 0) -> Any:
    rng = np.random.default_rng([seed, *np.atleast_1d(shape)])
    found = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * rng.standard_normal(shape)
    return found.astype(dtype)
