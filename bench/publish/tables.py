"""The tables of results in bench/RESULTS.md and README.md, made from bench/results/*.json between markers.

<!-- results:gemm --> stands for all tables of a group, <!-- results:gemm:head --> for the first rows of the first one.
Without an option both files are rewritten in place; with --check nothing is written, and the exit status is 1 where
they differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bsrgemm._benchmark.show import rows

ROOT = Path(__file__).resolve().parents[1]
FILES = (ROOT / "README.md", ROOT / "bench" / "RESULTS.md")
NOT_YET = "not measured yet"
#: Rows of the head of a group's first table
HEAD = 4

#: Marker -> (file without .json, what it shows, how)
GROUPS: dict[str, list[tuple[str, str, Callable[[list[rows.Row]], str]]]] = {
    "gemm": [
        ("gemm_table_cuda", "`A @ B`, effective TFLOP/s; ratio to dense cuBLAS on random data", rows.products),
        ("gemm_density_cuda", "time over dense cuBLAS by density, 8192 x 8192 x 8192, float16", rows.crossovers),
        ("gemm_patterns_cuda", "rate relative to `A @ B` on an even pattern with as many blocks", rows.relative),
        ("gemm_error_cuda", "max |C - exact| / (|A| |B|), density .22", rows.errors),
        ("gemm_columns_cuda", "by columns of B, 8192 x 8192, density .22, float16", rows.columns),
        ("gemm_size_cuda", "by size, effective TFLOP/s", rows.products),
    ],
    "attention": [
        ("attention_table_cuda", "attention, TFLOP/s; cF is cuDNN without a mask at 1, 16, 16384, 128", rows.attention),
        ("attention_small_cuda", "small heads: us a head, L2 flushed / back to back", rows.small),
        ("attention_decode_cuda", "decode, 32 heads on 8 of 128: us, L2 flushed / back to back", rows.decode),
        ("attention_long_cuda", "long sequences, 8 heads of 128", rows.long),
        ("attention_density_cuda", "time by density of random blocks", rows.density),
        ("attention_accuracy_cuda", "hard inputs: largest error over max(1, size)", rows.accuracy),
    ],
    "calls": [
        ("overhead_cuda", "products: host time, first call of a process, work list", rows.overhead),
        ("attention_host_cuda", "attention: host time of a call, masks", rows.host),
    ],
    "vectors": [
        ("spmv_table_cuda", "`A @ x`, 300,000 block rows of 27 blocks: share of the bandwidth of a copy", rows.shares),
        ("spmv_columns_cuda", "the same matrices by 16 columns", rows.milliseconds),
        ("spmv_uneven_cuda", "`A @ x` on rows of different lengths, 3 x 3 float64", rows.relative),
    ],
    "others": [
        ("convert_cuda", "conversions, 1,000,000 blocks of 3 x 3 float64", rows.conversions),
        ("matmul_cpu", "products on two cores of a CPU", rows.by_peer),
    ],
    "sparse": [
        ("spgemm_blocks_cuda", "`A @ A`, random blocks", rows.sparse_products),
        ("spgemm_mesh_cuda", "`A @ A`, a mesh", rows.mesh_products),
        ("sddmm_table_cuda", "`bg.sddmm`: 8192 x 8192 x 8192 in float16, 4096 in wider floats", rows.sampled),
    ],
    "solver": [
        ("elasticity_cuda", "linear elasticity by CG with a V-cycle of smoothed aggregation, to 1e-8", rows.solvers)
    ],
    "llama": [("llama_cuda", "a model of the shape of Llama 3.1 8B, random weights", rows.llama)],
}


def heading(machines: Sequence[dict[str, Any]]) -> str:
    """Card, date and versions of some runs in a line."""

    def every(key: str) -> str:
        return " / ".join(dict.fromkeys(str(m[key]) for m in machines if key in m))

    def driver(number: str) -> str:
        return f"{int(number) // 1000}.{int(number) % 1000 // 10}" if number.isdigit() else number

    parts = [every("card"), every("date"), f"bsrgemm {every('bsrgemm')}", f"CuPy {every('cupy')}"]
    parts += [f"NVRTC {every('nvrtc')}", f"driver for CUDA {driver(every('driver'))}"]
    found: dict[str, dict[str, None]] = {}
    for about in machines:
        for name, version in about.get("peers", {}).items():
            found.setdefault(re.sub(r"^nvidia-|-cu\d+$", "", name), {})[version] = None
    parts += [f"{name} {' / '.join(versions)}" for name, versions in found.items()]
    return ", ".join(part for part in parts if part.strip() and not part.endswith(" ")) + "."


def section(
    group: list[tuple[str, str, Callable[[list[rows.Row]], str]]], results: Path, most: int | None = None
) -> str:
    """What stands between the markers of some tables, of which at most so many rows are shown."""
    machines, parts = [], []
    for name, what, render in group:
        path = results / f"{name}.json"
        title = f"**{what[0].upper()}{what[1:]}**"
        if not path.is_file():
            parts.append(f"{title}: {NOT_YET} (`bench/results/{name}.json`).")
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        machines.append(found["machine"])
        cut = f" (cut short: {found['cut']})" if "cut" in found else ""
        cut += f" ({found['note']})" if "note" in found else ""
        parts.append(f"{title}{cut}\n\n{render(found['rows'][:most]) if found['rows'] else NOT_YET}")
    return "\n\n".join([heading(machines), *parts] if machines else parts)


def markers(marker: str) -> tuple[str, str]:
    return f"<!-- results:{marker} -->", f"<!-- /results:{marker} -->"


def filled(text: str, results: Path) -> tuple[str, list[str]]:
    """A README with the tables of these results, and the markers that it lacks."""
    missing = []
    for name, group in GROUPS.items():
        found = False
        for marker, shown, most in ((name, group, None), (f"{name}:head", group[:1], HEAD)):
            first, last = markers(marker)
            if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
                continue
            found = True
            before, rest = text.split(first)
            text = f"{before}{first}\n\n{section(shown, results, most)}\n\n{last}{rest.split(last)[1]}"
        if not found:
            missing.append(name)
    return text, missing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if README and results differ")
    parser.add_argument("--readme", type=Path, nargs="+", default=FILES, metavar="FILE")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", metavar="FOLDER")
    options = parser.parse_args(argv)
    return max(update(path, options.results, options.check) for path in options.readme)


def update(path: Path, results: Path, check: bool) -> int:
    """Rewrite one file, or look at it; the exit status."""
    old = path.read_text(encoding="utf-8")
    new, missing = filled(old, results)
    if len(missing) == len(GROUPS):
        print(f"{path.name} has no markers {markers('gemm')[0]} ... {markers('gemm')[1]}", file=sys.stderr)
        return 1
    if new == old:
        print(f"{path.name} agrees with the results")
        return 0
    if check:
        print(f"{path.name} and the results differ: run python bench/tables.py", file=sys.stderr)
        return 1
    path.write_text(new, encoding="utf-8")
    print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
