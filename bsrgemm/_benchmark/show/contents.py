"""Which files of results make which tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import provenance
from . import attention_rows, gradient_rows, product_rows
from .headline import HEADLINES
from .markdown import FOOTNOTE, MARK, Row

NOT_YET = "not measured yet"


@dataclass(frozen=True)
class Contents:
    """One table: the file of results without .json, what it shows, and how."""

    file: str
    title: str
    render: Callable[[list[Row]], str]


def _all(*tables: tuple[str, str, Callable[[list[Row]], str]]) -> list[Contents]:
    return [Contents(*each) for each in tables]


#: Marker -> its tables
GROUPS: dict[str, list[Contents]] = {
    "gemm": _all(
        ("gemm_table_cuda", "`A @ B`, effective TFLOP/s; ratio to dense cuBLAS on random data", product_rows.products),
        ("gemm_density_cuda", "time over dense cuBLAS by density, 8192 x 8192 x 8192, float16",
         product_rows.crossovers),
        ("gemm_patterns_cuda", "rate relative to `A @ B` on an even pattern with as many blocks",
         product_rows.relative),
        ("gemm_error_cuda", "max |C - exact| / (|A| |B|), density .22", product_rows.errors),
        ("gemm_columns_cuda", "by columns of B, 8192 x 8192, density .22, float16", product_rows.columns),
        ("gemm_size_cuda", "by size, effective TFLOP/s", product_rows.products),
    ),
    "attention": _all(
        ("attention_table_cuda", "attention, TFLOP/s; cF is cuDNN without a mask at 1, 16, 16384, 128",
         attention_rows.attention),
        ("attention_small_cuda", "small heads: us a head, L2 flushed / back to back", attention_rows.small),
        ("attention_decode_cuda", "decode, 32 heads on 8 of 128: us, L2 flushed / back to back",
         attention_rows.decode),
        ("attention_long_cuda", "long sequences, 8 heads of 128", attention_rows.long),
        ("attention_density_cuda", "time by density of random blocks", attention_rows.density),
        ("attention_accuracy_cuda", "hard inputs: largest error over max(1, size)", attention_rows.accuracy),
        ("attention_backward_cuda", "gradients, TFLOP/s: all kernels of a call, in one order (the default) and in any",
         gradient_rows.rates),
        ("attention_backward_whole_cuda", "both passes: ms, and what the gradients take beside their products",
         gradient_rows.whole),
        ("attention_backward_accuracy_cuda", "gradients on hard inputs: largest error over the largest value, "
         "mean of several draws", gradient_rows.errors),
    ),
    "calls": _all(
        ("overhead_cuda", "products: host time, first call of a process, work list", attention_rows.overhead),
        ("attention_host_cuda", "attention: host time of a call, masks", attention_rows.host),
    ),
    "vectors": _all(
        ("spmv_table_cuda", "`A @ x`, 300,000 block rows of 27 blocks: share of the bandwidth of a copy",
         product_rows.shares),
        ("spmv_columns_cuda", "the same matrices by 16 columns", product_rows.milliseconds),
        ("spmv_uneven_cuda", "`A @ x` on rows of different lengths, 3 x 3 float64", product_rows.relative),
    ),
    "others": _all(
        ("convert_cuda", "conversions, 1,000,000 blocks of 3 x 3 float64", product_rows.conversions),
        ("matmul_cpu", "products on two cores of a CPU", product_rows.by_peer),
        ("everyday_cpu", "everyday operations on a CPU, one thread of BLAS: CPU time of a call, and over that of the "
         "faster of scipy's bsr and csr", product_rows.everyday),
    ),
    "sparse": _all(
        ("spgemm_blocks_cuda", "`A @ A`, random blocks", product_rows.sparse_products),
        ("spgemm_mesh_cuda", "`A @ A`, a mesh", product_rows.mesh_products),
        ("sddmm_table_cuda", "`bg.sddmm`: 8192 x 8192 x 8192 in float16, 4096 in wider floats", product_rows.sampled),
    ),
    "solver": _all(
        ("elasticity_cuda", "linear elasticity by CG with a V-cycle of smoothed aggregation, to 1e-8",
         product_rows.solvers),
        ("solvers_cuda", "`bg.linalg`: set-up of smoothed aggregation, new numbers for it, and CG to 1e-8",
         product_rows.systems),
        ("solver_jobs_cuda", "whole jobs, elasticity of a cube: from block-COO on the card to x at 1e-8",
         product_rows.whole_jobs),
        ("solver_jobs_cuda", "incomplete decompositions and SSOR on the same matrices, colour by colour",
         product_rows.decompositions),
    ),
    "llama": _all(("llama_cuda", "a model of the shape of Llama 3.1 8B, random weights", attention_rows.llama)),
}  # fmt: skip


def marked_rows(found: dict[str, Any]) -> list[Row]:
    """The rows of a file, those that were measured with other code marked as stale."""
    return [row | {"stale": provenance.stale(found, row)} for row in found["rows"]]


def group_text(name: str, results: Path) -> str:
    """All tables of a group."""
    return _section(GROUPS[name], results, lambda rows: rows)


def headline_text(name: str, results: Path) -> str:
    """The table of a group for the README."""
    choose, render = HEADLINES[name]
    first = GROUPS[name][0]
    title = re.sub(r"; (ratio to|cF is).*", "", first.title)
    return _section([Contents(first.file, title, render)], results, choose)


def _section(tables: Sequence[Contents], results: Path, choose: Callable[[list[Row]], list[Row]]) -> str:
    """The text between the markers of some tables."""
    found, parts = [], []
    for each in tables:
        path = results / f"{each.file}.json"
        title = f"**{each.title[0].upper()}{each.title[1:]}**"
        if not path.is_file():
            parts.append(f"{title}: {NOT_YET} (`bench/results/{each.file}.json`).")
            continue
        read = json.loads(path.read_text(encoding="utf-8"))
        found.append(read)
        cut = f" (cut short: {read['cut']})" if "cut" in read else ""
        cut += f" ({read['note']})" if "note" in read else ""
        parts.append(f"{title}{cut}\n\n{each.render(choose(marked_rows(read))) if read['rows'] else NOT_YET}")
    if any(MARK in part for part in parts):
        parts.append(FOOTNOTE)
    return "\n\n".join([heading(found), *parts] if found else parts)


def heading(found: Sequence[dict[str, Any]]) -> str:
    """Card, date, commit and versions of some runs in a line."""
    found = [each for file in found for each in (file, *file.get("earlier", []))]
    machines = [each["machine"] for each in found]

    def every(key: str) -> str:
        return " / ".join(dict.fromkeys(str(m[key]) for m in machines if key in m))

    def driver(number: str) -> str:
        return f"{int(number) // 1000}.{int(number) % 1000 // 10}" if number.isdigit() else number

    commits = dict.fromkeys(
        f"{each['commit'][:7]}{' with changes' if each.get('dirty') else ''}" for each in found if each.get("commit")
    )
    parts = [every("card"), every("date"), f"bsrgemm {every('bsrgemm')}", f"commit {' / '.join(commits)}"]
    parts += [f"CuPy {every('cupy')}", f"NVRTC {every('nvrtc')}", f"driver for CUDA {driver(every('driver'))}"]
    peers: dict[str, dict[str, None]] = {}
    for about in machines:
        for name, version in about.get("peers", {}).items():
            peers.setdefault(re.sub(r"^nvidia-|-cu\d+$", "", name), {})[version] = None
    parts += [f"{name} {' / '.join(versions)}" for name, versions in peers.items()]
    return ", ".join(part for part in parts if part.strip() and not part.endswith(" ")) + "."
