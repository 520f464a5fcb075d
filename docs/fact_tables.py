"""Where the facts on the pages come from, and the tables that are made of them, for facts.py."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bsrgemm._benchmark.show.contents import marked_rows
from bsrgemm._benchmark.show.markdown import FOOTNOTE, MARK, marked

ROOT = Path(__file__).resolve().parents[1]


# ------------------------------------------------------------------------------------------ sources
@cache
def results(name: str) -> list[dict[str, Any]]:
    """The rows of a file in bench/results; those that were measured with other code are marked as stale."""
    path = ROOT / "bench" / "results" / f"{name}.json"
    return marked_rows(json.loads(path.read_text(encoding="utf-8")))


def row(name: str, **wanted: Any) -> dict[str, Any]:
    """The first row of a file that has these values."""
    return next(r for r in results(name) if all(r.get(key) == value for key, value in wanted.items()))


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


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def ms(seconds: float) -> str:
    """Milliseconds with three significant digits."""
    value = seconds * 1e3
    return f"{value:#.3g}".removesuffix(".") if value < 999.5 else f"{value:,.0f}"


def table(header: Sequence[str], lines: Iterable[Sequence[Any]], text: int = 1) -> str:
    """A Markdown table whose first `text` columns are text and whose others are numbers, and what its marks mean."""
    ruler = ["---"] * text + ["---:"] * (len(header) - text)
    made = "\n".join(f"| {' | '.join(map(str, line))} |" for line in [header, ruler, *lines])
    return f"{made}\n\n{FOOTNOTE}" if MARK in made else made


# ------------------------------------------------------------------------------------------- tables
def crossover() -> str:
    lines = []
    for found in results("gemm_density_cuda"):
        if "crossover" in found:
            below = "every density" if found["crossover"] is None else f"{found['crossover']:.2f}"
            lines.append((f"{found['block']} x {found['block']}", marked(found, below)))
    return table(["block", "faster than dense cuBLAS below density"], lines)


def cpu() -> str:
    lines = []
    for found in results("matmul_cpu"):
        name, best = min(found["peers"].items(), key=lambda pair: pair[1])
        width = "a vector" if found["columns"] == 1 else f"{found['columns']} columns"
        what = f"{found['dtype']}, blocks {found['block']} x {found['block']}, {width}"
        ours = marked(found, ms(found["seconds"]))
        lines.append((what, ours, f"{name} {ms(best)}", f"{best / found['seconds']:.1f}"))
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
        times = (marked(found, ms(found["seconds"])) for found in (whole, alone))
        lines.append((what, *times, f"{share:.0%}"))
    return table(["`A @ A`", "whole call, ms", "with a plan, ms", "share of finding blocks"], lines)


def uneven() -> str:
    lines = [(r["what"], marked(r, f"{r['relative']:.2f}")) for r in results("spmv_uneven_cuda")]
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
    calls = [(_PROBLEMS[r["kernel"]], marked(r, us(r["call_seconds"]))) for r in products if "call_seconds" in r]
    calls += [(r["what"], marked(r, us(r["seconds"]))) for r in results("attention_host_cuda") if "seconds" in r]
    return table(["call", "us"], calls)


_KIND = {("float32", "tf32"): "tf32"}


def product_errors() -> str:
    lines = []
    for found in results("gemm_error_cuda"):
        kind = _KIND.get((found["dtype"], found["precision"]), found["dtype"])
        what = f"{kind}, {found['block']} x {found['block']}"
        lines.append((what, marked(found, f"{found['error']:.1e}"), f"{found['dense_error']:.1e}"))
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
        lines.append((what, marked(found, f"{ours:.1e}"), f"{best:.1e} ({name})"))
    return table(["inputs", "bsrgemm", "best peer"], lines)


def first_call() -> str:
    times: dict[str, dict[str, str]] = {}
    for found in results("overhead_cuda"):
        for key in ("cold_seconds", "warm_seconds"):
            if key in found:
                times.setdefault(found["kernel"], {})[key] = marked(found, ms(found[key]))
    lines = [(_PROBLEMS[k], t["cold_seconds"], t["warm_seconds"]) for k, t in times.items()]
    return table(["first product of a process", "kernels not in the cache, ms", "kernels in the cache, ms"], lines)


_SHOWN = (0.05, 0.20, 0.50, 0.80)


def sizes() -> str:
    """Rates of square float16 blocks, and their time over that of dense cuBLAS by density."""
    lines = []
    for n in (128, 64, 32, 16):
        table_row = row("gemm_table_cuda", dtype="float16", block=[n, n])
        own = [r for r in results("gemm_density_cuda") if r.get("block") == n]
        points = [r for r in own if "ratio" in r]
        near = [min(points, key=lambda r, d=density: abs(r["density"] - d)) for density in _SHOWN]
        end = next(r["crossover"] for r in own if "crossover" in r)
        below = "every density" if end is None else f"{end:.2f}"
        rate = marked(table_row, f"{table_row['tflops']:.0f}")
        lines.append((f"{n} x {n}", rate, *(marked(r, f"{r['ratio']:.2f}") for r in near), below))
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
        lines.append((name, marked(found, f"{found['tflops']:,.0f}"), dense))
    return table(["other dtypes", "TFLOP/s", "dense cuBLAS"], lines)


def rectangles() -> str:
    lines = []
    for block in ([256, 128], [128, 64], [96, 96], [48, 80]):
        found = row("gemm_table_cuda", dtype="float16", block=block)
        largest = next(n for n in (128, 64, 160, 96, 80, 48, 32, 16) if block[0] % n == 0)
        lines.append((f"{block[0]} x {block[1]}", largest, marked(found, f"{found['tflops']:.0f}")))
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
            marked(found, f"{found['make_seconds'] * 1e3:.2f}"),
            marked(found, f"{found['list_seconds'] * 1e3:.2f}"),
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
            marked(found, f"{found['seconds'] * 1e3:.2f}"),
            marked(found, f"{found['tflops']:.0f}"),
            f"{found['mask_bytes'] / 1e6:.2f}",
            f"{found['peak_bytes'] / 1e6:.2f}",
            f"{found['speed_up']['ours']:.1f}, {found['speed_up']['cuDNN']:.1f}",
        )
        for found in results("attention_long_cuda")
        if "speed_up" in found
    ]
    header = ["tokens", "mask", "ms", "TFLOP/s", "mask, MB", "first call, MB", "faster than dense causal: ours, cuDNN"]
    return table(header, lines, text=2)


def gradient_rates() -> str:
    """Rates of the gradients of attention beside the peers of the same run."""
    peers = ("FA4", "FA4, deterministic", "cuDNN", "cuDNN BSA", "flash2")
    lines = []
    for found in results("attention_backward_cuda"):
        rates = found["rates"]
        theirs = [f"{rates[peer]:.0f}" if peer in rates else "-" for peer in peers]
        ours = [marked(found, f"{rates[name]:.0f}") for name in ("bsrgemm", "bsrgemm, any order")]
        lines.append((found["case"].replace(" .", " 0."), *ours, *theirs))
    header = ["TFLOP/s", "bsrgemm", "`deterministic=False`", "FlashAttention-4", "the same, deterministic", "cuDNN",
              "cuDNN's block-sparse", "FlashAttention-2"]  # fmt: skip
    return table(header, lines)


def dask_disk() -> str:
    """Products of matrices on disk that are larger than the memory allowed."""
    lines = []
    for found in results("dask_cpu"):
        if found["what"] != "task":
            size, seconds = found["matrix_mib"], found["seconds"]
            sizes = (f"{found[key]:,.0f}" for key in ("matrix_mib", "memory_mib", "peak_mib"))
            lines.append((found["what"], *sizes, f"{seconds:.1f}", f"{size / seconds:.0f}"))
    return table(["scheduler", "matrix, MiB", "memory allowed, MiB", "most taken, MiB", "s", "MiB/s"], lines)


def dask_tasks() -> str:
    """What Dask adds to a product of small panels."""
    lines = []
    for found in results("dask_cpu"):
        if found["what"] == "task" and "each" in found:
            lines.append((found["scheduler"], f"{found['seconds'] * 1e3:.1f}", f"{found['each'] * 1e3:.2f}"))
    return table(["scheduler", "a product of 4 panels, ms", "each further panel, ms"], lines)


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


def _ring(what: str) -> list[dict[str, Any]]:
    """The rows of one kind from the benchmark of attention over several ranks."""
    return [r for r in results("scale_ring_cpu") if r["what"] == what]


def ring_measured() -> str:
    lines = []
    for found in _ring("attention"):
        times: list[str] = []
        for way in ("forward", "backward"):
            predicted = found[f"model_{way}"]
            error = "-" if predicted is None else f"{predicted / found[way] - 1:+.0%}"
            travel = ms(found[f"travel_{way}"]) if found["ranks"] > 1 else "-"
            times += [ms(found[way]), "-" if predicted is None else ms(predicted), error, travel]
        what = (found["rule"], f"{found['tokens']:,}", found["ranks"], f"{found['sent_bytes']:,}")
        lines.append((*what, *times, f"{found['error']:.0e}"))
    columns = ["model, ms", "error", "messages, ms"]
    header = ["", "tokens", "ranks", "sent, bytes", "forward, ms", *columns, "backward, ms", *columns, "difference"]
    return table(header, lines)


def ring_paper() -> str:
    lines = []
    for found in _ring("on paper"):
        rule = "causal" if found["left"] is None else f"window of {found['left']:,}"
        times = (ms(found[key]) for key in ("step", "travel", "forward", "backward"))
        speed = f"{found['alone'] / found['forward']:.1f}"
        lines.append((rule, found["link"], f"{found['step_bytes'] / 1e6:.0f}", *times, speed))
    header = ["", "messages by", "keys of a step, MB", "a step, ms", "its keys, ms", "forward, ms", "backward, ms",
              "times one card"]  # fmt: skip
    return table(header, lines, text=2)


TABLES: dict[str, Callable[[], str]] = {
    "gradient-rates": gradient_rates,
    "ring-measured": ring_measured,
    "ring-paper": ring_paper,
    "scale-products": scale_products,
    "scale-solvers": scale_solvers,
    "scale-model": scale_model,
    "scale-paper": scale_paper,
    "dask-disk": dask_disk,
    "dask-tasks": dask_tasks,
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
    "scripts": scripts,
}
