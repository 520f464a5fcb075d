"""A pytest plugin (``-p tests.gpu_report --gpu-report FILE``) that writes what GPU tests did, for record_gpu."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy

_tests: list[dict[str, Any]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, help="write outcomes, kernels and checksums of the tests as JSON")


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
        }
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--gpu-report")
    if path is None or hasattr(session.config, "workerinput"):
        return
    import cupy

    from bsrgemm import jit

    path.write_text(
        json.dumps(
            {
                "card": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
                "driver": cupy.cuda.runtime.driverGetVersion(),
                "nvrtc": jit.nvrtc_version(),
                "cupy": cupy.__version__,
                "scipy": scipy.__version__,
                "numpy": numpy.__version__,
                "python": platform.python_version(),
                "date": datetime.date.today().isoformat(),
                "tests": _tests,
            }
        )
    )
