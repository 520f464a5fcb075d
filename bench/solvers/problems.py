"""Linear elasticity as BSR matrices on the host, assembled straight into their arrays.

A regular grid has few kinds of cells and edges: their matrices are computed once and copied to the blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse

#: Young's modulus and Poisson's ratio
YOUNG, POISSON = 1.0, 0.3
LAME, SHEAR = YOUNG * POISSON / ((1 + POISSON) * (1 - 2 * POISSON)), YOUNG / (2 + 2 * POISSON)
#: Number of blocks that are filled at a time: 0.5 GB of blocks of 3 x 3
PLACES = 6_000_000


@dataclass(frozen=True)
class Problem:
    """A matrix on the host, its near-nullspace modes, and a load."""

    A: scipy.sparse.bsr_array
    modes: np.ndarray
    b: np.ndarray


def plate(unknowns: int) -> Problem:
    """n x n free nodes inside a frame that is held, numbered along x first: `pyamg.gallery.linear_elasticity`."""
    n = round(math.sqrt(unknowns / 2))
    K = cell_blocks(1.0, dims=2)[:, :, ::-1, ::-1]  # displacements along x come first, and so do the nodes
    y, x = np.mgrid[:n, :n].reshape(2, -1)
    b = np.zeros(2 * n * n)
    b[1::2] = -1
    A = grid_matrix(K, n + 1, [(1, n + 1)] * 2)
    return Problem(A, rigid_modes(np.stack([x, y])), b)


def cube(unknowns: int) -> Problem:
    """n x n x n cells; the nodes at x = 0 are held, and left out before anything is numbered, along z first."""
    n = max(2, round((unknowns / 3) ** (1 / 3) - 2 / 3))  # 3 n (n + 1)^2 unknowns
    A = grid_matrix(cell_blocks(1 / n), n, [(1, n + 1), (0, n + 1), (0, n + 1)])
    points = np.mgrid[1 : n + 1, : n + 1, : n + 1].reshape(3, -1) / n
    b = np.zeros(A.shape[0])
    b[2::3] = -1
    return Problem(A, rigid_modes(points), b)


def cell_blocks(side: float, dims: int = 3) -> np.ndarray:
    """The stiffness between the corners of a square or a cube, (2^d, 2^d, d, d), corners along the last axis first.

    ``K[a, b, i, j]`` is the integral of ``LAME d_i u_a d_j u_b + SHEAR (d_j u_a d_i u_b + [i = j] grad u_a grad u_b)``,
    where u_a is linear along each axis, 1 at corner a and 0 at all others. Two Gauss points along each axis are exact.
    """
    corners = np.array(list(itertools.product((0, 1), repeat=dims)))
    points = np.array(list(itertools.product((0.5 - 0.5 / math.sqrt(3), 0.5 + 0.5 / math.sqrt(3)), repeat=dims)))
    values = np.where(corners, points[:, None], 1 - points[:, None])  # along each axis, (points, corners, axes)
    slopes = np.stack(
        [np.where(corners[:, i], 1, -1) * np.delete(values, i, axis=2).prod(2) for i in range(dims)], axis=2
    )
    both = np.einsum("qai,qbj->abij", slopes, slopes) * (side ** (dims - 2) / len(points))
    work = np.einsum("abkk,ij->abij", both, np.eye(dims))
    return LAME * both + SHEAR * (both.transpose(0, 1, 3, 2) + work)


def grid_matrix(cell: np.ndarray, cells: int, free: list[tuple[int, int]]) -> scipy.sparse.bsr_array:
    """The matrix of a grid of equal cells, filled in chunks of planes: nothing is added up.

    `cell` has the blocks between its corners, the last axis first; `free` says where nodes with unknowns begin and end.
    """
    sizes = [end - begin for begin, end in free]
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    steps, table = neighbours(cell, len(free))
    blocks = table.reshape(-1, *cell.shape[2:])
    kinds, there = [], []
    for begin, end in free:
        node = np.arange(begin, end)
        kinds.append(np.where(node == 0, 0, np.where(node == cells, 2, 1)))
        beside = node[:, None] + np.arange(-1, 2)
        there.append((beside >= begin) & (beside < end))
    # rows have all combinations of their neighbours along each axis
    lengths = there[0].sum(1)
    for mask in there[1:]:
        lengths = np.multiply.outer(lengths, mask.sum(1))
    indptr = np.zeros(lengths.size + 1, np.int32)  # 2^31 blocks would have 69 GB at least
    np.cumsum(lengths, out=indptr[1:])
    indices, data = np.empty(indptr[-1], np.int32), np.empty((indptr[-1], *cell.shape[2:]))
    shift = (steps @ strides).astype(np.int32)
    planes = max(1, PLACES // (strides[0] * len(steps)))
    for first in range(0, sizes[0], planes):
        some = slice(first, first + planes)
        kind, kept = kinds[0][some], there[0][some]
        for other, mask in zip(kinds[1:], there[1:], strict=True):
            kind = np.add.outer(3 * kind, other).reshape(-1)
            kept = (kept[:, None, :, None] & mask[None, :, None, :]).reshape(len(kind), -1)
        row = np.arange(first * strides[0], first * strides[0] + len(kind), dtype=np.int32)
        place = slice(indptr[row[0]], indptr[row[-1] + 1])
        indices[place] = (row[:, None] + shift)[kept]
        np.take(blocks, (kind[:, None] * len(steps) + np.arange(len(steps)))[kept], axis=0, out=data[place])
    side = lengths.size * cell.shape[2]
    return scipy.sparse.bsr_array((data, indices, indptr), shape=(side, side))


def neighbours(cell: np.ndarray, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps to the neighbours of a node, (3^d, d), and blocks towards them, (3^d, 3^d, s, s): by kind of node, by step.

    On each axis a node is one of three kinds: there are cells above it alone, on both sides, or below it alone.
    """
    corners = list(itertools.product((0, 1), repeat=dims))
    steps = np.array(list(itertools.product((-1, 0, 1), repeat=dims)))
    table = np.zeros((3**dims, 3**dims, *cell.shape[2:]))
    for (k, kind), (s, step), (c, corner) in itertools.product(
        enumerate(itertools.product((0, 1, 2), repeat=dims)), enumerate(steps), enumerate(corners)
    ):
        missing = any((side, at) in ((0, 1), (2, 0)) for side, at in zip(kind, corner, strict=True))
        other = tuple((np.array(corner) + step).tolist())
        if other in corners and not missing:
            table[k, s] += cell[c, corners.index(other)]
    return steps, table


def rigid_modes(points: np.ndarray) -> np.ndarray:
    """Shifts of points (d, n), and turns about their center: one in a plane, (2 n, 3), three in space, (3 n, 6)."""
    dims = len(points)
    centered = points - points.mean(axis=1, keepdims=True)
    planes = [(0, 1)] if dims == 2 else [(1, 2), (2, 0), (0, 1)]
    modes = np.zeros((points.shape[1], dims, dims + len(planes)))
    modes[:, range(dims), range(dims)] = 1
    for turn, (a, b) in enumerate(planes, dims):
        modes[:, a, turn], modes[:, b, turn] = -centered[b], centered[a]
    return modes.reshape(-1, modes.shape[2])


PROBLEMS: dict[str, Callable[[int], Problem]] = {"2d": plate, "3d": cube}
