"""Do kernels of an NVRTC that the machine with the card lacks pass the GPU tests? ``python -m tests.versions.cubins``.

``--make FOLDER`` compiles the kernels of some GPU tests with the NVRTC that is installed; no GPU is needed. The record
of the last run on a card tells which kernels a test launches. ``--run FOLDER`` runs these tests on a card, with the
kernels of the folder in place of compiled ones, and writes what came out to cubins.json. More arguments go to pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bsrgemm._kernels import jit, sources

from ..record import record as records
from ..record.kernels import ENTRIES
from .nvrtc import PACKAGES, ROOT, TARGET, number

RESULTS = Path(__file__).with_name("cubins.json")
#: The file of a folder that tells what the cubins beside it are.
CONTENTS = "contents.json"
#: As many kernels launch every function of the sources, and take five minutes of one core.
_MOST_KERNELS = 150
#: A folder travels to the machine with the card.
_MOST_BYTES = 40_000_000


# ------------------------------------------------------------------------------------------- the folder
def cubin_name(spec: jit.KernelSpec, arch: str, texts: Mapping[str, str]) -> str:
    """The file of a kernel: a digest of its code and its options, whichever NVRTC compiles them."""
    parts = (sources.code_digest(texts), spec.source, spec.entry, jit.options(spec, arch))
    return f"{spec.entry}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.cubin"


def recorded_spec(entry: str, options: str) -> jit.KernelSpec:
    """The kernel that the record describes by its function and NVRTC's options.

    >>> str(recorded_spec("expand", "-std=c++17 -arch=sm_90a --ptxas-options=-v -DINDEX=i32"))
    'expand.cu:expand -DINDEX=i32'
    """
    defines = (option[2:].partition("=") for option in options.split() if option.startswith("-D"))
    names = tuple((name, value) for name, _, value in defines)
    return jit.KernelSpec(ENTRIES[entry], entry, names, overlaps="overlapping" in options.split())


def kernels_of(record: Mapping[str, Any]) -> dict[str, set[int]]:
    """The tests that passed and draw no random input, and the numbers of the kernels that each launches."""
    found = {}
    for name, test in record["tests"].items():
        if test["outcome"] == "passed" and test.get("launches") and not test.get("drawn"):
            numbers = {item[0] if isinstance(item, list) else item for item in test["launches"]}
            kernels = {record["launches"][number][0] for number in numbers}
            if all(record["kernels"][kernel][0] in ENTRIES for kernel in kernels):  # none of a test's own sources
                found[name] = kernels
    return found


def chosen(record: dict[str, Any], most: int) -> tuple[set[int], list[str]]:
    """At most `most` kernels whose launches differ as much as possible, and all tests that need no others."""
    needed = kernels_of(record)
    waiting = {name: records.features(record, record["tests"][name]) for name in needed}
    kernels: set[int] = set()
    met: set[Any] = set()
    while True:
        waiting = {name: new for name, new in waiting.items() if new - met and len(needed[name] | kernels) <= most}
        if not waiting:
            return kernels, sorted(name for name, wanted in needed.items() if wanted <= kernels)
        best = max(waiting, key=lambda name: len(waiting[name] - met) / (1 + len(needed[name] - kernels)))
        met |= waiting[best]
        kernels |= needed[best]


def nvrtc_version() -> str:
    """NVRTC's version with its patch, if pip has installed it, such as "12.9.86"."""
    found = jit.nvrtc_version()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version(PACKAGES[number(found)[0]][0])
        if number(installed)[:2] == number(found):
            return installed
    return found


def make(folder: Path, specs: Iterable[jit.KernelSpec], tests: Sequence[str]) -> int:
    """Write the cubins of these kernels, and which tests need no others; the bytes of all files."""

    def compiled(spec: jit.KernelSpec) -> tuple[str, str]:
        name = cubin_name(spec, TARGET, sources.gather(spec.source))
        (folder / name).write_bytes(jit.compile_cubin(spec, TARGET).cubin)
        return name, str(spec)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        kernels = dict(pool.map(compiled, specs))
    contents = {"nvrtc": nvrtc_version(), "arch": TARGET, "kernels": kernels, "tests": list(tests)}
    (folder / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in folder.iterdir())


