"""A pytest plugin (``-p tests.record.report --gpu-report FILE``) that writes what GPU tests did, for record_gpu."""

from __future__ import annotations

import datetime
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy

_tests: list[dict[str, Any]] = []
#: Seconds between two writes of what there is so far, should the run be cut off.
_EVERY = 5.0
_written = 0.0
_path: Path | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, help="write outcomes, kernels and checksums of the tests as JSON")


def pytest_configure(config: pytest.Config) -> None:
    global _path
    _path = None if hasattr(config, "workerinput") else config.getoption("--gpu-report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kernels = sorted({name for mark in item.iter_markers("kernel") for name in mark.args})
        item.user_properties.append(("kernels", kernels))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    properties = dict(report.user_properties)
    outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
    _tests.append(
        {
            "name": report.nodeid.partition("::")[2],
            "outcome": outcome,
            "kernels": properties.get("kernels", []),
            "checksum": properties.get("checksum"),
            "seconds": round(report.duration, 2),
        }
    )
    if time.monotonic() - _written > _EVERY:
        _write()


def pytest_sessionfinish() -> None:
    _write()


def _write() -> None:
    global _written
    if _path is None:
        return
    import cupy

    from bsrgemm._kernels import jit

    about = {
        "card": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": jit.nvrtc_version(),
        "cupy": cupy.__version__,
        "scipy": scipy.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    _path.write_text(json.dumps(about | {"tests": _tests}))
    _written = time.monotonic()
