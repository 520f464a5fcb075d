"""What each kernel is made of: its sources and the Python code that launches it, and a digest of both."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import bsrgemm
from bsrgemm import sources

PACKAGE = Path(bsrgemm.__file__).parent

#: kernel -> (source, the Python definitions that choose and launch it)
KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gemm_simt": (
        "gemm_simt.cu",
        ("launch.py:Prepared", "launch.py:product", "tuning.py:GemmSimt", "tuning.py:spmm"),
    ),
    "spmv": ("spmv.cu", ("launch.py:Prepared", "launch.py:product", "tuning.py:Spmv", "tuning.py:spmv")),
    "pairs": (
        "pairs.cu",
        ("device.py:CudaHome.pair_products", "launch.py:run", "tuning.py:Pairs", "tuning.py:pairs"),
    ),
    "segment": (
        "segment.cu",
        ("device.py:CudaHome.segment_reduce", "launch.py:run", "tuning.py:Segment", "tuning.py:segment"),
    ),
    "expand": ("expand.cu", ("device.py:CudaHome.expand", "launch.py:run", "tuning.py:Expand")),
}

#: Kernels with shared memory, for which racecheck has something to look at.
SHARED_MEMORY: tuple[str, ...] = ()


def digest(kernel: str) -> str:
    """A digest that changes with the device code or the launch code, not with comments, blanks or docstrings."""
    source, definitions = KERNELS[kernel]
    parts = [sources.code_digest(sources.gather(source))]
    parts += [_definition(*where.split(":")) for where in definitions]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _definition(file: str, name: str) -> str:
    """A definition of the package as Python sees it."""
    scope: ast.AST = ast.parse((PACKAGE / file).read_text())
    for part in name.split("."):
        scope = next(
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        )
    for node in ast.walk(scope):
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = body[1:] or [ast.Pass()]
    return ast.dump(scope)
