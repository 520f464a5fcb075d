"""bench/publish on made-up results, and the sections of bench/run/gemm.py on NumPy instead of CuPy."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._benchmark import machine, patterns, provenance, runner, timing
from bsrgemm._benchmark import table as table_module
from bsrgemm._benchmark.checks import products as checks
from bsrgemm._benchmark.measure import gemm as gemm_script
from bsrgemm._benchmark.measure import gemm_ahead, gemm_cases, gemm_sections
from bsrgemm._benchmark.peers import products as product_peers
from bsrgemm._benchmark.show import contents, headline, markdown

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def _published(name: str) -> Any:
    """A script of bench/publish as a module."""
    spec = importlib.util.spec_from_file_location(f"published_{name}", BENCH / "publish" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tables = _published("tables")
MACHINE = {
    "date": "2031-05-04", "bsrgemm": "9.8", "card": "NVIDIA Test", "driver": 13020, "cupy": "14.2", "nvrtc": "13.0",
    "peers": {"torch": "2.9", "nvidia-cudnn-cu13": "9.9"},
}  # fmt: skip


#: What a run records of a kernel that is as it was
KERNELS = {"spmv.cu:spmv -DX=1": provenance.digest("spmv.cu:spmv")}


# ------------------------------------------------------------------------------------------ pages
def test_pictures_are_drawn_and_stale_ones_are_seen(tmp_path: Path) -> None:
    pictures = _published("pictures")
    results = tmp_path / "results"
    shutil.copytree(pictures.RESULTS, results)
    options = ["--folder", str(tmp_path / "drawn"), "--results", str(results)]
    assert pictures.main([*options, "--check"]) == 1
    assert pictures.main(options) == 0
    assert pictures.main([*options, "--check"]) == 0
    assert {path.stem for path in (tmp_path / "drawn").iterdir()} == set(pictures.ALL)
    found = json.loads((results / "gemm_density_cuda.json").read_text())
    found["rows"][0]["ratio"] *= 2
    (results / "gemm_density_cuda.json").write_text(json.dumps(found))
    assert pictures.stale(tmp_path / "drawn", results) == ["density"]


# ----------------------------------------------------------------------------------------- tables
def product(**more: Any) -> dict[str, Any]:
    return {
        "n": 8192, "block": [128, 128], "density": 0.21875, "columns": 8192, "dtype": "float16", "precision": None,
        "pattern": "uniform", "kernel": None, "seconds": 3e-4, "tflops": 711.4, "dense_tflops": 780.2, "ratio": 0.912,
        "peers": {"cuSPARSE BSR": 14.0, "cuSPARSE ELL": 224.0, "torch BSR": None}, "sustained": 480.0,
        "dense_sustained": 640.0, "wrong": False, "target": 0.94, "target_of": "cuBLAS", "reached": False,
    } | more  # fmt: skip


def attention(**more: Any) -> dict[str, Any]:
    return {
        "shape": [1, 16, 16384, 128], "mask": "causal", "dtype": "float16", "kernel": None, "flops": 1e12,
        "seconds": 1e-3, "tflops": 739.0, "peers": {"cuDNN": 625.0, "flash": None, "cF": 667.0}, "sustained": {},
        "targets": [{"least": 1.15, "of": "cF", "reached": False}, {"least": 1.1, "of": "cuDNN", "reached": True},
                    {"least": 1.1, "of": "FA4", "reached": None}], "wrong": False,
    } | more  # fmt: skip


FAILED = {"what": "this one", "failed": True}
WRONG = {"what": "that one", "wrong": True, "deviation": 0.5}
DECODE = {"batch": 1, "keys": 8192, "page": None, "us": 18.9, "us_back_to_back": 30.0, "tb_per_second": 1.77,
          "peers": {"cuDNN": 17.3}, "bound": 10.0, "reached": False}  # fmt: skip
#: Rows of each file, and what is to be read in its table
MADE_UP: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "gemm_table_cuda": (
        [product(), product(dtype="e4m3", target=1.5, target_of="float16", reached=True, peers={}), FAILED,
         product(n=4096, columns=256, seconds=None, tflops=None)],
        ["| float16, 128 x 128, density 0.22 | 711 | 780 | 0.91 | 14 | 224 | - | 0.94 x cuBLAS | **no** |",
         "| e4m3, 128 x 128, density 0.22, cuBLAS in float16 | 711 | 780 | 0.91 |  |  |  | 1.5 x float16 | yes |",
         "| this one | **failed** |", "n = 4096, 256 columns | **failed** |",
         "Back to back, at the power limit: 128 x 128 bsrgemm 480, dense cuBLAS 640; "],
    ),
    "gemm_density_cuda": (
        [{"block": 64, "density": 0.1, "seconds": 1e-4, "dense_seconds": 1e-3, "ratio": 0.11},
         {"block": 64, "crossover": 0.71, "target": 0.75, "reached": False},
         {"block": 16, "crossover": None, "target": 0.33, "reached": True}],
        ["| 64 x 64 | 0.10: 0.11 | 0.71 | 0.75 | **no** |", "| 16 x 16 |  | every density | 0.33 | yes |"],
    ),
    "gemm_patterns_cuda": (
        [{"what": "128x128 A.T @ B", "seconds": 3e-4, "base_seconds": 3e-4, "relative": 0.99, "target": 0.85,
          "reached": True}, WRONG],
        ["| 128x128 A.T @ B | 0.300 | 0.99 | 0.85 | yes |", "| that one | **WRONG**, off by 5.0e-01 |"],
    ),
    "gemm_error_cuda": (
        [{"block": 32, "dtype": "float32", "precision": "tf32", "error": 1.2e-4, "dense_error": 1.2e-4, "ratio": 1.0,
          "limit": 2.0, "reached": True}, FAILED],
        ["| tf32, 32 x 32 | 1.2e-04 | 1.2e-04 | 1.00 | 2 | yes |"],
    ),
    "gemm_columns_cuda": (
        [{"block": b, "columns": 16, "seconds": 1e-5, "tflops": 26.5, "gbps": 1700.0} for b in (64, 128)] + [FAILED],
        ["| 16 | 26.5 | 1,700 | 26.5 | 1,700 |"],
    ),
    "gemm_size_cuda": ([product(peers={}, target=None, reached=None, sustained=None)], ["| 711 | 780 | 0.91 |  |  |"]),
    "attention_table_cuda": (
        [attention(), attention(wrong=True, deviation=0.1), FAILED],
        ["| 1, 16, 16384, 128, causal | 739 | 625 | 667 | 1.18 | 1.11 | 1.15 x cF, 1.1 x cuDNN | **no**, yes |",
         "targets against FA4", "causal | **WRONG**"],
    ),
    "attention_small_cuda": (
        [{"heads": 8, "length": 512, "head_dim": 64, "us_per_head": 0.97, "us_per_head_back_to_back": 1.2,
          "peers": {"cuDNN": [1.37, 2.0]}, "bound": 0.8, "reached": False}, FAILED],
        ["| H = 8 | 0.97 / 1.20 | 1.37 / 2.00 | 1.41 | 0.80 | **no** |"],
    ),
    "attention_decode_cuda": (
        [DECODE, {"batch": 1, "keys": 8192, "page": 64, "us": 3.0, "blocks": 8, "of_blocks": 128, "speed_up": 6.3}],
        ["| 1 x 8192 | 18.9 / 30.0 | 1.77 | 17.3 | 10.0 | **no** |",
         "| 1 x 8192, pages of 64, 8 of 128 blocks of 64 | 3.0 | 6.3 x faster than all |"],
    ),
    "attention_long_cuda": (
        [{"length": 131072, "mask": "dense causal", "seconds": {"ours": 0.1, "cuDNN": 0.12}},
         {"length": 524288, "mask": "causal window 2048", "seconds": 0.02, "tflops": 650.0, "peak_bytes": 10**6,
          "mask_bytes": 10**6, "speed_up": {"ours": 96.0}, "dense_computed": True}, FAILED],
        ["| 128K, dense causal | ours 100.0, cuDNN 120.0 |",
         "| 512K, causal window 2048 | 20.00 | 650 | 2.00 | yes | 96.0 x ours | computed |"],
    ),
    "attention_density_cuda": (
        [{"density": 0.2, "seconds": 1e-3, "full_seconds": 5e-3, "ratio": 1.0}, {"slope": 1.02, "start_seconds": 5e-6}],
        ["| 0.200 | 1.000 | 1.00 | yes |", "Fit: 1.020 x density x full + 5 us."],
    ),
    "attention_accuracy_cuda": (
        [{"inputs": "one huge key", "dtype": "float16", "good": True, "errors": {
            "bsrgemm": {"error": 5e-4, "slower": 1.01}, "cuDNN": {"error": 4e-4, "slower": 1.0}}}, FAILED],
        ["| one huge key, float16 | 5.0e-04 | 4.0e-04 (cuDNN) | 1.25 | **no** | 1.01 |"],
    ),
    "attention_backward_accuracy_cuda": (
        [{"inputs": "constant rows", "dtype": "float16", "causal": True, "draws": 8, "reached": False,
          "ratios": {"dk": 1.3, "dv": 1.0}, "errors": {"bsrgemm": {"dk": 4e-4, "dv": 3e-4}, "cuDNN": {"dk": 3e-4}}}],
        ["| constant rows, float16, causal | 0 | 4.0e-04 | 3.0e-04 | -, 1.30, 1.00 | **no** |"],
    ),
    "attention_backward_cuda": (
        [{"case": "causal 16K", "rates": {"bsrgemm": 600.0, "bsrgemm, any order": 640.0, "FA4": 650.0,
                                          "FA4, deterministic": 600.0}},
         {"case": "window 2048 128K", "rates": {"bsrgemm": 561.0}}, {"case": "of a user", "rates": {"FA4": 1.0}}],
        ["| causal 16K | 600 | 640 | 600 | 650 | bsrgemm 0.95 x FA4 in order, any order 0.97 x FA4 any order | "
         "1.00, 0.98 | yes, yes |", "| window 2048 128K | 561 | - | - | - | bsrgemm 560 TFLOP/s | 561 | yes |",
         "| of a user | - | - | - | 1 |  |  |  |"],
    ),
    "attention_backward_whole_cuda": (
        [{"case": "window 2048 16K", "seconds": {"forward": 1e-3, "backward": 2e-3, "both": 3e-3}, "share": 0.08,
          "rates": {"both": 500.0}, "parts": {"begin": 3e-5, "products": 1e-3, "end": 4e-5}, "sustained": 490.0,
          "peak_bytes": 2_000_000, "least_bytes": 1_000_000}],
        ["| window 2048 16K | 1.00 | 2.00 | 3.00 | 500 | 30 | 40 | 8.0 % | 7.5 % | **no** | 2.0 | 2.00 |",
         "Back to back, at the power limit: window 2048 16K 490."],
    ),
    "overhead_cuda": (
        [{"what": "A @ x", "host_seconds": 1e-5, "adds": 1.25, "most_adds": 1.4, "reached": True},
         {"kernel": "spmv", "call_seconds": 2.8e-5, "bound": 2.5e-5, "reached": False},
         {"kernel": "spmv", "cold_seconds": 0.099}, {"block": 64, "prepare_seconds": 1e-3, "bound": 2e-3,
                                                    "reached": True}],
        ["| A @ x, host time | 10.0 us (1.2 x cupy.add) | 1.4 x cupy.add | yes |",
         "| spmv, host time of a call | 28.0 us | 25 us | **no** |", "first call, cold cache | 99.0 ms |  |  |",
         "| work list of 1,000,000 blocks of 64 x 64 | 1.0 ms | 2 ms | yes |"],
    ),
    "attention_host_cuda": (
        [{"what": "attention, causal", "seconds": 2e-5, "bound": 2.5e-5, "reached": True},
         {"what": "window", "make_seconds": 6e-3, "list_seconds": 1e-4, "nbytes": 576000, "reached": False}],
        ["| attention, causal | 20.0 us | 25 us | yes |",
         "| mask: window, made + listed | 6.00 + 0.10 ms, 0.58 MB | 1 ms, 1 MB | **no** |"],
    ),
    "convert_cuda": (
        [{"case": "csr -> bsr", "blocks": 10**6, "seconds": 1.5e-3, "through_host": 0.15}],
        ["| csr -> bsr | 1.50 | 150 | 100 x |"],
    ),
    "spmv_table_cuda": (
        [{"block": [3, 3], "dtype": "float64", "seconds": 2e-4, "share": 0.915,
          "peers": {"cuSPARSE BSR": 0.43, "warp": None}, "target": 0.94, "reached": False},
         {"block": [1, 2], "dtype": "float32", "seconds": 1e-4, "share": 0.5, "peers": {}, "target": None,
          "reached": None}],
        ["|  | ms | bsrgemm | cuSPARSE BSR | warp | target | reached |",
         "| 3 x 3 float64 | 0.200 | 0.92 | 0.43 | - | 0.94 | **no** |",
         "| 1 x 2 float32 | 0.100 | 0.50 | - | - |  |  |"],
    ),
    "spmv_columns_cuda": (
        [{"block": [4, 4], "dtype": "float64", "seconds": 5e-4, "peers": {"cupyx csr": 2e-3}, "target": 0.63,
          "reached": True}],
        ["| 4 x 4 float64 | 0.50 | 2.00 | 0.63 | yes |"],
    ),
    "spmv_uneven_cuda": (
        [{"what": "A.T @ x", "seconds": 3e-4, "relative": 0.49, "target": None, "reached": None}],
        ["| A.T @ x | 0.300 | 0.49 |  |  |"],
    ),
    "matmul_cpu": (
        [{"n": 1024, "block": 16, "columns": 128, "dtype": "float32", "seconds": 2e-3, "peers": {"scipy bsr": 1e-2}}],
        ["| n = 1,024, float32, blocks 16 x 16, 128 columns | 2.00 | scipy bsr 10.00 | 5.0 x |"],
    ),
    "everyday_cpu": (
        [{"matrix": "mesh", "what": "A + B", "seconds": 1e-3, "factor": 0.5, "most": 1.2, "peers": {"scipy bsr": 2e-3}},
         {"matrix": "tiny", "what": "A + B", "seconds": 2e-5, "factor": 3.0, "most": 2.5, "peers": {"scipy csr": 1e-5}},
         {"matrix": "mesh", "what": "A @ x", "seconds": 1e-2, "factor": 1.0, "most": 1.2, "peers": {}}],
        ["|  | mesh, us | over scipy | tiny, us | over scipy |", "| A + B | 1,000.0 | 0.50 | 20.0 | **3.00** |",
         "| A @ x | 10,000.0 | 1.00 | - | - |"],
    ),
    "spgemm_blocks_cuda": (
        [{"what": "products alone", "n": 8192, "block": [128, 128], "seconds": 1e-4, "tflops": 411.0,
          "peers": {"cuBLAS": 2e-3}, "target": 400.0, "reached": True}],
        ["| n = 8192, 128 x 128, products alone | 0.100 | 411 | 400 | yes | 2.00 |"],
    ),
    "spgemm_mesh_cuda": (
        [{"cells": 30, "n": 89373, "seconds": 2e-3, "peers": {"cupyx csr": 1.5e-2, "warp": 1.8e-2}, "ratio": 7.5,
          "target": 5.0, "reached": True},
         {"cells": 60, "n": 680943, "seconds": 2e-2, "peers": {"cupyx csr": None}, "ratio": None, "target": 5.0,
          "reached": None}],
        ["| 3 x 3 blocks, float64 | bsrgemm, ms | cupyx csr, ms | warp, ms | faster than all | wanted |",
         "| 30^3 hexahedra, 89,373 rows | 2.00 | 15.00 | 18.00 | 7.5 x | 5 x cupyx csr yes |",
         "| 60^3 hexahedra, 680,943 rows | 20.00 | - | - | - | 5 x cupyx csr  |"],
    ),
    "sddmm_table_cuda": (
        [{"dtype": "float16", "block": [128, 128], "layout": "row", "seconds": 5e-4, "tflops": 500.0, "ratio": 0.66,
          "peers": {"torch sampled_addmm": 0.25}, "target": 0.8, "reached": False}],
        ["| float16, 128 x 128, Y row-major | 0.500 | 500.0 | 0.66 | 0.80 | **no** | 0.25 |"],
    ),
    "elasticity_cuda": (
        [{"problem": "3d", "unknowns": 1000, "smoother": "jacobi", "good": True, "iterations": 22, "seconds": 0.06,
          "products": {"A, P, R": 0.03}, "peers": {"cupyx csr": {"seconds": 0.08, "iterations": 22}}},
         {"problem": "2d", "unknowns": 1000, "smoother": "jacobi", "good": False}],
        ["| 3d, 1,000 unknowns, jacobi | 60.0 | 22 | 50% | 80.0 (22) | - |",
         "| 2d, 1,000 unknowns, jacobi | **WRONG** |  |  |  |  |"],
    ),
    "solvers_cuda": (
        [{"problem": "cube", "unknowns": 1000, "what": "bsrgemm", "device": "cuda", "setup": 0.08, "refresh": 0.0271,
          "solution": 0.011, "iterations": 15, "info": 0},
         {"problem": "cube", "unknowns": 1000, "what": "pyamg, host", "setup": 4.0, "solution": 2.0, "iterations": 16},
         {"problem": "plate", "unknowns": 1000, "what": "bsrgemm", "setup": 1.0, "iterations": 15, "info": 15}],
        ["| cube, 1,000 unknowns, bsrgemm | 80.0 | 27.1 | 11.0 | 15 |",
         "| cube, 1,000 unknowns, pyamg, host | 4,000.0 | - | 2,000.0 | 16 |",
         "| plate, 1,000 unknowns, bsrgemm | **WRONG** |  |  |  |"],
    ),
    "solver_jobs_cuda": (
        [{"problem": "cube", "unknowns": 1000, "what": "job", "seconds": 0.25, "rate": 4e3, "iterations": 7, "info": 0},
         {"problem": "cube", "unknowns": 1000, "what": "bad", "seconds": 0.5, "rate": 2e3, "iterations": 9, "info": 9},
         {"problem": "cube", "unknowns": 1000, "what": "ilu0", "setup": 0.0125, "seconds": 0.003, "multiple": 11.96},
         {"problem": "cube", "unknowns": 2000, "what": "ilu0", "setup": 0.0125, "seconds": 0.003, "multiple": 11.96,
          "replayed": 0.001, "multiple_replayed": 4.04},
         {"problem": "cube", "unknowns": 1000, "what": "spsolve", "seconds": 0.5, "rate": 2e3, "iterations": None,
          "info": 0}],
        ["| cube, 1,000 unknowns, job | 0.250 | 4,000 | 7 |", "| cube, 1,000 unknowns, bad | **WRONG** |  |  |",
         "| cube, 1,000 unknowns, ilu0 | 12.5 | 3.00 | 12.0 | - | - |",
         "| cube, 2,000 unknowns, ilu0 | 12.5 | 3.00 | 12.0 | 1.00 | 4.0 |",
         "| cube, 1,000 unknowns, spsolve | 0.500 | 2,000 | - |"],
    ),
    "llama_cuda": (
        [
            {"what": "decode", "tokens": 248, "tokens_per_second": 101.5, "attention_share": 0.25},
            {"what": "decode", "tokens": 48, "tokens_per_second": 201.5, "attention_share": 0.25, "by": "graph"},
            {"what": "prefill", "tokens": 8, "tokens_per_second": 30, "attention_share": 0.5, "by": "cuBLAS"},
        ],
        [
            "| decode of 248 tokens | 101.5 tokens/s | 25% |",
            "| decode of 48 tokens, by a CUDA graph | 201.5 tokens/s | 25% |",
            "| prefill of 8 tokens, dense layers by cuBLAS | 30 tokens/s | 50% |",
        ],
    ),
}  # fmt: skip
MARKERS = ("gemm", "attention", "calls", "vectors", "others", "sparse", "solver", "llama")
BETWEEN = "\nbetween\n".join(f"<!-- results:{name} -->\nold\n<!-- /results:{name} -->" for name in MARKERS)
README = f"before\n{BETWEEN}\nafter\n"


@pytest.fixture
def project(tmp_path: Path) -> tuple[Path, list[str]]:
    """A README with markers and no results yet, and the options that name them."""
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(README)
    return tmp_path, ["--readme", str(tmp_path / "README.md"), "--results", str(tmp_path / "results")]


def keep(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    about = {"machine": MACHINE, "rows": [{"kernels": KERNELS} | row for row in rows]} | more
    (folder / "results" / f"{name}.json").write_text(json.dumps(about))


def test_every_kind_of_result_has_its_table(project: tuple[Path, list[str]]) -> None:
    folder, options = project
    for name, (rows, _) in MADE_UP.items():
        keep(folder, name, rows)
    assert {each.file for group in contents.GROUPS.values() for each in group} == set(MADE_UP)
    assert tables.main(options) == 0
    text = (folder / "README.md").read_text()
    for _, lines in MADE_UP.values():
        for line in lines:
            assert line in text
    head = "NVIDIA Test, 2031-05-04, bsrgemm 9.8, CuPy 14.2, NVRTC 13.0, driver for CUDA 13.2, torch 2.9, cudnn 9.9."
    assert text.count(head) == len(MARKERS)
    assert text.startswith("before\n<!-- results:gemm -->\n") and text.endswith("<!-- /results:llama -->\nafter\n")
    assert text.count("\nbetween\n") == len(MARKERS) - 1 and "\nold\n" not in text and contents.NOT_YET not in text
    for block in text.split("\n\n"):
        widths = {line.count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1, block


def test_what_is_missing_or_cut_is_said(project: tuple[Path, list[str]]) -> None:
    folder, options = project
    assert tables.main(options) == 0
    for name in MADE_UP:
        assert f"{contents.NOT_YET} (`bench/results/{name}.json`)" in (folder / "README.md").read_text()
    keep(folder, "gemm_error_cuda", MADE_UP["gemm_error_cuda"][0], cut="interrupted")
    assert tables.main(options) == 0
    text = (folder / "README.md").read_text()
    assert "(cut short: interrupted)" in text and "results/gemm_error_cuda.json" not in text


def test_check_sees_a_difference_and_writes_nothing(project: tuple[Path, list[str]]) -> None:
    folder, options = project
    readme = folder / "README.md"
    assert tables.main(["--check", *options]) == 1
    assert readme.read_text() == README
    assert tables.main(options) == tables.main(["--check", *options]) == 0
    keep(folder, "llama_cuda", MADE_UP["llama_cuda"][0])
    assert tables.main(["--check", *options]) == 1
    readme.write_text("no markers\n")
    assert tables.main(options) == 1


@pytest.mark.parametrize(
    ("name", "lacks"), [("README.md", ["calls", "others", "sparse", "solver", "llama"]), ("bench/RESULTS.md", [])]
)
def test_the_tables_agree_with_the_results(name: str, lacks: list[str]) -> None:
    changed = subprocess.run(
        ["git", "status", "--porcelain", "bench/results"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if changed.returncode == 0 and changed.stdout:
        pytest.skip(
            "bench/results has changes that are not committed: python bench/publish/tables.py writes their tables"
        )
    text = (ROOT / name).read_text(encoding="utf-8")
    filled, missing = tables.filled(text, BENCH / "results")
    assert missing == lacks
    assert filled == text, "run python bench/publish/tables.py"


# ------------------------------------------------------------------------------------------ marks
OTHER = {name: "0" * 16 for name in KERNELS}


@pytest.mark.parametrize(
    ("kernels", "marked"),
    [
        (KERNELS, False),
        (OTHER, True),
        ({}, True),  # an old file
        ({"gone.cu:gone": "0" * 16}, True),
        (KERNELS | {"gemm_simt.cu:gemm_simt": "0" * 16}, True),
    ],
)
def test_a_figure_whose_kernel_has_changed_is_marked(
    kernels: dict[str, str], marked: bool, project: tuple[Path, list[str]]
) -> None:
    folder, options = project
    for name, (rows, _) in MADE_UP.items():
        keep(folder, name, [row | {"kernels": kernels} for row in rows])
    assert tables.main(options) == 0
    text = (folder / "README.md").read_text()
    for name in contents.GROUPS:
        section = tables.between(text, name)
        # what runs on the CPU has no kernels; that file is known by its commit
        assert (markdown.FOOTNOTE in section) == marked, name
        assert (markdown.MARK in section.replace(markdown.FOOTNOTE, "")) == marked, name


def test_rows_are_judged_by_the_kernels_that_they_launched() -> None:
    rows = [{"kernels": KERNELS}, {"kernels": {"gemm_simt.cu:gemm_simt": "0" * 16}}, {"kernels": {}}]
    assert [row["stale"] for row in contents.marked_rows({"machine": MACHINE, "rows": rows})] == [False, True, True]
    # a row that launched nothing here, as in another process, is as current as the other rows
    some = {"machine": MACHINE, "rows": [rows[0], rows[2]]}
    assert [row["stale"] for row in contents.marked_rows(some)] == [False, False]
    on_cpu = {"machine": {}, "rows": [{}]}
    assert contents.marked_rows(on_cpu)[0]["stale"] and not contents.marked_rows(on_cpu | {"commit": "1"})[0]["stale"]


def test_a_product_that_was_measured_with_other_code_is_shown_on_another_pattern() -> None:
    choose, _ = headline.HEADLINES["gemm"]
    common = {"block": [64, 64], "dtype": "float16", "precision": None, "n": 8192, "columns": 8192, "kernel": None}
    old = common | {"density": 0.219, "pattern": "uniform", "stale": True}
    denser, other = common | {"density": 0.5, "stale": False}, common | {"density": 0.217, "pattern": "bernoulli"}
    good = old | {"block": [32, 32], "stale": False}
    assert choose([old, good, old, old, denser, other]) == [other, good, other, other]
    assert choose([old, good, old, good, denser]) == [old, good, old, good]  # it is marked


def test_no_marked_figure_stands_in_the_readme() -> None:
    assert markdown.MARK not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_launched_kernels_are_noted_with_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = provenance.jit
    calls: list[Any] = []

    class Kernel:
        max_dynamic_shared_size_bytes = 0

        def __call__(self, *args: Any) -> None:
            calls.append(args)

    kernel = Kernel()
    monkeypatch.setattr(jit, "load", lambda spec, arch: kernel)
    plain, spec = jit.load, jit.KernelSpec("spmv.cu", "spmv", (("X", 1),))
    with provenance.recording() as launched:
        loaded = jit.load(spec, "sm_90a")
        loaded.max_dynamic_shared_size_bytes = 5
        assert launched.take() == {}  # loaded, not launched yet
        loaded((1,), (32,), ())
        loaded((2,), (32,), ())
        found = launched.take()
        assert found == KERNELS and launched.take() == {} and not provenance.changed(found)
    assert jit.load is plain and kernel.max_dynamic_shared_size_bytes == 5 and len(calls) == 2
    loaded((1,), (32,), ())  # not recorded after the block
    assert launched.take() == {}
    with provenance.recording(by_load=True) as launched:
        assert jit.load(spec, "sm_90a") is kernel and launched.take() == KERNELS


def test_kernels_that_were_compiled_ahead_belong_to_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table_module, "RESULTS", tmp_path)
    launched = provenance.Launched()
    ahead, measured = (provenance.jit.KernelSpec("spmv.cu", entry) for entry in ("ahead", "measured"))

    def section(bench: Any, shown: Any) -> None:
        launched.note(measured)
        shown.add("one", what="one")

    shown = table_module.Table("made_up", "Made up", launched)
    runner.measure_section(runner.Bench(), shown, section, lambda: launched.note(ahead), keep=True)
    (row,) = json.loads((tmp_path / "made_up.json").read_text())["rows"]
    assert list(row["kernels"]) == ["spmv.cu:measured"]


def test_rows_of_the_readme_are_put_among_the_others(gemm: Any, tmp_path: Path) -> None:
    path = tmp_path / "results" / "gemm_table_cuda.json"
    gemm.main(["table"])
    before = json.loads(path.read_text())
    for row in before["rows"]:
        row["tflops"] = 1.0
    path.write_text(json.dumps(before | {"commit": "1" * 40}))
    gemm.main(["--headline"])
    after = json.loads(path.read_text())
    assert [row["block"] for row in after["rows"]] == [row["block"] for row in before["rows"]]
    assert [row["tflops"] != 1.0 for row in after["rows"]] == [True] * 4 + [False] * (len(before["rows"]) - 4)
    assert after["commit"] != "1" * 40 and [each["commit"] for each in after["earlier"]] == ["1" * 40]
    assert " / 1111111" in contents.heading([after])


def test_a_file_names_the_commit_and_whether_it_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        about = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *about, *words], cwd=tmp_path, check=True, capture_output=True)

    assert provenance.commit(tmp_path) == {"commit": None, "dirty": None}
    parser = argparse.ArgumentParser()
    provenance.add_option(parser)
    monkeypatch.setattr(provenance._Told, "commit", None)
    for told, dirty in (("abc", False), ("abc+", True)):
        parser.parse_args(["--commit", told])
        assert provenance.commit(tmp_path) == {"commit": "abc", "dirty": dirty}
    monkeypatch.setattr(provenance._Told, "commit", None)
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "a.cu").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    found = provenance.commit(tmp_path)
    assert len(found["commit"]) == 40 and found["dirty"] is False
    with monkeypatch.context() as told:  # what the command line says comes first
        told.setattr(provenance._Told, "commit", "abc")
        assert provenance.commit(tmp_path) == {"commit": "abc", "dirty": False}
    (tmp_path / "cuda" / "a.cu").write_text("2")
    assert provenance.commit(tmp_path) == found | {"dirty": True}


def test_the_readme_has_three_digits_and_the_best_peer_and_no_targets(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    rates = {"cuDNN": 625.4, "FA4": 694.2, "cuDNN BSA": None, "cF": 900.0}
    keep(tmp_path, "gemm_table_cuda", [product()])
    keep(tmp_path, "attention_table_cuda", [attention(peers=rates), attention(mask="b", peers={"cuDNN BSA": 401.26})])
    for name in ("spmv_table_cuda", "elasticity_cuda"):
        keep(tmp_path, name, MADE_UP[name][0])
    text = {name: contents.headline_text(name, tmp_path / "results") for name in headline.HEADLINES}
    assert "| 711 | 224 by cuSPARSE Blocked-ELL | 3.18 | 780 | 0.912 |" in text["gemm"]
    assert "| bsrgemm | cuDNN | FA4 | cuDNN BSA | over the best peer |" in text["attention"]
    assert "causal | 739 | 625 | 694 | - | 1.06 |" in text["attention"]
    assert "b | 739 | - | - | 401 | 1.84 |" in text["attention"]
    assert "| 3 x 3 float64 | 0.915 | 0.430 | - | 2.13 | 0.200 |" in text["vectors"]
    assert "jacobi | 60.0 | 80.0 | - | 1.33 | 22 |" in text["solver"]
    for each in text.values():
        assert not [word for word in ("target", "reached", "at least", "at most") if word in each]


# --------------------------------------------------------------------------- bench/run/gemm.py
class _Array(np.ndarray):
    """NumPy's array with what else the sections ask of CuPy's."""

    def get(self) -> Any:
        return np.asarray(self)


def _cupy() -> types.ModuleType:
    """As much of CuPy as bench/gemm.py uses, on NumPy."""
    module = types.ModuleType("cupy")
    for name in ("empty", "zeros", "asarray", "ascontiguousarray", "empty_like", "sqrt", "abs"):

        def call(*args: Any, name: str = name, **options: Any) -> Any:
            return np.asanyarray(getattr(np, name)(*args, **options)).view(_Array)

        setattr(module, name, call)
    module.random = np.random  # type: ignore[attr-defined]
    module.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)  # type: ignore[attr-defined]
    return module


def _product(A: Any, B: Any, out: Any, *_: Any, **__: Any) -> Callable[[], Any]:
    """A peer's product, in float64."""

    def call() -> Any:
        a = A.toarray() if hasattr(A, "blocksize") else A
        out[...] = (a.astype(np.float64) @ B.astype(np.float64)).astype(out.dtype)
        return out

    return call


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """bench/run/gemm.py, much smaller and on NumPy."""
    monkeypatch.setitem(sys.modules, "cupy", _cupy())

    def seconds(*_: Any, **__: Any) -> float:
        return 1e-3

    small = [replace(case, n=480 if case.n == 8160 else 512, columns=32) for case in gemm_cases.TABLE]
    for module, name, value in (
        (machine, "has_gpu", lambda: True),
        (machine, "describe", lambda: {"date": "2031-05-04", "card": "NVIDIA Test"}),
        (table_module, "RESULTS", tmp_path / "results"),
        (timing.Clock, "samples", lambda self, call: [1e-3]),
        (gemm_cases, "time_sustained", seconds),
        (gemm_cases, "COOL", 0),
        (gemm_cases, "TABLE", small),
        (gemm_sections, "TABLE", small),
        (gemm_sections, "SIDE", 256),
        (gemm_sections, "ERROR_SIDE", 128),
        (gemm_sections, "SIZES", [(512, 0.22, 32)]),
        (gemm_sections, "DENSITIES", (0.2, 1.0)),
        (gemm_sections, "COLUMNS", [1, 16]),
        (product_peers, "dense_cublas", _product),
        (product_peers, "cusparse_bsr", _product),
        (gemm_ahead.jit, "device_target", lambda: "sm_90a"),
        (gemm_ahead.jit, "build", lambda *_: ""),
    ):
        monkeypatch.setattr(module, name, value)
    for cached in (checks.right_operand, checks.dense_operand):
        cached.cache_clear()
    return gemm_script


