"""What this machine offers: versions, device, kernel cache, and which kernel serves which dtype.

Nothing here raises an error: what cannot be found is None, with a line under "missing" that says how to get it.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import scipy

from ._backend.registry import no_device
from ._kernels import jit
from .dtypes import DEVICE_DTYPES, HALF_DTYPES, HOST_DTYPES, UINT8, accumulator_dtype, result_dtype

_TENSOR_BLOCK = 64
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
        - ``kernels``: for each device and group of dtypes, what serves which product, and the dtype of the sums;
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
    from ._kernels.jit import cuda_root

    try:
        return str(cuda_root())
    except OSError as error:
        missing.append(_line(error))
        return None


def _cache() -> dict[str, Any]:
    from ._kernels import disk_cache

    folder = disk_cache.folder()
    sizes = []
    try:
        for path in folder.glob("*.cubin"):
            sizes.append(path.stat().st_size)
    except OSError:  # entries may vanish while they are counted
        pass
    return {"folder": str(folder), "entries": len(sizes), "bytes": sum(sizes)}


def _line(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__


# -------------------------------------------------------------------------------------- kernels
def _cuda_kernels(arch: str) -> list[dict[str, Any]]:
    from ._attention.choose import choose
    from ._attention.forward import PLAIN
    from ._attention.forward import Problem as AttentionProblem
    from ._kernels import element_types
    from ._kernels.card import Card
    from ._products.block_products import SpgemmSimt
    from ._products.call import Problem
    from ._products.gemm_simt import GemmSimt, Spmv
    from ._products.prepared import compiled_for

    index = np.dtype(np.int32)
    columns = 64
    served = []
    for dtype in DEVICE_DTYPES:
        acc = accumulator_dtype(result_dtype(dtype, dtype))
        names = element_types.types(dtype, dtype, dtype, acc, index)
        entries = [kernel.entry for kernel in (Spmv, GemmSimt, SpgemmSimt)]
        wide = np.dtype(np.int32) if dtype == np.dtype(np.int8) else dtype
        names = element_types.types(dtype, dtype, wide, accumulator_dtype(wide), index)
        sides = (_TENSOR_BLOCK, _TENSOR_BLOCK)
        problem = Problem(arch, names, *sides, columns, 1, 1, 1, 1, False, "C", "C", True, True)
        best = compiled_for(problem, Card(arch, 132)).entry
        if best != entries[1]:
            cast = "to int32, " if wide != dtype else ""
            entries[1] = f"{best} ({cast}blocks of 16 n) or {entries[1]}"
        attends, fp8 = "-", dtype == UINT8
        if fp8 or dtype in _ATTENTION_DTYPES:
            wide = np.dtype(np.float32) if fp8 else dtype
            sizes = (128, 128, PLAIN, True, True, 10**6, 4096)
            attended = AttentionProblem(arch, dtype, wide, accumulator_dtype(wide), *sizes, fp8=fp8)
            attends = f"{choose(attended).entry}{_FP8 if fp8 else ''}"
        served.append((dtype, dict(zip(PRODUCTS, (*entries, attends), strict=True))))
    return _grouped("cuda", served)


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
        row = {
            "device": device,
            "products": products,
            "summed_in": str(acc) if acc != dtype else "their own dtype",
        }
        same = next((r for r in rows if {**r, "dtypes": None} == {**row, "dtypes": None}), None)
        if same is None:
            rows.append({**row, "dtypes": [str(dtype)]})
        else:
            same["dtypes"].append(str(dtype))
    return rows
