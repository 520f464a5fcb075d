"""The facts on the pages that a program can know: tables between markers, and values inside sentences.

``python docs/facts.py`` writes them into the pages; ``--check`` writes nothing and exits with 1 where a page differs.
A table stands between ``<!-- facts:NAME -->`` and ``<!-- /facts:NAME -->``. A sentence is a template in which ``{}``
stands for a value; wherever its words stand on its page, the values have to be those that the function returns.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
Values = Callable[[], tuple[Any, ...]]


# ------------------------------------------------------------------------------------------ sources
@cache
def results(name: str) -> list[dict[str, Any]]:
    """The rows of a file in bench/results."""
    path = ROOT / "bench" / "results" / f"{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def row(name: str, **wanted: Any) -> dict[str, Any]:
    """The first row of a file that has these values."""
    return next(r for r in results(name) if all(r.get(key) == value for key, value in wanted.items()))


@cache
def record() -> dict[str, Any]:
    """The record of the last GPU run."""
    found: dict[str, Any] = json.loads((ROOT / "tests" / "record" / "gpu_record.json").read_text(encoding="utf-8"))
    return found


@cache
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


@cache
def module_constants(path: Path) -> dict[str, Any]:
    """The numbers, texts and tuples of them that a module assigns to names at its top level."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign) or any(isinstance(x, ast.Name | ast.Call) for x in ast.walk(node.value)):
            continue
        value = eval(compile(ast.Expression(node.value), str(path), "eval"), {"__builtins__": {}})
        for target in node.targets:
            if isinstance(target, ast.Tuple):
                found |= {name.id: x for name, x in zip(target.elts, value, strict=True) if isinstance(name, ast.Name)}
            elif isinstance(target, ast.Name):
                found[target.id] = value
    return found


def constants(*names: str) -> tuple[Any, ...]:
    """The values of names that one module of the package has, wherever it is."""
    modules = [module_constants(path) for path in sorted((ROOT / "bsrgemm").rglob("*.py"))]
    (found,) = {tuple(module[name] for name in names) for module in modules if all(name in module for name in names)}
    return found


_ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\(')


@cache
def kernels() -> dict[str, set[str]]:
    """The kernels, one for each .cu file, and the functions of each that can be launched."""
    files = sorted((ROOT / "cuda").glob("*.cu"))
    texts = {path.stem: re.sub(r"//.*", "", path.read_text(encoding="utf-8")) for path in files}
    return {kernel: set(_ENTRY.findall(text)) for kernel, text in texts.items()}


def launched(run: dict[str, Any]) -> int:
    """How many kernels a sanitizer saw, by the names of files or of all their functions."""
    names = {kernel if isinstance(kernel, str) else kernel[0] for kernel in run["kernels"]}
    return sum(kernel in names or entries <= names for kernel, entries in kernels().items())


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def ms(seconds: float) -> str:
    """Milliseconds with three significant digits."""
    value = seconds * 1e3
    return f"{value:#.3g}".removesuffix(".") if value < 999.5 else f"{value:,.0f}"


def table(header: Sequence[str], lines: Iterable[Sequence[Any]], text: int = 1) -> str:
    """A Markdown table whose first `text` columns are text and whose others are numbers."""
    ruler = ["---"] * text + ["---:"] * (len(header) - text)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [header, ruler, *lines])


# ------------------------------------------------------------------------------------------- tables
def sanitizers() -> str:
    lines = []
    for tool in ("memcheck", "racecheck"):
        run = record()["sanitizer"].get(tool)
        if run is None:
            lines.append((f"`{tool}`", "no whole run is recorded", "-", "-"))
        else:
            seen = f"{launched(run)} of {len(kernels())}"
            lines.append((f"`{tool}`", run["passed"], seen, run["errors"] + run["failed"]))
    return table(["tool", "tests passed", "kernels launched", "errors"], lines)


