"""The backends that exist, and the lookup of the backend of an object."""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import scipy.sparse

from .._kernels.jit import remedy
from . import dlpack
from .base import Array, Backend, class_of, named


def host_scalar(x: Any) -> bool:
    """Tell whether `x` is a scalar of Python or NumPy, or a 0-d NumPy array of numbers."""
    return np.isscalar(x) or (isinstance(x, np.ndarray) and x.ndim == 0 and x.dtype != np.object_)


#: A cache: the backend of each type for which it has been found.
_BACKENDS: dict[type, Backend] = {}
_CUDA: Backend | None = None
_MAKING = threading.Lock()


@cache
def host() -> Backend:
    """Return the CPU backend."""
    from .numpy_backend import HOST

    return HOST


def cuda() -> Backend:
    """Return the GPU backend. This imports CuPy, which does not initialise the GPU yet."""
    global _CUDA
    if _CUDA is None:
        try:
            import cupy  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: a library or folder that CuPy needs is missing
            raise ImportError(
                f"device='cuda' needs CuPy, which cannot be imported ({error}): "
                f"{remedy(error)}. Matrices on the CPU work without it."
            ) from error
        from .cupy_backend import CupyBackend

        restore: Callable[..., Any] = _cuda_with_device
        copyreg.pickle(CupyBackend, lambda _: (restore, ()))  # copies and pickles are the one backend again
        with _MAKING:  # only one backend is created, even if several threads arrive here at once
            _CUDA = _CUDA or CupyBackend()
    return _CUDA


def _cuda_with_device() -> Backend:
    """Return the GPU backend; raise RuntimeError with the reason if there is no GPU that it can use."""
    backend = cuda()
    available: bool = backend.xp.cuda.is_available()
    if not available:
        try:
            backend.xp.cuda.runtime.getDeviceCount()
            reason = "no CUDA-capable device is detected"
        except RuntimeError as error:  # CuPy's CUDARuntimeError is one
            reason = " ".join(str(error).split())
        raise RuntimeError(f"device='cuda' needs {no_device(reason)}. python -m bsrgemm info shows what was found.")
    return backend


def no_device(reason: str) -> str:
    """What is missing where CuPy is installed and finds no GPU, and why."""
    return (
        f"a CUDA device ({reason}): it needs an NVIDIA card and driver (nvidia-smi shows both); "
        "matrices on the CPU work without it"
    )


def default_device() -> str:
    """Return "cuda" if CuPy can be imported and finds a GPU, otherwise "cpu".

    Returns
    -------
    str
        A name that the parameter `device` of `bsr_array` and of other functions accepts.

    Notes
    -----
    `KVCache` and the functions that make a `BlockMask` from a rule use this device unless `device` is given. A matrix
    is created on the device of its input data instead. The call does not wait for work on the GPU.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> device = bg.default_device()
    >>> device in ("cpu", "cuda")
    True
    >>> A = bg.bsr_array(np.eye(4), blocksize=(2, 2), device=device)
    """
    try:
        xp = cuda().xp
    except ImportError:
        return "cpu"
    return "cuda" if xp.cuda.is_available() else "cpu"


def backend_of(x: Any) -> Backend | None:
    """Return the backend of a dense array, a sparse array or a BSR matrix; None for any other object."""
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
    return found


def foreign_backend(x: Any) -> Backend | None:
    """Return the backend that can read the memory of an object of another library; None if there is none.

    The object must offer DLPack or the CUDA array interface.
    """
    kind = dlpack.device_kind(x)
    if kind in dlpack.ON_HOST:
        return host()
    return cuda() if kind in dlpack.ON_DEVICE or dlpack.cuda_interface(x) is not None else None


def adopted(backend: Backend, x: Any, what: str, writes: bool = False) -> Array | None:
    """Return `backend.adopt(x)`; if `x` cannot be read, or written to, the error names the argument `what`."""
    if backend is _CUDA and not backend.is_dense(x):
        _cuda_with_device()
    try:
        return backend.adopt(x, writes)
    except dlpack.Unreadable as error:
        raise TypeError(f"{what}: {error}") from error
    except dlpack.ReadOnly as error:
        raise ValueError(f"{what}: {error}") from error


def target(backend: Backend, x: Any, what: str, place: str = "") -> Array:
    """Return an array of `backend` to write the result `x` of the user to, without a copy, after checking that it may.

    Every public `out` goes through here, so that tensors of other libraries are taken everywhere. `place` ends the
    message about what is no such array, such as ", where q is".
    """
    array: Any = x
    if not backend.is_dense(x):
        found = backend_of(x) or foreign_backend(x)
        array = adopted(backend, x, what, writes=True) if found is backend and not backend.is_sparse(x) else None
    if array is None:
        raise TypeError(f"{what}: wanted a dense array on {backend.name!r}{place}, got {named(x)}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{what}: array is read-only")
    if array.size and any(s == 0 and n > 1 for s, n in zip(array.strides, array.shape, strict=True)):
        raise ValueError(f"{what}: elements share memory (a stride is 0)")
    return array


def by_name(device: str) -> Backend:
    """Return the backend called "cpu" or "cuda"; raise ValueError for any other name.

    "cuda" raises ImportError without CuPy, and RuntimeError if CuPy finds no GPU.
    """
    if not isinstance(device, str):
        raise ValueError(f"device: got {device!r}, wanted 'cpu' or 'cuda'")
    if device == "cpu":
        return host()
    if device == "cuda":
        return _cuda_with_device()
    raise ValueError(f"device: got {device!r}, wanted 'cpu' or 'cuda'")


def elsewhere(x: Any, what: str, backend: Backend) -> TypeError:
    """Return the TypeError for an operand `x` that belongs to another backend than the matrix."""
    return TypeError(
        f"{what}: a {class_of(x)} cannot meet a matrix on {backend.name!r}: nothing is moved silently. {backend.bring}"
    )


__all__ = [
    "Array",
    "Backend",
    "adopted",
    "backend_of",
    "by_name",
    "cuda",
    "default_device",
    "elsewhere",
    "foreign_backend",
    "host",
    "host_scalar",
    "no_device",
    "target",
]
