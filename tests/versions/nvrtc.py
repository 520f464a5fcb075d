"""Which versions of NVRTC compile the kernels: ``python -m tests.versions.nvrtc``; no GPU is needed.

Every minor version that pip offers is installed beside CuPy in an environment that is thrown away. Each compiles the
default set of ``python -m bsrgemm compile`` for Hopper. The newest version of each CUDA also compiles that set for the
other generations, and every kernel with every value of its constants for every target. The outcome is written to
nvrtc.json after each version.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("nvrtc.json")
#: By the major version of CUDA, the package of NVRTC and that of CuPy.
PACKAGES = {12: ("nvidia-cuda-nvrtc-cu12", "cupy-cuda12x"), 13: ("nvidia-cuda-nvrtc", "cupy-cuda13x")}
#: The oldest version that is asked for.
OLDEST = (12, 4)
#: The target that every version compiles for, and those that the newest versions compile for too.
TARGET, OTHERS = "sm_90a", ("sm_75", "sm_80", "sm_100", "sm_120")

Row = dict[str, Any]


# ---------------------------------------------------------------------------------------- versions
def number(version: str) -> tuple[int, ...]:
    """
    >>> number("12.9.86")
    (12, 9, 86)
    """
    return tuple(map(int, version.split(".")))


def last_of_each_minor(versions: Iterable[str]) -> list[str]:
    """The last patch of each minor version that is not older than `OLDEST`, oldest first.

    >>> last_of_each_minor(["12.9.86", "12.10.1", "12.9.41", "12.3.107", "12.4.99"])
    ['12.4.99', '12.9.86', '12.10.1']
    """
    newest: dict[tuple[int, ...], str] = {}
    for version in sorted(versions, key=number):
        if number(version)[:2] >= OLDEST:
            newest[number(version)[:2]] = version
    return list(newest.values())


def offered() -> list[str]:
    """The versions that pip offers for this platform, as `last_of_each_minor` has them."""
    found: list[str] = []
    for major, (package, _) in PACKAGES.items():
        command = [sys.executable, "-m", "pip", "index", "versions", package]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("Available versions:")]
        versions = line.removeprefix("Available versions:").replace(" ", "").split(",")
        found += [version for version in versions if number(version)[0] == major]
    return last_of_each_minor(found)


def newest(versions: Iterable[str]) -> set[str]:
    """The newest version of each major one.

    >>> sorted(newest(["12.4.127", "12.9.86", "13.0.88"]))
    ['12.9.86', '13.0.88']
    """
    return set({number(version)[0]: version for version in sorted(versions, key=number)}.values())


# ------------------------------------------------------------------------------------ environments
def environment(folder: Path, major: int) -> Path:
    """The interpreter of a new environment with CuPy and what the package depends on, without NVRTC."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (cupy,) = [re.sub(r"\[.*\]", "", name) for name in project["optional-dependencies"][f"cuda{major}"]]
    _install(python, cupy, *project["dependencies"])
    return python


def _install(python: Path, *requirements: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *requirements]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


# --------------------------------------------------------------------------- inside an environment
def judged(log: str) -> tuple[int, list[str]]:
    """The most bytes that a kernel spills, and the lines of the log that warn, as the compile tests find them.

    >>> judged("ptxas info    : 8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads")
    (8, [])
    """
    lines = [line.strip() for line in log.splitlines() if "warning" in line.lower() or re.search(r"C75\d\d", line)]
    return max(map(int, re.findall(r"(\d+) bytes spill", log)), default=0), lines