@cache
def versions(name: str) -> dict[str, Any]:
    """What was found with other versions of the packages that bsrgemm stands on, by a script in tests/versions."""
    found: dict[str, Any] = json.loads((ROOT / "tests" / "versions" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def pythons() -> str:
    lines = []
    for found in versions("python")["rows"]:
        used = (found["versions"][name] for name in ("numpy", "scipy", "ml_dtypes", "cupy-cuda12x"))
        lines.append((found["python"], *used, f"{found['passed']:,}", found["failed"]))
    return table(["Python", "NumPy", "SciPy", "ml_dtypes", "CuPy", "tests passed", "failed"], lines, text=5)


_SETS = {"default": "default set", "span": "every kernel, every value of its constants"}


def nvrtc() -> str:
    lines = []
    for found in versions("nvrtc")["rows"]:
        what = (found["nvrtc"], found["arch"], _SETS[found["set"]])
        if found.get("unknown"):
            lines.append((*what, "not a target of this version", "-", "-"))
        else:
            compiled = f"{found['compiled']} of {found['kernels']}"
            lines.append((*what, compiled, len(found["spills"]), len(found["warnings"])))
    return table(["NVRTC", "target", "kernels", "compiled", "that spill", "with a warning"], lines, text=3)


def crossover() -> str:
    lines = []
    for found in results("gemm_density_cuda"):
        if "crossover" in found:
            below = "every density" if found["crossover"] is None else f"{found['crossover']:.2f}"
            lines.append((f"{found['block']} x {found['block']}", below))
    return table(["block", "faster than dense cuBLAS below density"], lines)


def cpu() -> str:
    lines = []
    for found in results("matmul_cpu"):
        name, best = min(found["peers"].items(), key=lambda pair: pair[1])
        width = "a vector" if found["columns"] == 1 else f"{found['columns']} columns"
        what = f"{found['dtype']}, blocks {found['block']} x {found['block']}, {width}"
        lines.append((what, ms(found["seconds"]), f"{name} {ms(best)}", f"{best / found['seconds']:.1f}"))
    return table(["product", "bsrgemm, ms", "fastest peer, ms", "times faster"], lines)


def spgemm() -> str:
    lines = []
    rows = results("spgemm_blocks_cuda")
    for whole in (r for r in rows if r["what"] == "A @ A"):
        alone = next(
            r for r in rows if r["what"] == "products alone" and (r["n"], r["block"]) == (whole["n"], whole["block"])
        )
        R, C = whole["block"]
        share = 1 - alone["seconds"] / whole["seconds"]
        what = f"n = {whole['n']:,}, float16 blocks {R} x {C}, density {whole['density']}"
        lines.append((what, ms(whole["seconds"]), ms(alone["seconds"]), f"{share:.0%}"))
    return table(["`A @ A`", "whole call, ms", "with a plan, ms", "share of finding blocks"], lines)


def uneven() -> str:
    lines = [(r["what"], f"{r['relative']:.2f}") for r in results("spmv_uneven_cuda")]
    return table(["`A @ x`, 3 x 3 float64", "rate relative to rows of equal length"], lines)


#: The problem that bench times for each kernel.
_PROBLEMS = {
    "spmv": "`A @ x`, blocks 3 x 3, float32",
    "gemm_simt": "`A @ B`, blocks 3 x 3, float32",
    "gemm_sm80": "`A @ B`, blocks 32 x 32, float32",
    "gemm_sm90": "`A @ B`, blocks 64 x 64, float16",
}


def host() -> str:
    products = results("overhead_cuda")
    calls = [(_PROBLEMS[r["kernel"]], us(r["call_seconds"])) for r in products if "call_seconds" in r]
    calls += [(r["what"], us(r["seconds"])) for r in results("attention_host_cuda") if "seconds" in r]
    return table(["call", "us"], calls)


_KIND = {("float32", "tf32"): "tf32"}


def product_errors() -> str:
    lines = []
    for found in results("gemm_error_cuda"):
        kind = _KIND.get((found["dtype"], found["precision"]), found["dtype"])
        what = f"{kind}, {found['block']} x {found['block']}"
        lines.append((what, f"{found['error']:.1e}", f"{found['dense_error']:.1e}"))
    return table(["product", "bsrgemm", "dense cuBLAS"], lines)


_INPUTS = {
    "plain": "normal numbers",
    "rising ramp": "scores that rise from 0 to 30",
    "one huge key": "one huge key",
    "scores to 1e4": "scores from -1e4 to 1e4",
    "constant rows": "constant rows",
}


def attention_errors() -> str:
    lines = []
    for found in results("attention_accuracy_cuda"):
        errors = {name: about["error"] for name, about in found["errors"].items() if about.get("error") is not None}
        ours = errors.pop("bsrgemm")
        name, best = min(errors.items(), key=lambda pair: pair[1])
        what = f"{_INPUTS[found['inputs']]}, {found['dtype']}"
        lines.append((what, f"{ours:.1e}", f"{best:.1e} ({name})"))
    return table(["inputs", "bsrgemm", "best peer"], lines)


def first_call() -> str:
    times: dict[str, dict[str, float]] = {}
    for found in results("overhead_cuda"):
        for key in ("cold_seconds", "warm_seconds"):
            if key in found:
                times.setdefault(found["kernel"], {})[key] = found[key]
    lines = [(_PROBLEMS[k], ms(t["cold_seconds"]), ms(t["warm_seconds"])) for k, t in times.items()]
    return table(["first product of a process", "kernels not in the cache, ms", "kernels in the cache, ms"], lines)


_SHOWN = (0.05, 0.20, 0.50, 0.80)


def sizes() -> str:
    """Rates of square float16 blocks, and their time over that of dense cuBLAS by density."""
    lines = []
    for n in (128, 64, 32, 16):
        rate = row("gemm_table_cuda", dtype="float16", block=[n, n])["tflops"]
        own = [r for r in results("gemm_density_cuda") if r.get("block") == n]
        points = [r for r in own if "ratio" in r]
        near = [min(points, key=lambda r, d=density: abs(r["density"] - d))["ratio"] for density in _SHOWN]
        end = next(r["crossover"] for r in own if "crossover" in r)
        below = "every density" if end is None else f"{end:.2f}"
        lines.append((f"{n} x {n}", f"{rate:.0f}", *(f"{x:.2f}" for x in near), below))
    first, *others = (f"{d:.2f}" for d in _SHOWN)
    header = ["block", "TFLOP/s", f"time over dense at density {first}", *others, "faster than dense below"]
    return table(header, lines)


def other_dtypes() -> str:
    lines = []
    for dtype, precision, n, name in (
        ("bfloat16", None, 64, "bfloat16, 64 x 64"),
        ("e4m3", None, 128, "fp8 e4m3, 128 x 128"),
        ("float32", None, 32, "float32, 32 x 32"),
        ("float32", "tf32", 32, "tf32, 32 x 32"),
        ("float64", None, 32, "float64, 32 x 32, n = 4096"),
    ):
        found = row("gemm_table_cuda", dtype=dtype, precision=precision, block=[n, n])
        dense = f"{found['dense_tflops']:.0f}" + (" in float16" if dtype == "e4m3" else "")
        lines.append((name, f"{found['tflops']:,.0f}".replace(",", ""), dense))
    return table(["other dtypes", "TFLOP/s", "dense cuBLAS"], lines)


def rectangles() -> str:
    lines = []
    for block in ([256, 128], [128, 64], [96, 96], [48, 80]):
        found = row("gemm_table_cuda", dtype="float16", block=block)
        largest = next(n for n in (128, 64, 32, 16) if block[0] % n == 0)
        lines.append((f"{block[0]} x {block[1]}", largest, f"{found['tflops']:.0f}"))
    return table(["block", "rows that count", "TFLOP/s"], lines)


def runs() -> str:
    """The files of results, by the day and the card of their run."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))["machine"]
        place = about.get("card") or f"a CPU with {about['cores']} cores"
        found.setdefault((about["date"], place), []).append(f"`{path.stem}`")
    lines = [(day, place, ", ".join(names)) for (day, place), names in sorted(found.items())]
    return table(["date", "machine", "files in bench/results"], lines, text=3)


def scripts() -> str:
    """The scripts that measure, and the first lines of their docstrings."""
    folder = ROOT / "bench" / "run"
    if not folder.is_dir():
        folder = folder.parent
    lines = []
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.stem not in ("tables", "pictures") and "__main__" in ast.dump(tree):
            lines.append((f"`{path.name}`", (ast.get_docstring(tree) or "").splitlines()[0].replace("|", "\\|")))
    return table(["script", "measures"], lines, text=2)


#: dtype, R, C and columns of a product
_CHOICES = (
    ("float16", 64, 64, 256),
    ("float16", 64, 64, 8),
    ("float16", 24, 16, 256),
    ("float32", 32, 8, 256),
    ("float64", 3, 3, 1),
    ("float64", 3, 3, 16),
    ("float64", 20, 20, 1),
)


def kernel_choices() -> str:
    from bsrgemm._products import heuristics

    def kernel(arch: str, name: str, R: int, C: int, columns: int) -> str:
        short = {"float16": "f16", "float32": "f32", "float64": "f64"}[name]
        types = heuristics.Types(short, short, short, "f32" if name == "float16" else short)
        problem = heuristics.Problem(arch, types, R, C, columns, 1, 64, 64, 900, False, "C", "C", True, True)
        return f"`{heuristics.gemm(problem).spec().entry}`"

    lines = [
        (name, f"{R} x {C}", columns, *(kernel(arch, name, R, C, columns) for arch in ("sm_90a", "sm_80", "sm_75")))
        for name, R, C, columns in _CHOICES
    ]
    header = ["dtype", "block", "columns of B", "Hopper (9.0)", "Ampere (8.0)", "Turing (7.5)"]
    return table(header, lines, text=len(header))


def mask_costs() -> str:
    lines = [
        (
            found["what"].replace(" | ", " or "),
            f"{found['make_seconds'] * 1e3:.2f}",
            f"{found['list_seconds'] * 1e3:.2f}",
            f"{found['nbytes']:,}",
        )
        for found in results("attention_host_cuda")
        if "nbytes" in found
    ]
    return table(["mask", "made, ms", "listed, ms", "bytes"], lines)


def long_sequences() -> str:
    lines = [
        (
            f"{found['length']:,}",
            found["mask"],
            f"{found['seconds'] * 1e3:.2f}",
            f"{found['tflops']:.0f}",
            f"{found['mask_bytes'] / 1e6:.2f}",
            f"{found['peak_bytes'] / 1e6:.2f}",
            f"{found['speed_up']['ours']:.1f}, {found['speed_up']['cuDNN']:.1f}",
        )
        for found in results("attention_long_cuda")
        if "speed_up" in found
    ]
    header = ["tokens", "mask", "ms", "TFLOP/s", "mask, MB", "first call, MB", "faster than dense causal: ours, cuDNN"]
    return table(header, lines, text=2)


def _scale(what: str, **wanted: Any) -> list[dict[str, Any]]:
    """The rows of one kind from the benchmark of several ranks."""
    rows = results("scale_mpi_cpu")
    return [r for r in rows if r["what"] == what and all(r.get(key) == value for key, value in wanted.items())]


def _scale_name(found: dict[str, Any]) -> str:
    kind = {"bands": "five bands", "cube": "elasticity"}[found["matrix"]]
    columns = f", {found['columns']} columns" if found["columns"] > 1 else ""
    return f"{kind}, {found['block_rows']:,} block rows{columns}"


def scale_products() -> str:
    lines = []
    for found in _scale("product", timed=True, ranks=2):
        above = us(found["seconds"] - found["local"])
        halo = f"{found['halo_bytes']:,}", f"{found['halo_bytes'] / found['least_bytes']:.2f}"
        times = us(found["seconds"]), us(found["local"]), above
        shares = us(found["exchange"]), f"{found['hidden']:.0%}", f"{found['slow_hidden']:.0%}"
        lines.append((_scale_name(found), *times, *halo, *shares))
    header = ["2 ranks", "`D @ x`, us", "its panel alone, us", "above it, us", "halo, bytes", "over the least",
              "halo alone, us", "hidden", "slow messages, hidden"]  # fmt: skip
    return table(header, lines)


def scale_solvers() -> str:
    lines = []
    for found in _scale("cg"):
        name = f"{found['preconditioner']}, {found['unknowns']:,} unknowns"
        again = "yes" if found["repeats"] else "no"
        error = f"{found['difference']:.0e}"
        lines.append((name, found["ranks"], found["iterations"], found["iterations_of_one"], error, again))
    header = ["CG to 1e-8", "ranks", "iterations", "of one process", "difference of x", "same bits again"]
    return table(header, lines)


def scale_model() -> str:
    lines = []
    rows = [r for r in _scale("product", timed=True, columns=1) if "predicted" in r]
    largest = max(r["panel_bytes"] for r in rows if r["ranks"] == 1)
    smallest = min(r["panel_bytes"] for r in rows if r["ranks"] == 1)
    for found in rows:
        fitted = found["ranks"] == 1 and found["panel_bytes"] in (smallest, largest)
        error = "fitted" if fitted else f"{found['predicted'] / found['seconds'] - 1:+.0%}"
        lines.append((_scale_name(found), found["ranks"], us(found["seconds"]), us(found["predicted"]), error))
    return table(["`D @ x`", "ranks", "measured, us", "model, us", "error"], lines)


def scale_paper() -> str:
    lines = []
    for found in _scale("on paper"):
        times = (ms(found[key]) for key in ("local", "halo", "product", "iteration"))
        lines.append((found["link"], f"{found['halo_bytes'] / 1e6:.0f}", *times))
    header = ["messages by", "halo, MB", "panel, ms", "halo, ms", "`D @ x`, ms", "iteration of CG, ms"]
    return table(header, lines)


TABLES: dict[str, Callable[[], str]] = {
    "scale-products": scale_products,
    "scale-solvers": scale_solvers,
    "scale-model": scale_model,
    "scale-paper": scale_paper,
    "sanitizers": sanitizers,
    "crossover": crossover,
    "cpu": cpu,
    "spgemm": spgemm,
    "uneven": uneven,
    "host": host,
    "product-errors": product_errors,
    "attention-errors": attention_errors,
    "first-call": first_call,
    "sizes": sizes,
    "other-dtypes": other_dtypes,
    "rectangles": rectangles,
    "kernel-choices": kernel_choices,
    "mask-costs": mask_costs,
    "long-sequences": long_sequences,
    "runs": runs,
    "pythons": pythons,
    "nvrtc": nvrtc,
    "scripts": scripts,
}


# ---------------------------------------------------------------------------------------- sentences
@dataclass(frozen=True)
class Fact:
    """A sentence with values: where it stands, its words, and what the values are."""

    page: str
    words: str
    values: Values

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the sentence, with any blanks between words and any number or word for a value."""
        parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in self.words.split("{}")]
        return re.compile(r"([\w.,^/-]*\w)".join(parts))


def python_version() -> tuple[str, ...]:
    return (str(project()["requires-python"]).removeprefix(">="),)


def cupy_version() -> str:
    (version,) = {
        re.sub(r".*>=", "", extra[0])
        for name, extra in project()["optional-dependencies"].items()
        if name.startswith("cuda")
    }
    return version


def capability() -> str:
    """The oldest compute capability that kernels are compiled for."""
    from bsrgemm._kernels import jit

    for number in range(50, 100):
        try:
            jit.target(number, range(50, 100))
        except RuntimeError:
            continue
        return f"{number // 10}.{number % 10}"
    raise AssertionError("no target")


def gpu_suite() -> tuple[str, str]:
    found = record()["suite"]
    assert not record()["partial"]
    return f"{found['passed']:,}", f"{found['failed']:,}"


def bounds_of_blocks() -> tuple[Any, ...]:
    return constants("_LEAST_BLOCK", "_MOST_BLOCK")


def bounds_of_pages() -> tuple[Any, ...]:
    return constants("_LEAST_PAGE", "_MOST_PAGE")


def most_queries() -> tuple[Any, ...]:
    return constants("_MOST_QUERIES")


def power(n: int) -> str:
    assert n & (n - 1) == 0
    return f"2^{n.bit_length() - 1}"


def most_tokens() -> tuple[str, ...]:
    return tuple(power(n) for n in constants("_MOST_CAPACITY", "_MOST_ROWS"))


def timings() -> tuple[Any, ...]:
    budget, least, most = constants("_BUDGET", "_LEAST", "_MOST")
    return least, most, budget


def flushed() -> tuple[int]:
    return (constants("_FLUSH_BYTES")[0] >> 20,)


def percent(value: float) -> str:
    return f"{100 * value:g}"


def products_of_a_row() -> tuple[str]:
    """The most products in a row of A @ A2 whose hash table fits the shared memory of an H200."""
    from bsrgemm._products import spgemm_pattern

    room = 227 << 10  # bytes of shared memory that a CTA can have there

    def fits(columns: int) -> bool:
        slots, listed = spgemm_pattern._table(columns)
        return 4 * (2 * slots + listed) <= room

    return (f"{next(n for n in range(1, 1 << 20) if not fits(n + 1)):,}",)


def fp8() -> tuple[str, str]:
    """The largest fp8 number, and the smallest above 0."""
    import ml_dtypes

    about = ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)
    smallest = float(about.smallest_subnormal)
    assert smallest == 2.0**-9
    return f"{float(about.max):g}", "2^-9"