def test_every_section_of_the_gemm_script_runs(
    gemm: Any, project: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = project
    gemm.main(["all", "--json", str(folder / "all.json")])
    said = capsys.readouterr().out
    assert "WRONG" not in said
    assert said.count("ModuleNotFoundError") <= 1
    found = json.loads((folder / "all.json").read_text())
    assert set(found) == {"machine", "commit", "dirty", *gemm.SECTIONS}
    assert {path.name for path in (folder / "results").iterdir()} == {
        f"gemm_{name}_cuda.json" for name in gemm.SECTIONS
    }
    for name in gemm.SECTIONS:
        rows = json.loads((folder / "results" / f"gemm_{name}_cuda.json").read_text())["rows"]
        assert rows == found[name] and rows
        assert not [row for row in rows if row.get("failed") or row.get("wrong")]
    assert len(found["table"]) == len(gemm_cases.TABLE)
    assert tables.main(options) == 0
    text = (folder / "README.md").read_text()
    assert text.count("x cuBLAS | yes") + text.count("x cuBLAS | **no**") > 10


def test_a_quick_run_leaves_the_results_alone(gemm: Any, tmp_path: Path) -> None:
    gemm.main(["density", "--quick", "--no-peers", "--json", str(tmp_path / "density.json")])
    found = json.loads((tmp_path / "density.json").read_text())["density"]
    assert {row["block"] for row in found} == {128, 64}
    assert not (tmp_path / "results").exists()


def test_a_section_that_fails_or_is_stopped_leaves_what_it_has(
    gemm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: Any, table: Any) -> None:
        table.add("one", what="one")
        raise ValueError("no more")

    def stopped(bench: Any, table: Any) -> None:
        table.add("two", what="two")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    sections = {"table": ("fails", fails), "size": ("is stopped", stopped), "error": ("is not reached", fails)}
    monkeypatch.setattr(gemm, "SECTIONS", sections)
    with pytest.raises(SystemExit, match="interrupted"):
        gemm.main(["all"])
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()}
    assert {name: (found["cut"], len(found["rows"])) for name, found in written.items()} == {
        "gemm_table_cuda": ("ValueError: no more", 1),
        "gemm_size_cuda": ("interrupted", 1),
    }


