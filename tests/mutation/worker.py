"""Runs tests in children that are forked with the large libraries imported, one child for each error.

Started as a script in the root of a copy of the tree. Each line of its input is a request in JSON, each line of its
output an answer:

    {"import": module, "tests": [ids or files], "order": bool, "limits": {id: seconds}, "seconds": n, "measure": bool}
    -> {"outcome": "passed", "failed", "timeout" or "trivial", "by": id,
        "tests": {id: [outcome, seconds, {file: lines}, [kernels]]}}

Neither the package nor its tests are imported here.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

#: Seconds that a single test may take at least, and how many times as long as usual: the machine may be busy.
_LEAST_SECONDS, _TIMES = 120, 30
_MOST_BYTES = 12 << 30
_PARENT = os.getppid()


# ------------------------------------------------------------ which lines a test executes
class _Counting(ast.NodeTransformer):
    """Puts a note of its line in front of every statement inside a function."""

    def __init__(self, file: str) -> None:
        self.file, self.depth = file, 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if self.depth and isinstance(statements, list):
                setattr(node, field, [x for s in statements for x in (*self.note(s), s)])
        return node

    def note(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return []  # a docstring stays in front
        key = ast.Tuple([ast.Constant(self.file), ast.Constant(statement.lineno)], ast.Load())
        call = ast.Expr(ast.Call(ast.Name("__executed__", ast.Load()), [key], []))
        return [ast.fix_missing_locations(ast.copy_location(call, statement))]


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        file = str(Path(path).resolve().relative_to(Path.cwd()))
        tree = _Counting(file).visit(ast.parse(self.get_data(path)))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] != "bsrgemm":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Measuring:
    """Notes for each test how long it takes, which lines of the package it executes and which kernels it launches."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.kernels: set[str] = set()
        self.tests: dict[str, list[Any]] = {}
        self.caches: list[Any] | None = None
        builtins.__executed__ = self.lines.add  # type: ignore[attr-defined]
        sys.meta_path.insert(0, _Finder())

    def pytest_collection_finish(self, session: Any) -> None:
        emulator = sys.modules.get("tests.emulator.emulator")
        load = getattr(emulator, "load", None)
        if load is not None:

            @functools.wraps(load)
            def noting(spec: Any, *args: Any, **how: Any) -> Any:
                self.kernels.add(spec.source)
                return load(spec, *args, **how)

            emulator.load = noting  # type: ignore[union-attr]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
        for cached in self.remembering():  # or a function is executed by the first test alone
            cached.cache_clear()
        self.lines.clear()
        self.kernels.clear()
        self.tests[item.nodeid] = ["passed", 0.0, {}, []]
        try:
            return (yield)
        finally:
            files: dict[str, list[int]] = {}
            for file, line in self.lines:
                files.setdefault(file, []).append(line)
            self.tests[item.nodeid][2:] = [{f: sorted(lines) for f, lines in files.items()}, sorted(self.kernels)]

    def remembering(self) -> list[Any]:
        if self.caches is None:
            modules = [m for name, m in list(sys.modules.items()) if name.startswith("bsrgemm")]
            found = (x for m in modules for x in vars(m).values())
            self.caches = [x for x in found if isinstance(x, functools._lru_cache_wrapper)]
        return self.caches

    def pytest_runtest_logreport(self, report: Any) -> None:
        kept = self.tests[report.nodeid]
        kept[1] += report.duration
        if report.outcome != "passed":
            kept[0] = report.outcome