def fp8_rounding() -> tuple[str]:
    """The largest relative change by rounding to fp8, as a fraction."""
    import ml_dtypes
    import numpy as np

    numbers = np.arange(0x08, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # from 2^-6 on
    middles = (numbers[1:] + numbers[:-1]) / 2
    return (f"1/{1 / ((numbers[1:] - numbers[:-1]) / 2 / middles).max():.0f}",)


def tf32_rounding() -> tuple[str]:
    """The largest error of a factor that the kernels round to tf32, in units of its last place."""
    import numpy as np

    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cuda").rglob("*.cuh"))
    (factor,) = re.findall(r"\* \(1 \+ ([\d.]+)f / 2048\)", text)
    x = np.arange(0x3F800000, 0x40000000, 7, dtype=np.uint32).view(np.float32)  # from 1 to 2
    rounded = x * (np.float32(1) + np.float32(factor) / np.float32(2048))
    cut = (rounded.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32)
    units = (abs(cut.astype(np.float64) - x) / np.where(cut < 2, 2.0**-10, 2.0**-9)).max()
    return (f"{np.ceil(100 * units) / 100:.2f}",)


def rates_by_columns() -> tuple[str, ...]:
    """The rate with 1024 columns, and the best one, for blocks 64 x 64."""
    rows = {r["columns"]: r["tflops"] for r in results("gemm_columns_cuda") if r["block"] == 64}
    return f"{rows[1024]:.0f}", f"{max(rows.values()):.0f}"


def small_problem() -> tuple[str, ...]:
    small = row("gemm_size_cuda", n=4096, block=[128, 128])
    large = row("gemm_table_cuda", n=8192, block=[128, 128], dtype="float16")
    return (
        f"{small['tflops']:.0f}",
        f"{small['dense_tflops']:.0f}",
        f"{small['density'] / small['ratio']:.2f}",
        f"{large['density'] / large['ratio']:.2f}",
    )


def host_range() -> tuple[str, str]:
    times = [r["call_seconds"] * 1e6 for r in results("overhead_cuda") if "call_seconds" in r]
    return f"{min(times):.0f}", f"{max(times):.0f}"


def work_lists() -> tuple[str, str]:
    times = [r["prepare_seconds"] * 1e3 for r in results("overhead_cuda") if "prepare_seconds" in r]
    return f"{min(times):.1f}", f"{max(times):.1f}"


def first_ratio(a: int, b: int) -> str:
    rates = [row("gemm_table_cuda", dtype="float16", block=[n, n])["tflops"] for n in (a, b)]
    return f"{rates[0] / rates[1]:.2f}"


def square_rates() -> tuple[str, ...]:
    rows = [row("gemm_table_cuda", dtype="float16", block=[n, n]) for n in (128, 64, 32, 16)]
    return *(f"{r['tflops']:.0f}" for r in rows), f"{rows[0]['dense_tflops']:.0f}"


def attention_calls() -> tuple[str, ...]:
    kinds = ("attention, causal", "attention, window", "attention, mask", "attention, mask of 64-blocks")
    return tuple(us(row("attention_host_cuda", what=kind)["seconds"]) for kind in kinds)


def dense_causal() -> tuple[str, ...]:
    seconds = next(r["seconds"] for r in results("attention_long_cuda") if isinstance(r["seconds"], dict))
    return tuple(f"{seconds[name] * 1e3:.1f}" for name in ("ours", "cuDNN"))


def attention_rate(mask: str) -> tuple[str]:
    """TFLOP/s of attention with 16 heads of 128 and 16,384 tokens, by its mask."""
    return (f"{row('attention_table_cuda', shape=[1, 16, 16384, 128], mask=mask, dtype='float16')['tflops']:.0f}",)


def decode_times() -> tuple[str, ...]:
    """Microseconds of a token that reads 128 blocks, and of one that reads all keys."""
    rows = [r for r in results("attention_decode_cuda") if (r["keys"], r["page"]) == (131072, None)]
    return tuple(f"{next(r['us'] for r in rows if r.get('blocks') == blocks):.1f}" for blocks in (128, None))


def density_fit() -> tuple[str, ...]:
    fit = next(r for r in results("attention_density_cuda") if "slope" in r)
    return f"{fit['slope']:.3f}", f"{fit['start_seconds'] * 1e6:.0f}"


def lowest_density() -> tuple[str, ...]:
    found = results("attention_density_cuda")[0]
    return f"{found['density']:.2f}", f"{found['ratio']:.2f}"


def power_law() -> tuple[str]:
    return (f"{next(r for r in results('gemm_patterns_cuda') if 'power-law' in r['what'])['relative']:.2f}",)


def small_blocks() -> tuple[str, ...]:
    vector = row("spmv_table_cuda", block=[3, 3], dtype="float64")
    many = row("spmv_columns_cuda", block=[3, 3], dtype="float64")
    peers = many["peers"]
    return ms(vector["seconds"]), *(
        f"{x * 1e3:.2f}" for x in (many["seconds"], peers["cuSPARSE BSR"], peers["cupyx csr"])
    )


def decode_on_a_gpu() -> tuple[Any, ...]:
    from bsrgemm.dtypes import HALF_DTYPES

    (dims,) = constants("HEAD_DIMS")
    return *HALF_DTYPES, *dims


def attention_dtypes() -> tuple[Any, ...]:
    """The dtypes that attention accepts, asked by calling it."""
    import numpy as np

    import bsrgemm as bg
    from bsrgemm.dtypes import HOST_DTYPES

    def accepted(dtype: Any) -> bool:
        x = np.zeros((1, 1, 1, 8), dtype)
        try:
            bg.attention(x, x, x)
        except (TypeError, ValueError):
            return False
        return True

    return tuple(dtype for dtype in HOST_DTYPES if accepted(dtype))


SENTENCES: list[Fact] = [
    Fact("README.md", "need Linux, CuPy {} and compute capability {} or newer", lambda: (cupy_version(), capability())),
    Fact("README.md", "{} GPU tests passed and {} failed in the last whole run", gpu_suite),
    Fact("docs/getting-started.md", "Python {} or newer", python_version),
    Fact(
        "docs/getting-started.md", "needs Linux, CuPy {} and compute capability {} or newer",
        lambda: (cupy_version(), capability()),
    ),
    Fact("docs/getting-started.md", "this took {} to {} ms for a million blocks", work_lists),
    Fact(
        "docs/limits.md", "needs Linux, CuPy {} or newer, NVRTC {} or newer, and compute capability {} or newer",
        lambda: (cupy_version(), ".".join(map(str, constants("OLDEST_NVRTC")[0])), capability()),
    ),
    Fact(
        "docs/limits.md", "whole run on a card was with Python {}, NumPy {} and SciPy {}",
        lambda: tuple(record()[name] for name in ("python", "numpy", "scipy")),
    ),
    Fact("docs/limits.md", "blocks are multiples of {}, up to {}", bounds_of_blocks),
    Fact("docs/limits.md", "A page has a power of two of tokens, from {} to {}", bounds_of_pages),
    Fact("docs/limits.md", "has 1 to {} queries in a call", most_queries),
    Fact("docs/limits.md", "has fewer than {} tokens; all heads and sequences together fewer than {}", most_tokens),
    Fact("docs/limits.md", "very many products (more than {} on an H200", products_of_a_row),
    Fact("docs/limits.md", "On the GPU: {} and {}, head dims {}, {}, {}, {}, {} and {}", decode_on_a_gpu),
    Fact("docs/limits.md", "q, k and v have one dtype: {}, {}, {}, {}, or fp8", attention_dtypes),
    Fact("docs/numerics.md", "the largest is {} and the smallest {}", fp8),
    Fact("docs/numerics.md", "changes a number by at most {} of it", fp8_rounding),
    Fact("docs/numerics.md", "round the weights to fp8, each by at most {}", fp8_rounding),
    Fact("docs/numerics.md", "within {} units of tf32's last place", tf32_rounding),
    Fact("docs/benchmarks.md", "CUDA events time {} to {} calls, as many as fit into {} s", timings),
    Fact("docs/benchmarks.md", "by reading {} MiB", flushed),
    Fact("docs/benchmarks.md", "idles {} s before each timing", lambda: constants("IDLE")),
    Fact("docs/benchmarks.md", "{} queries at the start", lambda: constants("_CHECKED")),
    Fact("docs/benchmarks.md", "and at least {} %", lambda: (percent(constants("_LEAST_NOISE")[0]),)),
    Fact("docs/benchmarks.md", "busiest unit if it is at {} % of its peak", lambda: constants("_BUSY")),
    Fact(
        "docs/benchmarks.md", "one group: {}, {}, {} or {}",
        lambda: constants("GROUPS")[0],
    ),
    Fact("docs/masks.md", "{} us of the host with `causal=True`, {} us with `window`", lambda: attention_calls()[:2]),
    Fact("docs/masks.md", "{} us with a mask, and {} us with a mask of 64-blocks", lambda: attention_calls()[2:]),
    Fact("docs/masks.md", "took {} ms, with cuDNN {} ms", dense_causal),
    Fact("docs/masks.md", "is {} x density x the time of dense attention, plus {} us", density_fit),
    Fact("docs/masks.md", "at {} it is {} times what the density says", lowest_density),
    Fact("docs/masks.md", "{} TFLOP/s with blocks of 128", lambda: attention_rate("26 of 128 blocks 128 per head")),
    Fact("docs/masks.md", "{} with blocks of 64. Attention", lambda: attention_rate("51 of 256 blocks 64")),
    Fact("docs/masks.md", "Attention without a mask runs at {} there", lambda: attention_rate("full")),
    Fact("docs/masks.md", "blocks of 64 took {} us, and {} us for all of them", decode_times),
    Fact("docs/masks.md", "sides are multiples of {} up to {}", bounds_of_blocks),
    Fact("docs/block-size.md", "128: {}, 64: {}, 32: {}, 16: {}", lambda: square_rates()[:4]),
    Fact("docs/block-size.md", "dense cuBLAS: {}", lambda: square_rates()[4:]),
    Fact("docs/block-size.md", "dense cuBLAS reaches {}", lambda: square_rates()[4:]),
    Fact("docs/block-size.md", "from 1024 columns on ({} of {} TFLOP/s)", rates_by_columns),
    Fact("docs/block-size.md", "the rate is {} against {} of dense: {} of dense's time", lambda: small_problem()[:3]),
    Fact("docs/block-size.md", "where n = 8192 takes {}", lambda: small_problem()[3:]),
    Fact("docs/block-size.md", "costs {} to {} us of the host", host_range),
    Fact("docs/block-size.md", "less than {} times against 64", lambda: (first_ratio(128, 64),)),
    Fact("docs/block-size.md", "less than {} times against 32", lambda: (first_ratio(64, 32),)),
    Fact("docs/block-size.md", "less than {} times against 16", lambda: (first_ratio(32, 16),)),
    Fact("docs/block-size.md", "a power-law pattern keeps {} of the rate", power_law),
    Fact("docs/block-size.md", "takes {} ms by a vector", lambda: small_blocks()[:1]),
    Fact("docs/block-size.md", "{} ms by 16 columns", lambda: small_blocks()[1:2]),
    Fact("docs/block-size.md", "where cuSPARSE takes {} ms and cupyx's CSR {} ms", lambda: small_blocks()[2:]),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- pages
def with_tables(text: str) -> str:
    """The text of a page with every table made anew; an unknown name is a KeyError."""

    def made(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- facts:{name} -->\n\n{TABLES[name]()}\n\n<!-- /facts:{name} -->"

    return re.sub(r"<!-- facts:(?P<name>[\w-]+) -->.*?<!-- /facts:(?P=name) -->", made, text, flags=re.DOTALL)


def with_values(text: str, facts: Iterable[Fact]) -> str:
    """The text of a page with the values of its sentences; ValueError if one is not there exactly once."""
    for fact in facts:
        found = list(fact.pattern.finditer(text))
        if len(found) != 1:
            raise ValueError(f"{fact.page}: {len(found)} times there: {fact.words}")
        values = [str(value) for value in fact.values()]
        for group in range(len(values), 0, -1):
            first, last = found[0].span(group)
            text = text[:first] + values[group - 1] + text[last:]
    return text


def corrected(page: Path) -> str:
    """The text that a page should have."""
    name = page.relative_to(ROOT).as_posix()
    return with_values(with_tables(page.read_text(encoding="utf-8")), [fact for fact in SENTENCES if fact.page == name])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page differs")
    check = parser.parse_args(argv).check
    status = 0
    for page in PAGES:
        new = corrected(page)
        if new != page.read_text(encoding="utf-8"):
            status = int(check)
            print(f"{'differs' if check else 'written'}: {page.relative_to(ROOT)}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
