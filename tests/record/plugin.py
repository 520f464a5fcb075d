"""A pytest plugin that writes down what GPU tests did: ``-p tests.record.plugin --gpu-report FILE``.

With ``BSRGEMM_STAND_IN=1`` in the environment CuPy is replaced by the stand-in, and the same tests run without a card.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from . import log

ON_STAND_IN = os.environ.get("BSRGEMM_STAND_IN") == "1"
if ON_STAND_IN:
    from . import record, stand_in

    stand_in.install(record.load() if record.PATH.exists() else None)
    from . import host_results

    host_results.install()

#: The test that takes longest. It starts first, so that no worker is left with it at the end.
_LONGEST = "test_every_check_of_verify_passes"
#: Seconds between two writes of what there is so far, should the run be cut off.
_EVERY = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, help="write outcomes, launches and checksums of the tests as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-report")
    if path is None:
        return
    if not ON_STAND_IN:
        log.install()
        log.track_cupy()
    config.pluginmanager.register(Recorder(path, getattr(config, "workerinput", None)), "gpu-recorder")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONGEST not in item.nodeid)


class Recorder:
    """Logs the launches of each test where tests run, and collects the reports where they arrive."""

    def __init__(self, path: Path, worker: dict[str, Any] | None) -> None:
        self.path, self.worker = path, worker
        self.runs_tests = worker is not None
        self.tests: list[dict[str, Any]] = []
        self.collected: int | None = None
        self.table: dict[str, dict[str, Any]] = {}
        self.written = 0.0
        self.log: log.TestLog | None = None

    # ---------------------------------------------------------------------------------------- what is run
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.worker is None and not session.config.getoption("numprocesses", None):
            self.collected, self.runs_tests = len(session.items), True

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        from . import host_results

        host_results.fresh_workspace()
        if ON_STAND_IN:
            host_results.begin_test()
        self.log = log.begin()
        yield
        log.end()
        self.table.update(self.log.table)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        outcome = yield
        report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
        error = call.excinfo.value if call.excinfo is not None else None
        if ON_STAND_IN and isinstance(error, stand_in.NotOnStandIn):
            report.outcome, report.longrepr = "skipped", (__file__, 0, f"Skipped: only on a card: {error}")
        if report.when == "call" and self.log is not None:
            found = [(name, len(list(same))) for name, same in itertools.groupby(self.log.launches())]
            launches = {
                "digest": self.log.digest(),
                "entries": self.log.entries(),
                "names": [name if n == 1 else f"{name}*{n}" for name, n in found],
                "sharing": self.log.sharing(),
                "drawn": bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False)),
            }
            item.user_properties.append(("launches", launches))
            report.user_properties = [*report.user_properties, ("launches", launches)]

    # ---------------------------------------------------------------------------------------- what is written
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker is not None or (report.when != "call" and report.outcome == "passed"):
            return
        properties = dict(report.user_properties)
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        test = {"name": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 3)}
        if report.outcome != "passed":
            test["why"] = _reason(report)
        self.tests.append(test | {k: properties[k] for k in ("launches", "checksum") if k in properties})
        self._write()

    def pytest_sessionfinish(self) -> None:
        if self.runs_tests:
            name = self.worker["workerid"] if self.worker is not None else "main"
            self.path.with_suffix(f".table-{name}.json").write_text(json.dumps(self.table))
        self._write(last=True)

    def _write(self, last: bool = False) -> None:
        if self.worker is not None or (not last and time.monotonic() - self.written < _EVERY):
            return
        self.path.write_text(json.dumps(about() | {"collected": self.collected, "tests": self.tests}))
        self.written = time.monotonic()


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)[:300]


def about() -> dict[str, Any]:
    """The card, its software, and the libraries on which inputs of tests depend."""
    import cupy
    import hypothesis
    import scipy

    from bsrgemm._kernels import jit

    device = cupy.cuda.Device()
    return {
        "card": "stand-in" if ON_STAND_IN else cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "attributes": {name: int(value) for name, value in device.attributes.items()},
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": jit.nvrtc_version(),
        "cupy": cupy.__version__,
        "scipy": scipy.__version__,
        "numpy": numpy.__version__,
        "hypothesis": hypothesis.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
