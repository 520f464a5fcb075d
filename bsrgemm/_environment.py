"""What this machine offers: versions, device, kernel cache, and which kernel serves which dtype.

Nothing here raises an error: what cannot be found is None, with a line under "missing" that says how to get it.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import ml_dtypes
import numpy as np
import scipy

from ._backend.registry import no_device
from ._kernels import disk_cache, jit
from .dtypes import DEVICE_DTYPES, HALF_DTYPES, HOST_DTYPES, UINT8, accumulator_dtype

#: What kernels are named for: sides of small and of large blocks, rows of A, blocks of a block row, and columns of B.
_SIDES, _ROWS, _BLOCKS_OF_A_ROW, _COLUMNS = (3, 64), 65536, 27, 256
PRODUCTS = ("A @ x", "A @ B", "A @ A2", "attention")
_FP8 = " (as fp8)"
_ATTENTION_DTYPES = (*HALF_DTYPES, np.dtype(np.float32), np.dtype(np.float64))


def info() -> dict[str, Any]:
    """Versions, device, kernel target, cache and kernels of this machine.

    Returns
    -------
    dict
        - ``versions``: name to version, or None;
        - ``device``: name, compute capability and memory in bytes of CuPy's current device, or None;
        - ``target``: the architecture that kernels are compiled for, or None;
        - ``sources``: folder of the CUDA sources, or None;
        - ``cache``: folder of the compiled kernels, the number of its entries and their bytes;
        - ``kernels``: for each device and group of dtypes, what serves which product, with blocks of 3 x 3 or of
          64 x 64 on the GPU, and the dtype of the sums;
        - ``missing``: a line for each thing that prevents the use of the GPU.

    Notes
    -----
    Nothing is raised: a failure becomes a line in ``missing``. The call does not wait for the GPU.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> bg.info()["versions"]["bsrgemm"] == bg.__version__
    True
    """
    from ._version import __version__

    missing: list[str] = []
    cuda = _cuda(missing)
    return {
        "versions": {
            "bsrgemm": __version__,
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "ml_dtypes": ml_dtypes.__version__,
            **cuda["versions"],
        },
        "device": cuda["device"],
        "target": cuda["target"],
        "sources": _sources(missing),
        "cache": _cache(),
        "kernels": [*(_cuda_kernels(cuda["target"]) if cuda["target"] else ()), *_host_kernels()],
        "missing": missing,
    }


def cuda_problem() -> str | None:
    """Why no kernel can run here, in one line; None if kernels can run."""
    missing: list[str] = []
    target = _cuda(missing)["target"]
    return None if target else missing[0]


# --------------------------------------------------------------------------------------- probes
def _cuda(missing: list[str]) -> dict[str, Any]:
    """Versions, device and target, as far as CuPy can tell; reasons for a failure are added to `missing`."""
    found: dict[str, Any] = {
        "versions": dict.fromkeys(("cupy", "nvrtc", "cuda_runtime", "cuda_driver")),
        "device": None,
        "target": None,
    }
    versions = found["versions"]
    # A broken installation fails in many ways (ImportError, OSError, CuPy's own classes); each of them is a valid
    # answer.
    try:
        import cupy

        versions["cupy"] = str(cupy.__version__)
    except Exception as error:
        missing.append(f"CuPy ({_line(error)}): {jit.remedy(error)} to use a GPU; matrices on the CPU work without it")
        return found
    try:
        versions["nvrtc"] = jit.nvrtc_version()
    except Exception as error:
        missing.append(_line(error))
    runtime = cupy.cuda.runtime
    for name, ask in (("cuda_runtime", runtime.runtimeGetVersion), ("cuda_driver", runtime.driverGetVersion)):
        try:
            versions[name] = _dotted(ask())
        except Exception:
            versions[name] = None
    try:
        found["device"] = _device(cupy)
    except Exception as error:
        missing.append(no_device(_line(error)))
        return found
    if versions["nvrtc"]:
        try:
            found["target"] = jit.device_target()
        except Exception as error:
            missing.append(_line(error))
    return found


def _device(cupy: Any) -> dict[str, Any]:
    number = cupy.cuda.runtime.getDevice()
    properties = cupy.cuda.runtime.getDeviceProperties(number)
    return {
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "memory": int(properties["totalGlobalMem"]),
    }


def _dotted(version: int) -> str | None:
    """CUDA's 12090 as "12.9"; None for 0, which means that there is no driver."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


def _sources(missing: list[str]) -> str | None:
    try:
        return str(jit.cuda_root())
    except OSError as error:
        missing.append(_line(error))
        return None


