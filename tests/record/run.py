"""Run the GPU tests and write tests/record/gpu_record.json: ``python -m tests.record.run`` on a machine with a card.

First the whole suite marked `gpu`, then the tests marked `sanitizer` under compute-sanitizer (found on PATH).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .kernels import KERNELS, RACES_EXPLAINED, digest

TESTS = Path(__file__).parents[1]
PARTS = ("suite", "memcheck", "racecheck")
#: Many workers share the cores: threads of BLAS in each would wait for those of the others.
_ALONE = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: Under racecheck a test takes many times as long: one or two for each kernel with shared memory.
_RACES = (
    "tensor_core_product_scales or (matched_rows and 37) or (portable_product_is_right and float16-float16) "
    "or (rows_take_nothing and 3) or (rows_take_nothing and 6) "
    "or (odd_lengths and 129-64) or (own_length and float16-None) or (portable_garbage and nan) "
    "or (sparse_product_on and 112 and float16 and not bfloat16 and not ampere) "
    "or (sparse_product_on and ampere and float64 and not 112) or (that_meet and 50-40) "
    "or (those_of_the_reference and 13-7 and 1-8 and int32)"
)


#: Under memcheck too, 8 seconds or so, and processes wait for each other: of what is marked one or two tests for each
#: kernel, those that go to the edges of their operands.
_MEMORY = (
    "(masks_spoiled and float16-128 and 48) or (masks_spoiled and float32 and 48) or fp8_masks_spoiled "
    "or (portable_garbage and nan) or user_wrote_into_tables or (strides_alpha_beta and C-C) or indices_overwritten "
    "or (sparse_product_is_right and float32) or (segments and add-float16) or (expand_names and int32) "
    "or (reads_nothing_outside and 64) or (small_blocks_by_one_vector and 13 and float64) or (long_rows and 3) "
    "or (portable_product_is_right and float16-float16) or (sparse_product_on and float16 and 112 and not bfloat16) "
    "or (sparse_product_on and float64 and 112) or (sampled_product_since and CC and 112 and float32) "
    "or (sampled_product_on and CC and 112) or (through_shared_memory and 7) or (rows_take_nothing and 9) "
    "or (of_one_length and float64) or short_rows_of or (that_meet and 50-40) or meet_nothing "
    "or (those_of_the_reference and 13-7 and 3-8 and int64) or (spoiled_index_arrays and 2147483648 and int32)"
)


def _pytest(*args: str, prefix: tuple[str, ...] = (), report: Path) -> tuple[dict[str, Any], str]:
    """Run pytest; (what the plugin `gpu_report` wrote, the output). A run that is cut off leaves both so far."""
    plugin = ("-p", "tests.record.report", f"--gpu-report={report}")
    command = [*prefix, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *args]
    log = report.with_suffix(".log")
    with log.open("w") as stream:
        subprocess.run(command, cwd=TESTS.parent, stdout=stream, stderr=subprocess.STDOUT, check=False, env=_ALONE)
    said = log.read_text()
    print("\n".join(said.splitlines()[-60:]), flush=True)
    return json.loads(report.read_text()) if report.exists() else {"tests": []}, said


def _counts(tests: list[dict[str, Any]]) -> dict[str, int]:
    return {
        outcome: sum(t["outcome"] == outcome for t in tests) for outcome in ("passed", "failed", "skipped", "xfailed")
    }


def _sanitize(tool: str, folder: Path, workers: str, *only: str) -> dict[str, Any]:
    """The sanitizer-marked tests of the kernels (or some of them) under one tool of compute-sanitizer."""
    prefix = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--launch-timeout", "0")
    prefix += ("--target-processes", "all")
    tests, output = _pytest(
        "-n", workers, "-m", "sanitizer", *only, "tests/gpu", prefix=prefix, report=folder / f"{tool}.json"
    )
    summaries = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", output)]
    # Of races, those in kernels whose reports are explained are counted apart.
    races = re.findall(r"Race reported between \w+ access at (\w+)\+", output)
    explained = {kernel: races.count(kernel) for kernel in RACES_EXPLAINED if kernel in races}
    totals = [int(n) for n in re.findall(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?", output)]
    summaries += [n - sum(explained.values()) for n in totals]
    if not summaries:
        raise SystemExit(f"compute-sanitizer --tool {tool} gave no summary")
    kernels = {
        k: digest(k) for k in sorted({k for t in tests["tests"] if t["outcome"] == "passed" for k in t["kernels"]})
    }
    extra = {"explained": explained} if explained else {}
    return {**_counts(tests["tests"]), "errors": sum(summaries), "kernels": kernels, **extra}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="8", help="pytest-xdist workers for the suite; 0 without xdist")
    parser.add_argument("--out", type=Path, default=TESTS / "record" / "gpu_record.json")
    parser.add_argument("--logs", type=Path, help="a folder in which to keep all that the runs have said")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="the others are left as recorded")
    parser.add_argument("--paths", nargs="+", default=["tests"], help="what to run of the suite; all of it by default")
    options = parser.parse_args()
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {}
    if set(options.parts) != set(PARTS):
        record = json.loads(options.out.read_text()) if options.out.exists() else {}
    keep = nullcontext(options.logs) if options.logs else tempfile.TemporaryDirectory()
    with keep as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        if "suite" in options.parts:
            record = _suite(folder, options.workers, options.paths) | {"sanitizer": record.get("sanitizer", {})}
            _write(options.out, record)  # should what follows be cut off
        waiting = {}
        if "memcheck" in options.parts:
            waiting["memcheck"] = pool.submit(_sanitize, "memcheck", folder, options.workers, "-k", _MEMORY)
        if "racecheck" in options.parts:
            waiting["racecheck"] = pool.submit(_sanitize, "racecheck", folder, "0", "-k", _RACES)
        for part in as_completed(waiting.values()):
            tool = next(tool for tool, running in waiting.items() if running is part)
            record["sanitizer"][tool] = part.result()
            _write(options.out, record)
    print({k: v for k, v in record.items() if k != "kernels"})
    return 1 if record["suite"]["failed"] else 0


def _suite(folder: Path, workers: str, paths: list[str]) -> dict[str, Any]:
    """A record of the tests marked `gpu`."""
    suite, _ = _pytest("-n", workers, "-m", "gpu", *paths, report=folder / "s.json")
    tests = suite["tests"]
    about = ("card", "driver", "nvrtc", "cupy", "scipy", "numpy", "python", "date")
    record: dict[str, Any] = {key: suite.get(key) for key in about}
    record["suite"] = {"paths": paths, **_counts(tests)}
    record["kernels"] = {}
    for kernel in KERNELS:
        own = [t for t in tests if kernel in t["kernels"]]
        record["kernels"][kernel] = {
            "digest": digest(kernel),
            **_counts(own),
            "checksums": {t["name"]: t["checksum"] for t in own if t.get("checksum")},
        }
    return record


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
