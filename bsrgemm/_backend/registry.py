"""Which backend an object lives in, and the backends there are."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import scipy.sparse

from .base import Array, Backend


def host_scalar(x: Any) -> bool:
    """A plain number: Python's, NumPy's, or a 0-d NumPy array."""
    return np.isscalar(x) or (isinstance(x, np.ndarray) and x.ndim == 0 and x.dtype != np.object_)


_EXTRA_BACKENDS: list[Backend] = []
#: Types whose backend has been found.
_BACKENDS: dict[type, Backend] = {}
_CUDA: Backend | None = None
_MAKING = threading.Lock()


def host() -> Backend:
    """The CPU backend."""
    from .numpy_backend import HOST

    return HOST


def cuda() -> Backend:
    """The GPU backend. Imports CuPy, which does not touch the GPU yet."""
    global _CUDA
    if _CUDA is None:
        try:
            import cupy  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: a library or folder that CuPy needs is missing
            raise ImportError(
                f"device='cuda' needs CuPy, which cannot be imported ({error}): "
                "pip install 'bsrgemm[cuda12]' or 'bsrgemm[cuda13]'. Matrices on the CPU work without it."
            ) from error
        from .cupy_backend import CupyBackend

        with _MAKING:  # there is one, whichever threads come first
            _CUDA = _CUDA or CupyBackend()
    return _CUDA


def default_device() -> str:
    """ "cuda" where CuPy and a device for it are at hand, otherwise "cpu".

    >>> default_device() in ("cpu", "cuda")
    True
    """
    try:
        xp = cuda().xp
    except ImportError:
        return "cpu"
    return "cuda" if xp.cuda.is_available() else "cpu"


def register(backend: Backend) -> None:
    """Add a further backend: its arrays are then recognised wherever NumPy's and CuPy's are."""
    _EXTRA_BACKENDS.append(backend)


def backend_of(x: Any) -> Backend | None:
    """The backend of a dense array, a sparse array or one of ours; None for anything else."""
    kind = type(x)
    found = _BACKENDS.get(kind)
    if found is None:
        own = getattr(kind, "_backend", None)
        if isinstance(own, Backend):
            found = own
        elif isinstance(x, np.ndarray | np.generic) or scipy.sparse.issparse(x):
            found = host()
        elif kind.__module__.partition(".")[0] in ("cupy", "cupyx"):
            found = cuda()
        if found is not None:
            _BACKENDS[kind] = found
    if found is not None:
        return found
    for backend in _EXTRA_BACKENDS:
        if backend.is_dense(x) or backend.is_sparse(x):
            return backend
    return None


def foreign_backend(x: Any) -> Backend | None:
    """The backend of the memory behind an object of another library (DLPack, CUDA array interface)."""
    if getattr(x, "__cuda_array_interface__", None) is not None:
        return cuda()
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        kind = int(x.__dlpack_device__()[0])
        if kind in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
            return host()
        if kind in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            return cuda()
    return None


_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST, _DLPACK_CUDA_MANAGED = 1, 2, 3, 13


def by_name(device: str) -> Backend:
    """The backend called "cpu" or "cuda"."""
    if device == "cpu":
        return host()
    if device == "cuda":
        return cuda()
    for backend in _EXTRA_BACKENDS:
        if backend.name == device:
            return backend
    raise ValueError(f"device: got {device!r}, wanted 'cpu' or 'cuda'")


def elsewhere(x: Any, what: str, backend: Backend) -> TypeError:
    """The error for an operand that lives in another backend than the matrix."""
    return TypeError(
        f"{what}: a {type(x).__module__.partition('.')[0]} {type(x).__name__} cannot meet a matrix on "
        f"{backend.name!r}: nothing is moved silently. {backend.bring}"
    )


__all__ = [
    "Array",
    "Backend",
    "backend_of",
    "by_name",
    "cuda",
    "default_device",
    "elsewhere",
    "foreign_backend",
    "host",
    "host_scalar",
    "register",
]
