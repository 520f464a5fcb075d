"""Run the GPU tests and write tests/gpu_record.json: ``python -m tests.record_gpu`` on a machine with a card.

First the whole suite marked `gpu`, then the tests marked `sanitizer` under compute-sanitizer (found on PATH).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .kernels import KERNELS, RACES_EXPLAINED, digest

TESTS = Path(__file__).parent
#: Under racecheck a test takes many times as long: one or two for each kernel with shared memory.
_RACES = (
    "tensor_core_product_scales or (matched_rows and 37) or (portable_product_is_right and float16-float16) "
    "or (odd_lengths and 129-64) or (own_length and float16-None) or (portable_garbage and nan)"
)


def _pytest(*args: str, prefix: tuple[str, ...] = (), report: Path) -> tuple[dict[str, Any], str]:
    """Run pytest; (what the plugin `gpu_report` wrote, the output)."""
    plugin = ("-p", "tests.gpu_report", f"--gpu-report={report}")
    command = [*prefix, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *args]
    done = subprocess.run(
        command, cwd=TESTS.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print("\n".join(done.stdout.splitlines()[-60:]), flush=True)
    return json.loads(report.read_text()) if report.exists() else {"tests": []}, done.stdout


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
    kernels = sorted({k for t in tests["tests"] if t["outcome"] == "passed" for k in t["kernels"]})
    extra = {"explained": explained} if explained else {}
    return {**_counts(tests["tests"]), "errors": sum(summaries), "kernels": kernels, **extra}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="8", help="pytest-xdist workers for the suite; 0 without xdist")
    parser.add_argument("--out", type=Path, default=TESTS / "gpu_record.json")
    parser.add_argument("paths", nargs="*", default=["tests"], help="what to run of the suite; all of it by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        suite, _ = _pytest("-n", options.workers, "-m", "gpu", *options.paths, report=folder / "s.json")
        tests = suite["tests"]
        record: dict[str, Any] = {
            key: suite.get(key) for key in ("card", "driver", "nvrtc", "cupy", "scipy", "numpy", "python", "date")
        }
        record["suite"] = {"paths": options.paths, **_counts(tests)}
        record["kernels"] = {}
        for kernel in KERNELS:
            own = [t for t in tests if kernel in t["kernels"]]
            record["kernels"][kernel] = {
                "digest": digest(kernel),
                **_counts(own),
                "checksums": {t["name"]: t["checksum"] for t in own if t.get("checksum")},
            }
        record["sanitizer"] = {}
        options.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")  # should what follows be cut off
        if shutil.which("compute-sanitizer"):
            with ThreadPoolExecutor() as pool:
                memcheck = pool.submit(_sanitize, "memcheck", folder, options.workers)
                racecheck = pool.submit(_sanitize, "racecheck", folder, "0", "-k", _RACES)
                record["sanitizer"] = {"memcheck": memcheck.result(), "racecheck": racecheck.result()}
    options.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print({k: v for k, v in record.items() if k != "kernels"})
    return 1 if record["suite"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