# ------------------------------------------------------------ until the first failure
class _Noticing:
    """Runs the tests asked for in the order given, and remembers which one failed."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.wanted = {name: i for i, name in enumerate(request["tests"])} if request["order"] else None
        self.limits: dict[str, float] = request.get("limits", {})
        self.failed: str | None = None
        self.trivial = False
        self.ran = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self.wanted is not None:
            wanted = self.wanted
            items[:] = sorted((i for i in items if i.nodeid in wanted), key=lambda item: wanted[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
        # The signal ends the process, also inside a kernel that never returns.
        signal.setitimer(signal.ITIMER_REAL, max(_LEAST_SECONDS, _TIMES * self.limits.get(item.nodeid, 1.0)))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.ran += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, subprocess.CalledProcessError) and "-shared" in (
            error.cmd if isinstance(error.cmd, list) else []
        ):
            self.trivial = True  # the emulator's compiler refuses the source
        return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid or "collection"


def _hypothesis(measure: bool) -> None:
    """Examples are those of the usual profile; a failure is enough, without a search for the smallest one."""
    from hypothesis import Phase, settings

    usual = settings.get_profile(settings.get_current_profile_name())
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutation", parent=usual, phases=phases, database=None, derandomize=True, print_blob=False
    )
    settings.load_profile("mutation")


class _Quiet:
    @pytest.hookimpl(trylast=True)
    def pytest_collection(self) -> None:
        _hypothesis(False)


def _child(request: dict[str, Any]) -> dict[str, Any]:
    sys.dont_write_bytecode = not request.get("measure")
    limit = min(_MOST_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if request.get("limit_memory", True):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    os.environ["PYTHONPATH"] = os.getcwd()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    assert request["tests"]  # or pytest would collect the whole tree
    files = list(dict.fromkeys(name.split("::")[0] for name in request["tests"]))
    args = [
        *files,
        "-o",
        "addopts=",
        "--doctest-modules",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        "-n0",
    ]
    if request.get("measure"):
        measuring = _Measuring()
        pytest.main(args, plugins=[measuring, _Quiet()])
        return {"outcome": "passed", "by": None, "tests": measuring.tests}
    if request["import"]:
        try:
            importlib.import_module("bsrgemm")
            importlib.import_module(request["import"])
        except BaseException as error:
            return {"outcome": "trivial", "by": f"{type(error).__name__}: {error}"}
    noticing = _Noticing(request)
    code = pytest.main([*args, "-x"], plugins=[noticing, _Quiet()])
    if noticing.trivial:
        return {"outcome": "trivial", "by": "the compiler"}
    failed = noticing.failed is not None or code not in (0, 5)
    return {"outcome": "failed" if failed else "passed", "by": noticing.failed, "ran": noticing.ran}


def _forked(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a child, or how it ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.setpgid(0, 0)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the process that waits for this one
        log = os.open(request.get("log") or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            answer = json.dumps(_child(request)).encode() + b"\n"
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + request["seconds"]
    os.set_blocking(read, False)
    chunks: list[bytes] = []
    expired = False
    while not (chunks and chunks[-1].endswith(b"\n")):
        gone = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        try:
            chunk = os.read(read, 1 << 20)
            if not chunk:
                break
            chunks.append(chunk)
        except BlockingIOError:  # a process that the child forked may hold the pipe open
            if gone:
                break
            if time.monotonic() > deadline or os.getppid() != _PARENT:
                expired = True
                break
            time.sleep(0.02)
    os.close(read)
    _end(child)
    _, status = os.waitpid(child, 0)
    if chunks and chunks[-1].endswith(b"\n"):
        return dict(json.loads(b"".join(chunks)))
    if expired:  # many tests, none of which failed or hung: on a busy machine this says nothing
        return {"outcome": "passed", "by": "nothing within the time"}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return {"outcome": "timeout", "by": None}
    return {"outcome": "failed", "by": f"the process ended with status {status}"}


def _end(child: int) -> None:
    """End the child and what it started. It has had its say."""
    try:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, ChildProcessError, PermissionError):
        pass


def main() -> None:
    sys.path[:] = [os.getcwd(), *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent)]
    for name in (
        "numpy",
        "scipy.sparse",
        "scipy.sparse.linalg",
        "hypothesis.strategies",
        "hypothesis.extra.numpy",
        "cupy",
    ):
        if importlib.util.find_spec(name.split(".")[0]) is not None:
            importlib.import_module(name)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in requests:
        answers.write(json.dumps(_forked(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