def test_the_gemm_script_names_kernels_that_exist() -> None:
    found = gemm_ahead.specs(list(gemm_sections.SECTIONS), "sm_90a")
    assert {"gemm_sm90", "gemm_sm80", "gemm_few", "match_rows"} <= {spec.entry for spec in found}
    assert len(found) == len(set(found)) > 20


def test_patterns_have_the_blocks_that_they_promise() -> None:
    for kind in patterns.PATTERNS:
        made = patterns.pattern_of(kind, 1024, (16, 16), 0.22)
        assert made.rows == made.columns == 64
        for i in range(made.rows):
            own = made.indices[made.indptr[i] : made.indptr[i + 1]]
            assert (np.diff(own) > 0).all() and (len(own) == 0 or own[-1] < 64)
    uniform, even = (patterns.pattern_of(kind, 1024, (16, 16), 0.22) for kind in ("uniform", "power-law"))
    assert uniform.blocks == even.blocks == 64 * 14
    assert gemm_sections.crossing([(0.2, 0.5), (0.4, 0.9), (0.6, 1.3)]) == 0.45


def test_products_are_checked_where_they_are_wrong(gemm: Any) -> None:
    pattern = patterns.pattern_of("uniform", 512, (64, 64), 0.22)
    A = checks.sparse_operand(pattern, (64, 64), "float16")
    B = checks.right_operand(512, 32, "float16")
    C = bg.matmul(A, B)
    assert checks.deviation_at_ends(A, pattern, B, C) <= checks.TOLERANCE["float16"]
    for row in (0, 511):
        wrong = C.copy()
        wrong[row, 31] += 1
        assert not checks.deviation_at_ends(A, pattern, B, wrong) <= checks.TOLERANCE["float16"]
