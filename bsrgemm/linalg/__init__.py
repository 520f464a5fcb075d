"""Solvers for block systems, on NumPy and on CuPy arrays: Krylov methods, preconditioners and algebraic multigrid.

Names and conventions are those of `scipy.sparse.linalg`. Nothing is moved: a solver works where its arrays are.
"""

from .aggregation import rigid_body_modes
from .constraints import constrain
from .direct import lobpcg, spsolve
from .krylov import bicgstab, cg, fgmres, gmres, minres
from .multigrid import Multigrid, from_pyamg, smoothed_aggregation
from .operators import Preconditioner, SolverWarning
from .smoothers import block_jacobi, chebyshev
from .triangular import block_ssor, ic0, ilu0, spsolve_triangular

__all__ = [
    "Multigrid",
    "Preconditioner",
    "SolverWarning",
    "bicgstab",
    "block_jacobi",
    "block_ssor",
    "cg",
    "chebyshev",
    "constrain",
    "fgmres",
    "from_pyamg",
    "gmres",
    "ic0",
    "ilu0",
    "lobpcg",
    "minres",
    "rigid_body_modes",
    "smoothed_aggregation",
    "spsolve",
    "spsolve_triangular",
]
