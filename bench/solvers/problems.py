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
#: What a jump between triangles costs, times (LAME + 2 SHEAR) / length of the edge. With 3 the matrix has negative
#: eigenvalues, with 3.5 it has none; the more it costs the more iterations: with 10 about 30 % more than with 6
PENALTY = 6.0
#: Aggregates of triangles grow along connections of this strength. With 0 iterations grow with the size: 43 and 60 with
#: block Jacobi at 20,000 and 100,000 unknowns, here 40 and 41; with 0.17 aggregates stay too small: 43 and 79
DG_STRENGTH = 0.08
#: Number of blocks that are filled at a time: 0.5 GB of blocks of 3 x 3
PLACES = 6_000_000


@dataclass(frozen=True)
class Problem:
    """A matrix on the host, its near-nullspace modes, and a load.

    Aggregates grow along connections of at least `strength`, relative to the diagonal.
    """

    A: scipy.sparse.bsr_array
    modes: np.ndarray
    b: np.ndarray
    strength: float = 0.0


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
    """The matrix of a grid of `cells` equal cells along each axis, filled in chunks of planes: nothing is added up.

    Parameters
    ----------
    cell : array, (2^d, 2^d, s, s)
        Blocks between the corners of a cell, the last axis first.
    free : pairs of int, one for each axis
        Where the nodes begin and end that have unknowns; they are numbered along the last axis first.
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


# -------------------------------------------------------------------------- discontinuous Galerkin
#: Corners of the two triangles of a square, as (x, y)
TRIANGLES = np.array([[(0, 0), (1, 0), (0, 1)], [(1, 0), (0, 1), (1, 1)]])
#: For each of the two, by column: the square (x, y), from its own, of a neighbour; None is the triangle itself.
#: A neighbour is always the other one of its square
BESIDE = ([(0, -1), (-1, 0), None, (0, 0)], [(0, 0), None, (1, 0), (0, 1)])


def triangles(unknowns: int) -> Problem:
    """n x n squares, numbered along x first, each cut in two triangles of their own 3 nodes; the edges are held weakly.

    Symmetric interior penalty: the mean traction works on a jump, and a jump costs. A block has 3 nodes x 2
    displacements.
    """
    n = max(2, round(math.sqrt(unknowns / 12)))
    there, table = triangle_blocks()
    kind = np.ones(n, np.int32)
    kind[[0, -1]] = 0, 2
    kinds = np.add.outer(3 * kind, kind).reshape(-1)
    kept = there.reshape(9, -1)[kinds]
    shift = [
        t if step is None else 2 * (step[0] + n * step[1]) + 1 - t for t, steps in enumerate(BESIDE) for step in steps
    ]
    squares = np.arange(n * n, dtype=np.int32)
    indices = (2 * squares[:, None] + np.array(shift, np.int32))[kept]
    indptr = np.zeros(2 * n * n + 1, np.int32)
    np.cumsum(kept.reshape(-1, 4).sum(1), out=indptr[1:])
    data = table.reshape(-1, 6, 6)[(8 * kinds[:, None] + np.arange(8, dtype=np.int32))[kept]]
    A = scipy.sparse.bsr_array((data, indices, indptr), shape=(12 * n * n, 12 * n * n))
    corner = np.stack([squares % n, squares // n], 1)
    points = (corner[:, None, None] + TRIANGLES).reshape(-1, 2).T
    b = np.zeros(A.shape[0])
    b[1::2] = -1
    return Problem(A, rigid_modes(points), b, DG_STRENGTH)


def triangle_blocks() -> tuple[np.ndarray, np.ndarray]:
    """By kind of square along y and x, triangle and column: whether it is there, and its block, (3, 3, 2, 4, 6, 6).

    A square is one of three kinds on each axis: the first, inside, or the last.
    """
    there, table = np.ones((3, 3, 2, 4), bool), np.zeros((3, 3, 2, 4, 6, 6))
    for t, steps in enumerate(BESIDE):
        corners, own = TRIANGLES[t], steps.index(None)
        grads, stresses = gradients(corners)
        table[:, :, t, own] = np.einsum("aij,bij->ab", stresses, grads) / 2  # the area
        for (y, x), (column, step) in itertools.product(np.ndindex(3, 3), enumerate(steps)):
            if step is None:
                continue
            other = TRIANGLES[1 - t] + step
            ends = np.array([point for point in corners if (point == other).all(1).any()])
            if (x, step[0]) in ((0, -1), (2, 1)) or (y, step[1]) in ((0, -1), (2, 1)):
                there[y, x, t, column] = False
                table[y, x, t, own] += edge_matrix([corners], ends)
                continue
            both = edge_matrix([corners, other], ends)
            table[y, x, t, own] += both[:6, :6]
            table[y, x, t, column] = both[:6, 6:]
    return there, table


def gradients(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients and stresses (plane strain) of the 6 displacements of a triangle, both (6, 2, 2)."""
    slopes = np.linalg.inv(np.column_stack([np.ones(3), corners]))[1:].T
    grads = np.einsum("ni,ck->ncki", slopes, np.eye(2)).reshape(6, 2, 2)
    shears = SHEAR * (grads + grads.transpose(0, 2, 1))
    return grads, shears + LAME * np.einsum("aii,jk->ajk", grads, np.eye(2))


def edge_matrix(sides: list[np.ndarray], ends: np.ndarray) -> np.ndarray:
    """What an edge adds to the triangles at its sides: two, (12, 12), or one that is held there, (6, 6)."""
    along = ends[1] - ends[0]
    length = math.hypot(*along)
    normal = np.array([along[1], -along[0]]) / length
    if normal @ (sides[0].mean(0) - ends[0]) > 0:
        normal = -normal  # out of the first
    jumps, tractions = [], []
    for sign, corners in zip((1, -1), sides, strict=False):
        values = (corners == ends[:, None]).all(2)  # at the ends, of each node's function
        jumps.append(sign * np.einsum("en,ck->eknc", values, np.eye(2)).reshape(2, 2, 6))
        tractions.append(gradients(corners)[1] @ normal / len(sides))
    jump, traction = np.concatenate(jumps, 2), np.concatenate(tractions)
    work = traction @ jump.sum(0) * length / 2
    mass = np.array([[2, 1], [1, 2]]) / 6  # over the length
    cost = PENALTY * (LAME + 2 * SHEAR) * np.einsum("eka,ef,fkb->ab", jump, mass, jump)
    return cost - work - work.T


PROBLEMS: dict[str, Callable[[int], Problem]] = {"2d": plate, "3d": cube, "dg": triangles}