def compiled(what: str, arch: str) -> Row:
    """What NVRTC says about a set of kernels: "default", or "span" for every kernel and value of its constants."""
    from bsrgemm._cli.compile import common_specs
    from bsrgemm._kernels import jit

    from ..kernels import variants

    row: Row = {"set": what, "arch": arch, "kernels": 0, "compiled": 0, "spills": {}, "warnings": {}, "errors": {}}
    if int(re.sub(r"\D", "", arch)) not in jit.supported_archs():
        return row | {"seconds": 0.0, "unknown": True}
    start = time.process_time()  # the machine may have other work
    span = [spec for kernel in variants.kernels() for spec in variants.span(kernel, arch)] if what == "span" else []
    for spec in span or common_specs(arch):
        row["kernels"] += 1
        try:
            log = jit.compile_cubin(spec, arch).log
        except jit.CompileError as error:
            lines = [line.strip() for line in str(error).splitlines() if "error" in line.lower()]
            row["errors"][str(spec)] = (lines or [str(error)])[-1]
            continue
        row["compiled"] += 1
        spilled, warned = judged(log)
        if spilled:
            row["spills"][str(spec)] = spilled
        if warned:
            row["warnings"][str(spec)] = warned[0]
    return row | {"seconds": round(time.process_time() - start, 1)}


def _work(jobs: Sequence[str]) -> None:
    """Print a row for each job, such as "default:sm_90a"; runs inside an environment."""
    import cupy

    from bsrgemm._kernels import jit

    for job in jobs:
        about = {"reported": jit.nvrtc_version(), "cupy": cupy.__version__}
        print(json.dumps(about | compiled(*job.split(":"))), flush=True)


# -------------------------------------------------------------------------------------- the results
def digest() -> str:
    """A digest of the CUDA sources: rows of other sources are not kept."""
    sources = sorted((ROOT / "cuda").rglob("*.cu*"))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in sources)).hexdigest()[:16]


def merged(old: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The results with these rows in place of earlier ones of the same version, set and target."""

    def key(row: Row) -> tuple[Any, ...]:
        return number(row["nvrtc"]), row["set"], number(re.sub(r"\D", "", row["arch"]))

    kept = old.get("rows", []) if old.get("sources") == digest() else []
    found = {key(row): row for row in [*kept, *rows]}
    return {
        "date": datetime.date.today().isoformat(),
        "platform": f"Linux {os.uname().machine}",
        "sources": digest(),
        "rows": [found[k] for k in sorted(found)],
    }


def _write(rows: Sequence[Row]) -> None:
    old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(merged(old, rows), indent=1) + "\n", encoding="utf-8")


def jobs_of(version: str, versions: Iterable[str]) -> list[str]:
    """What `version` compiles: the default set for Hopper, and more if it is the newest of its CUDA.

    >>> jobs_of("12.4.127", ["12.4.127", "12.9.86"])
    ['default:sm_90a']
    """
    from ..kernels.variants import TARGETS

    jobs = [f"default:{TARGET}"]
    if version in newest(versions):
        jobs += [*(f"default:{arch}" for arch in OTHERS), *(f"span:{arch}" for arch in TARGETS)]
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", help="versions of NVRTC; default: the last patch of each minor one")
    parser.add_argument("--jobs", nargs="+", metavar="SET:TARGET", help="such as default:sm_90a or span:sm_120")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work:
        _work(args.work)
        return 0
    versions = args.versions or offered()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        pythons: dict[int, Path] = {}
        for version in versions:
            major = number(version)[0]
            if major not in pythons:
                pythons[major] = environment(Path(folder, str(major)), major)
            _install(pythons[major], f"{PACKAGES[major][0]}=={version}")
            command = [str(pythons[major]), "-m", "tests.versions.nvrtc", "--work"]
            command += args.jobs or jobs_of(version, versions)
            clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            with subprocess.Popen(command, cwd=ROOT, env=clean, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    row = {"nvrtc": version, **json.loads(line)}
                    _write([row])
                    told = (f"{len(row[kind])} {kind}" for kind in ("errors", "warnings", "spills"))
                    target = "not a target of this version" if row.get("unknown") else ", ".join(told)
                    print(f"{version:10} {row['set']:8} {row['arch']:7} {row['compiled']:4} of {row['kernels']:4}, "
                          f"{target}, {row['seconds']:.0f} s", flush=True)  # fmt: skip
            failed |= process.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