def _cache() -> dict[str, Any]:
    folder = disk_cache.folder()
    sizes = []
    with contextlib.suppress(OSError):  # entries may vanish while they are counted
        for path in folder.glob("*.cubin"):
            sizes.append(path.stat().st_size)
    return {"folder": str(folder), "entries": len(sizes), "bytes": sum(sizes)}


def _line(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__


# -------------------------------------------------------------------------------------- kernels
def _cuda_kernels(arch: str) -> list[dict[str, Any]]:
    served = []
    for dtype in DEVICE_DTYPES:
        names = _dense_kernels(arch, dtype, 1), _dense_kernels(arch, dtype, _COLUMNS), _sparse_kernels(arch, dtype)
        served.append((dtype, dict(zip(PRODUCTS, (*names, _attention_kernel(arch, dtype)), strict=True))))
    return _grouped("cuda", served)


def _dense_kernels(arch: str, dtype: np.dtype[Any], columns: int) -> str:
    """The kernels that are chosen for ``A @ B`` with small blocks and with large ones."""
    from ._kernels import element_types
    from ._kernels.card import Card
    from ._products.call import Problem
    from ._products.prepared import compiled_for

    names, found = element_types.types(dtype, dtype, dtype, accumulator_dtype(dtype), np.dtype(np.int32)), []
    for side in _SIDES:
        rows = _ROWS // side
        counts = (rows, rows, rows * _BLOCKS_OF_A_ROW)
        problem = Problem(arch, names, side, side, columns, 1, *counts, False, "C", "C", True, True)
        found.append(compiled_for(problem, Card(arch, 132)).entry)
    return " or ".join(dict.fromkeys(found))


def _sparse_kernels(arch: str, dtype: np.dtype[Any]) -> str:
    """The same for ``A @ A2``."""
    from ._products.block_products import BlockProblem, BlockProductsSm80, BlockProductsSm90, SpgemmSimt

    found = []
    for side in _SIDES:
        problem = BlockProblem(arch, dtype, dtype, dtype, side, side, side)
        kernels = (kernel for kernel in (BlockProductsSm90, BlockProductsSm80) if kernel.serves(problem))
        found.append(next(kernels, SpgemmSimt).entry)
    return " or ".join(dict.fromkeys(found))


def _attention_kernel(arch: str, dtype: np.dtype[Any]) -> str:
    """The kernel of attention for heads of 128 columns."""
    from ._attention.choose import choose
    from ._attention.forward import PLAIN, Problem

    fp8 = dtype == UINT8
    if not fp8 and dtype not in _ATTENTION_DTYPES:
        return "-"
    out = np.dtype(np.float32) if fp8 else dtype
    problem = Problem(arch, dtype, out, accumulator_dtype(out), 128, 128, PLAIN, True, True, 10**6, 4096, fp8=fp8)
    return f"{choose(problem).entry}{_FP8 if fp8 else ''}"


def _host_kernels() -> list[dict[str, Any]]:
    # SciPy's compiled loops sum in the dtype of the result, but 16-bit floats have to be summed in float32.
    sparse = {dtype: "NumPy" if dtype in HALF_DTYPES else "SciPy" for dtype in HOST_DTYPES}
    blas = (*HALF_DTYPES, *(np.dtype(c) for c in "fdFD"))
    dense = {dtype: "BLAS or SciPy" if dtype in blas else "SciPy" for dtype in HOST_DTYPES}
    attends = {dtype: "BLAS" if dtype in _ATTENTION_DTYPES else "-" for dtype in HOST_DTYPES}
    attends[UINT8] = f"BLAS{_FP8}"
    served = [(d, dict(zip(PRODUCTS, ("SciPy", dense[d], sparse[d], attends[d]), strict=True))) for d in HOST_DTYPES]
    return _grouped("cpu", served)


def _grouped(device: str, served: list[tuple[np.dtype[Any], dict[str, str]]]) -> list[dict[str, Any]]:
    """One row for all dtypes that are served by the same kernels."""
    rows: list[dict[str, Any]] = []
    for dtype, products in served:
        acc = accumulator_dtype(dtype)
        row = {"device": device, "products": products, "summed_in": str(acc) if acc != dtype else "their own dtype"}
        same = next((r for r in rows if {**r, "dtypes": None} == {**row, "dtypes": None}), None)
        if same is None:
            rows.append({**row, "dtypes": [str(dtype)]})
        else:
            same["dtypes"].append(str(dtype))
    return rows
