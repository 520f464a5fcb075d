"""The element matrices of the problems that solvers are tested and measured with, beside those of other packages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.solvers import problems


def as_matrix(blocks: Any) -> Any:
    """Blocks between corners, (c, c, d, d), as a matrix."""
    corners, dims = blocks.shape[0], blocks.shape[2]
    return blocks.transpose(0, 2, 1, 3).reshape(corners * dims, corners * dims)


@pytest.mark.parametrize("dims", [2, 3])
def test_uniform_strains_have_the_energy_of_the_material(dims: int) -> None:
    """Hooke's law: the energy density is SHEAR times the squared strain, plus LAME / 2 times the squared trace."""
    side = 0.5
    K = as_matrix(problems.cell_blocks(side, dims))
    np.testing.assert_allclose(K, K.T, atol=1e-15)
    corners = side * np.stack(np.meshgrid(*[[0, 1]] * dims, indexing="ij"), axis=-1).reshape(-1, dims)
    gradient = np.random.default_rng(dims).standard_normal((dims, dims))
    u = (corners @ gradient.T).ravel()
    strain = (gradient + gradient.T) / 2
    density = problems.SHEAR * (strain**2).sum() + problems.LAME / 2 * np.trace(strain) ** 2
    assert u @ K @ u / 2 == pytest.approx(density * side**dims, rel=1e-12)
    assert (np.abs(np.linalg.eigvalsh(K)) < 1e-12).sum() == dims * (dims + 1) // 2  # shifts and turns alone


@pytest.mark.parametrize("side", [1.0, 0.25])
def test_the_cube_has_the_element_of_scikit_fem(side: float) -> None:
    skfem = pytest.importorskip("skfem")
    from skfem.models.elasticity import lame_parameters, linear_elasticity

    mesh = skfem.MeshHex()
    order = np.lexsort(mesh.p[::-1])
    basis = skfem.Basis(mesh.scaled(side), skfem.ElementVector(skfem.ElementHex1()))
    K = linear_elasticity(*lame_parameters(problems.YOUNG, problems.POISSON)).assemble(basis).toarray()
    want = K.reshape(8, 3, 8, 3).transpose(0, 2, 1, 3)[np.ix_(order, order)]
    np.testing.assert_allclose(problems.cell_blocks(side), want, atol=1e-15)


def test_the_plate_has_the_element_of_pyamg() -> None:
    elasticity = pytest.importorskip("pyamg.gallery.elasticity")
    around = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    K = elasticity.q12d_local(around, problems.LAME, problems.SHEAR).reshape(4, 2, 4, 2).transpose(0, 2, 1, 3)
    order = [0, 1, 3, 2]  # along x first, where cell_blocks goes along its last axis first
    found = problems.cell_blocks(1.0, dims=2)[:, :, ::-1, ::-1]
    np.testing.assert_allclose(found, K[np.ix_(order, order)], atol=1e-15)
