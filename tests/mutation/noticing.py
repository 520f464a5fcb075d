"""A plugin of pytest: which tests pass by the lines of some errors, or which test notices one of them.

The file that the environment variable names says what to do; the answer goes beside it, one for each process.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import Phase, settings

_MOST_BYTES = 12 << 30
#: How often what is known by now is written.
_SECONDS = 20


def pytest_configure(config: pytest.Config) -> None:
    path = Path(os.environ["BSRGEMM_MUTATION"])
    asked = json.loads(path.read_text())
    config.pluginmanager.register(Passing(path, asked["lines"]) if "lines" in asked else Noticing(path, asked["tests"]))


class Passing:
    """Notes for each test its outcome, its seconds, the lines asked for that it executes, and its kernels."""

    def __init__(self, path: Path, lines: dict[str, list[int]]) -> None:
        self.path, self.root = path, f"{Path.cwd()}/"
        self.wanted = {name: set(numbers) for name, numbers in lines.items()}
        self.codes: dict[Any, set[int]] = {}
        self.seen = set[str]()
        self.tests: dict[str, list[Any]] = {}
        self.written = time.monotonic()

    def pytest_collection_finish(self) -> None:
        emulator = None
        with suppress(ImportError):  # tests import it when the first of them needs it
            emulator = importlib.import_module("tests.emulator.emulator")
        if (load := getattr(emulator, "load", None)) is not None:

            def noting(spec: Any, *args: Any, **how: Any) -> Any:
                self.seen.add(f"cuda/{spec.source}")
                return load(spec, *args, **how)

            emulator.load = noting  # type: ignore[union-attr]

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code, name = frame.f_code, frame.f_code.co_filename.removeprefix(self.root)
        if (lines := self.codes.get(code)) is None:
            lines = self.codes[code] = self.wanted.get(name, set()) & {line or 0 for *_, line in code.co_lines()}
        if not lines:
            return None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_lineno in lines:
                self.seen.add(f"{name}:{frame.f_lineno}")
            return line

        return line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        for module in [module for name, module in list(sys.modules.items()) if name.startswith("bsrgemm")]:
            for function in list(vars(module).values()):  # or the first test alone executes what is remembered
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()
        self.seen.clear()
        self.tests[item.nodeid] = ["passed", 0.0, []]
        sys.settrace(self._call)
        threading.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self.tests[item.nodeid][2] = sorted(self.seen)
            if time.monotonic() - self.written > _SECONDS:  # the process may be ended before it is through
                self.pytest_sessionfinish()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self.tests:
            self.tests[report.nodeid][1] += report.duration
            if report.outcome != "passed":
                self.tests[report.nodeid][0] = report.outcome

    def pytest_sessionfinish(self) -> None:
        answer = self.path.with_suffix(f".{os.getpid()}.answer")
        whole = answer.with_suffix(".part")
        whole.write_text(json.dumps(self.tests))
        whole.replace(answer)
        self.written = time.monotonic()


class Noticing:
    """Runs the tests asked for in the order given, and remembers which one failed."""

    def __init__(self, path: Path, tests: list[str]) -> None:
        self.path, self.order = path, {name: place for place, name in enumerate(tests)}
        self.answer: dict[str, Any] = {"ran": 0, "by": None, "trivial": False}
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((x for x in items if x.nodeid in self.order), key=lambda item: self.order[item.nodeid])
        # Examples are those of the usual profile; a failure is enough, without a search for the smallest one.
        usual = settings.get_profile(settings.get_current_profile_name())
        settings.register_profile("mutation", parent=usual, phases=(Phase.explicit, Phase.generate), database=None)
        settings.load_profile("mutation")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Any:
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, subprocess.CalledProcessError) and "-shared" in error.cmd:
            self.answer["trivial"] = True  # the emulator's compiler refuses the source
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.answer["ran"] += report.when == "call"
        if report.failed and self.answer["by"] is None:
            self.answer["by"] = report.nodeid

    def pytest_sessionfinish(self) -> None:
        self.path.with_suffix(".answer").write_text(json.dumps(self.answer))