# ------------------------------------------------------------------------------------- on the card
class Lookup:
    """Takes the place of `jit._compile`: kernels come from the folder, and from NVRTC if the folder lacks them."""

    def __init__(self, folder: Path, compile_kernel: Callable[..., jit.Compiled]) -> None:
        self.folder, self.compile_kernel = folder, compile_kernel
        self.found: set[str] = set()
        self.compiled: set[str] = set()

    def __call__(self, spec: jit.KernelSpec, arch: str, texts: Mapping[str, str], root: Path) -> jit.Compiled:
        name = cubin_name(spec, arch, texts)
        try:
            cubin = (self.folder / name).read_bytes()
        except FileNotFoundError:
            self.compiled.add(name)
            return self.compile_kernel(spec, arch, texts, root)
        self.found.add(name)
        return jit.Compiled(cubin, "", 0.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cubins", type=Path, help="a folder of `python -m tests.versions.cubins --make`")
    parser.addoption("--cubins-report", type=Path, help="write what came out as JSON")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--cubins")
    if folder is not None:
        jit._compile = lookup = Lookup(folder, jit._compile)
        config.pluginmanager.register(Runner(config, folder, lookup), "cubins")


class Runner:
    """Selects the tests of a folder, counts kernels where tests run, and outcomes where the reports arrive."""

    def __init__(self, config: pytest.Config, folder: Path, lookup: Lookup) -> None:
        self.config, self.lookup = config, lookup
        self.contents: dict[str, Any] = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        tests = set(self.contents["tests"])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in tests])
        items[:] = [item for item in items if item.nodeid in tests]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
            if report.failed:
                self.failures.append(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Processes share a cache: a kernel that one has looked up is found there by the others."""
        output = getattr(node, "workeroutput", {})
        self.lookup.found |= set(output.get("found", ()))
        self.lookup.compiled |= set(output.get("compiled", ()))

    def pytest_sessionfinish(self) -> None:
        counts = {"found": sorted(self.lookup.found), "compiled": sorted(self.lookup.compiled)}
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput.update(counts)
        elif (path := self.config.getoption("--cubins-report")) is not None:
            path.write_text(json.dumps(self.report(), indent=1) + "\n", encoding="utf-8")

    def report(self) -> dict[str, Any]:
        return {
            "date": datetime.date.today().isoformat(),
            "nvrtc": self.contents["nvrtc"],
            "arch": self.contents["arch"],
            **card(),
            "kernels_in_folder": len(self.contents["kernels"]),
            "kernels_from_folder": len(self.lookup.found),
            "kernels_compiled": len(self.lookup.compiled),
            **{outcome: self.outcomes[outcome] for outcome in ("passed", "failed", "skipped")},
            "failures": self.failures,
        }


def card() -> dict[str, Any]:
    """The card, its driver and the CuPy and NVRTC beside it; no card on a machine without one and in a rehearsal."""
    if os.environ.get("BSRGEMM_STAND_IN") == "1":  # it answers as an H200 does
        return {"card": "stand-in"}
    import cupy

    there = cupy.cuda.is_available()
    return {
        "card": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode() if there else None,
        "driver": cupy.cuda.runtime.driverGetVersion() if there else None,
        "cupy": cupy.__version__,
        "nvrtc_beside_card": jit.nvrtc_version(),
    }


def run(folder: Path, out: Path, arguments: Sequence[str]) -> int:
    """Run the tests of the folder with an empty kernel cache; pytest's exit status, or 1 if no cubin was taken."""
    out.unlink(missing_ok=True)
    tests = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))["tests"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.versions.cubins", "-p", "no:cacheprovider"]
    command += [f"--cubins={folder.resolve()}", f"--cubins-report={out.resolve()}", *arguments]
    command += sorted({name.partition("::")[0] for name in tests})
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"CUPY_CACHE_DIR": cache}
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if not out.exists():  # pytest has not come to its end, and has said why
        return status or 1
    report = json.loads(out.read_text(encoding="utf-8"))
    print(json.dumps(report))
    return status or int(not report["kernels_from_folder"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--make", type=Path, metavar="FOLDER", help="compile into this folder")
    what.add_argument("--run", type=Path, metavar="FOLDER", help="run the tests on a card with the cubins of a folder")
    parser.add_argument("--most", type=int, default=_MOST_KERNELS, help=f"kernels of --make; default {_MOST_KERNELS}")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"what --run writes; default {RESULTS.name}")
    args, others = parser.parse_known_args(argv)
    if args.run:
        return run(args.run, args.out, others)
    if others:
        parser.error(f"--make takes no arguments of pytest, got {' '.join(others)}")
    args.make.mkdir(parents=True, exist_ok=True)
    if any(args.make.iterdir()):
        parser.error(f"--make: {args.make} is not empty, and may hold cubins of another NVRTC")
    record = records.load()
    kernels, tests = chosen(record, args.most)
    specs = [recorded_spec(entry, options) for entry, _, options in (record["kernels"][k] for k in sorted(kernels))]
    size = make(args.make, specs, tests)
    print(f"{len(specs)} kernels of NVRTC {nvrtc_version()} for {len(tests)} tests, {size / 1e6:.1f} MB in {args.make}")
    if size > _MOST_BYTES:
        print(f"more than {_MOST_BYTES / 1e6:.0f} MB: ask for fewer with --most")
    return int(size > _MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
