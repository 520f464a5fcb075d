"""Which versions of Python, NumPy and SciPy pass the host tests: ``python -m tests.versions.python``.

Each interpreter gets two environments that are thrown away: one with the oldest versions that pyproject.toml allows,
one with the newest that pip finds. The tests of arrays, products, attention and linear systems run in both, without a
GPU. The outcome is written to python.json after each environment.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("python.json")
#: The interpreters that are looked for on the PATH.
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
TESTS = ("tests/array", "tests/products", "tests/attention", "tests/linalg")
#: What the tests need beside the package; its versions are those that pip finds.
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "matplotlib", "rich", "pyamg", "scikit-fem", "nvidia-cuda-nvrtc-cu12")
#: The packages whose versions are written down.
SHOWN = ("numpy", "scipy", "ml_dtypes", "threadpoolctl", "cupy-cuda12x")

Row = dict[str, Any]


def required() -> list[str]:
    """What the package depends on, with CuPy and without the libraries that CuPy loads on a card."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cupy = [name.replace("[ctk]", "") for name in project["optional-dependencies"]["cuda12"]]
    return [*project["dependencies"], *cupy]


def oldest(requirement: str) -> str:
    """The requirement that only the oldest version meets.

    >>> oldest("numpy>=2.1.2"), oldest("cupy-cuda12x>=14")
    ('numpy==2.1.2', 'cupy-cuda12x==14')
    """
    name, bound = re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement).groups()  # type: ignore[union-attr]
    return f"{name}=={bound}"


def counted(report: Path) -> dict[str, int]:
    """The numbers of tests that passed, failed and were skipped, from a report of pytest in JUnit's form."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")}
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


def tried(interpreter: str, which: str, folder: Path, tests: Sequence[str]) -> Row:
    """The outcome of the tests in a new environment of `interpreter`: "oldest" or "newest" dependencies."""
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    wanted = [oldest(name) for name in required()] if which == "oldest" else required()
    subprocess.run([python, "-m", "pip", "install", "-q", *TOOLS, *wanted], check=True, stderr=subprocess.DEVNULL)
    ask = "import sys, json, importlib.metadata as m; print(json.dumps([sys.version.split()[0], *map(m.version, {})]))"
    version, *versions = json.loads(subprocess.check_output([python, "-c", ask.format(SHOWN)], text=True))
    report = folder / "report.xml"
    command = [python, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=ROOT, env=clean | {"PYTHONDONTWRITEBYTECODE": "1"}, check=False)
    found = {"python": version, "which": which, "versions": dict(zip(SHOWN, versions, strict=True))}
    return found | {"status": done.returncode} | counted(report)


def merged(old: dict[str, Any], row: Row) -> dict[str, Any]:
    """The results with this row in place of an earlier one of the same Python and the same kind of dependencies."""

    def key(row: Row) -> tuple[int, str]:
        return int(row["python"].split(".")[1]), row["which"]

    found = {key(r): r for r in [*old.get("rows", []), row]}
    return {
        "date": datetime.date.today().isoformat(),
        "platform": f"Linux {os.uname().machine}",
        "tests": list(TESTS),
        "rows": [found[k] for k in sorted(found)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", help=f"interpreters; default: those found of {', '.join(PYTHONS)}")
    parser.add_argument("--which", nargs="+", choices=("oldest", "newest"), default=["oldest", "newest"])
    args = parser.parse_args(argv)
    failed = False
    for interpreter in args.pythons or [name for name in PYTHONS if shutil.which(name)]:
        for which in args.which:
            with tempfile.TemporaryDirectory() as folder:
                row = tried(interpreter, which, Path(folder, "environment"), TESTS)
            old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
            RESULTS.write_text(json.dumps(merged(old, row), indent=1) + "\n", encoding="utf-8")
            print(json.dumps(row), flush=True)
            failed |= row["status"] != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
