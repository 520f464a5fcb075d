"""A NumPy that behaves like CuPy: the array code that passes on it is the code that runs on a GPU.

`ndarray` refuses `__array__` and NumPy operands, reductions and single elements stay 0-d arrays, and `xp`
offers only names, keywords and dtypes that CuPy has. Where CuPy is silent about a mistake (an index out of
range wraps around, a duplicate index in an assignment leaves the winner open, a NumPy array slips through
``xp.sort`` unchanged) the fake raises: no code of ours may depend on it.

`arrays` has the array, `functions` what `xp` offers, `backend` the sparse formats, the backend and its engines.
"""

from __future__ import annotations

from . import arrays, backend, functions
from .arrays import ndarray, xp
from .backend import FakeAppend, FakeAttention, FakeBackend, FakeProducts, Tensor, install, sparray, sparse, spmatrix
from .functions import FUNCTIONS, LINALG, UFUNCS

__all__ = [
    "FUNCTIONS",
    "LINALG",
    "UFUNCS",
    "FakeAppend",
    "FakeAttention",
    "FakeBackend",
    "FakeProducts",
    "Tensor",
    "arrays",
    "backend",
    "functions",
    "install",
    "ndarray",
    "sparray",
    "sparse",
    "spmatrix",
    "xp",
]
