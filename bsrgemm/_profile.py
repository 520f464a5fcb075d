"""One call under NVIDIA Nsight Compute, its figures read: ``python -m bsrgemm profile gemm --block 64``.

The command starts ncu, which starts the command again with ``--inside``: the operands of a problem of `bench`, a few
calls that compile and plan, then one call between cudaProfilerStart and cudaProfilerStop, which is all that ncu sees.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from ._info import cuda_problem

if TYPE_CHECKING:
    from .benchmark.ncu import Launch
    from .benchmark.problem import Problem

# --------------------------------------------------------------------------------------- the case
#: The options of each case and what they are unless given; None is not there.
CASES: dict[str, dict[str, Any]] = {
    "gemm": {"size": 8192, "block": 64, "density": 0.22, "columns": 8192, "dtype": "float16"},
    "spmv": {"size": 65536, "block": 16, "density": 0.01, "dtype": "float32"},
    "attention": {"size": 16384, "heads": 16, "head_dim": 128, "dtype": "float16", "causal": False, "window": None,
                  "block": 128, "density": 1.0},
    "decode": {"size": 131072, "heads": 32, "head_dim": 128, "dtype": "float16", "page": None},
}  # fmt: skip
#: The kernels of each case; what else a call launches is not looked at.
KERNELS = {"gemm": "^(gemm_|spmv)", "spmv": "^spmv", "attention": "^attention_s", "decode": "^decode"}
_DTYPES = ("float16", "bfloat16", "e4m3", "tf32", "float32", "float64")
_NOT_TAKEN = {"spmv": ("e4m3", "tf32"), "attention": ("tf32",), "decode": ("e4m3", "tf32", "float32", "float64")}
_PAGES = (16, 32, 64, 128, 256)  # those of KVCache
_SHARING = 4  # query heads of a decode on the same keys, as in bench


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def options_of(case: str, given: dict[str, Any]) -> dict[str, Any]:
    """All options of a case, from those that were given, None where not; ValueError for what it does not take."""
    given = {option: value for option, value in given.items() if value is not None}
    for option, value in given.items():
        if option not in CASES[case]:
            raise ValueError(f"{_flag(option)}: {case} only has {', '.join(map(_flag, CASES[case]))}")
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{_flag(option)}: wanted a number from 1 on, got {value}")
    options = CASES[case] | given
    if not 0 < options.get("density", 1) <= 1:
        raise ValueError(f"--density: wanted a number above 0 and up to 1, got {options['density']}")
    if options["dtype"] in _NOT_TAKEN.get(case, ()):
        raise ValueError(f"--dtype: {case} does not take {options['dtype']}")
    if case in ("gemm", "spmv") and options["size"] % options["block"]:
        raise ValueError(f"--size: wanted a multiple of the block, {options['block']}, got {options['size']}")
    return options


def arguments(case: str, options: dict[str, Any]) -> list[str]:
    """The command line that asks for it, every option spelled out."""
    there = {option: value for option, value in options.items() if value}
    return [case, *(x for o, value in there.items() for x in ([_flag(o)] if value is True else [_flag(o), str(value)]))]


def problem_of(case: str, options: dict[str, Any]) -> Problem:
    """The problem of `bench` that has these options. Nothing is allocated."""
    from .benchmark.attentions import Attention, Decode
    from .benchmark.products import Product

    size, dtype, block, density = (options.get(name) for name in ("size", "dtype", "block", "density"))
    if case in ("gemm", "spmv"):
        stored, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, None)
        return Product(case, size, (block, block), density, options.get("columns", 1), stored, precision)
    heads, head_dim = options["heads"], options["head_dim"]
    if case == "decode":
        kv_heads = heads // _SHARING if heads % _SHARING == 0 else heads
        return Decode(1, size, heads, kv_heads, head_dim, options["page"], dtype)
    blocks = None if density == 1 else (block, max(1, round(density * size / block)))
    return Attention(1, heads, size, head_dim, options["causal"], options["window"], blocks, dtype=dtype)
