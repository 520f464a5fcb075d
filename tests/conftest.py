"""What every test may ask for: a backend to run in, hypothesis profiles, and no GPU test without a GPU.

Tests that need a GPU that is not there, or a longer profile than the one that runs, are not selected. Of a test with
many cases, a run of everything takes a third; a run of the files or tests that are named takes all. One line at the end
says how many wait for what.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes share the cores: threads of BLAS in each would wait for those of the others. Read when NumPy is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from bsrgemm._backend.registry import Backend, by_name

from . import devices
from .emulator import races

#: "1" for the long profile, "all" for the one that compiles every variant of every kernel too, which takes hours.
PROFILE = os.environ.get("BSRGEMM_LONG", "")
LONG = PROFILE in ("1", "all")

# The quick profile draws the same examples every time, so that a change is judged by what it changed.
settings.register_profile("quick", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile("long" if LONG else "quick")


@cache
def has_cuda() -> bool:
    """Is there CuPy, and a device for it?"""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return cupy.cuda.is_available()


# --------------------------------------------------------------------------------- collection
@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector out of the collection: it walks thousands of tests again and again, for nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # what there is now stays until the end
        gc.enable()


# --------------------------------------------------------------------------------- tests that wait
#: Where a test of a kernel runs that asks for `device`: on the emulator, on a card, and if it has a mark of that name
#: also with guard pages before arrays, or with watched accesses.
WAYS = ("emulator", "before", "races", "card")
_WAITING = pytest.StashKey[Counter[str]]()


def waits_for(item: pytest.Item) -> str | None:
    """What `item` needs and this run lacks; None if it can run."""
    if item.get_closest_marker("gpu") and not has_cuda():
        return "a CUDA device"
    if item.get_closest_marker("every_variant") and PROFILE != "all":
        return "BSRGEMM_LONG=all"
    if item.get_closest_marker("long") and not LONG:
        return "BSRGEMM_LONG=1"
    return None


def way_of(item: pytest.Item) -> str | None:
    """Where a test of a kernel runs; None for other tests."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("runs_on")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `device` runs where its marks let it; those of a single case are looked at by `suits`."""
    if "runs_on" in metafunc.fixturenames:
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        card = [] if "emulated" in marks else [pytest.param("card", marks=pytest.mark.gpu)]
        ways = [way for way in WAYS[:-1] if "large" not in marks and (way == "emulator" or way in marks)]
        metafunc.parametrize("runs_on", [*ways, *card], indirect=True)


def leaves_to_its_other_half(item: pytest.Item) -> bool:
    """Is it, of a test that runs plainly and watched for races, the half that a run of everything leaves out?"""
    if not item.get_closest_marker("races"):
        return False
    params, way = item.callspec.params, way_of(item)  # type: ignore[attr-defined]
    if way in ("before", "card"):
        return False
    return races.left_out(item.nodeid.partition("[")[0], params.get("watched", way == "races"))


def suits(item: pytest.Item) -> bool:
    """Does a case run where it would? Some are too large for the emulator, others are for the emulator alone."""
    way, marks = way_of(item), {mark.name for mark in item.iter_markers()}
    if way is None:
        return True
    return "emulated" not in marks if way == "card" else "large" not in marks and (way == "emulator" or way in marks)


#: A test with at least so many cases is sampled: one case in so many runs. Kernels on the emulator are slow, and cases
#: of arrays and solvers on the fake card start many.
_MANY, _MANY_ON_THE_EMULATOR, _ONE_IN, _ONE_IN_ON_A_FAKE = 6, 3, 3, 6


def on_emulator(item: pytest.Item) -> bool:
    """Does a test run kernels on the emulator?"""
    is_fake = item.get_closest_marker("fake") is not None
    return item.nodeid.startswith("tests/emulator/") or way_of(item) is not None or is_fake


def beyond_the_sample(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases that a run of everything leaves to the long profile, drawn by their names: the same ones every time.

    Tests on a GPU have a sample of their own, which tests/card.json counts.
    """
    cases: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("gpu"):
            cases[item.nodeid.partition("[")[0], item.get_closest_marker("fake") is not None].append(item)
    left: set[pytest.Item] = set()
    for (_, is_fake), several in cases.items():
        if len(several) >= (_MANY_ON_THE_EMULATOR if on_emulator(several[0]) else _MANY):
            drawn = sorted(several, key=lambda item: zlib.crc32(item.nodeid.encode()))
            left.update(drawn[-(-len(drawn) // (_ONE_IN_ON_A_FAKE if is_fake else _ONE_IN)) :])
    return left


#: A test with so many cases on a card runs one in so many of them there.
_MANY_ON_A_CARD, _ONE_IN_ON_A_CARD = 60, 4


def beyond_the_sample_on_a_card(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases on a card that a run leaves to the long profile unless it names tests: the same ones every time."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left: set[pytest.Item] = set()
    for several in (several for several in cases.values() if len(several) >= _MANY_ON_A_CARD):
        drawn = sorted(several, key=lambda item: zlib.crc32(item.nodeid.encode()))
        left.update(drawn[-(-len(drawn) // _ONE_IN_ON_A_CARD) :])
    return left


def runs_everything(config: pytest.Config) -> bool:
    """Were neither files nor tests named? A process of pytest-xdist is told by the one that started it."""
    if hasattr(config, "workerinput"):
        return bool(config.workerinput["everything"])
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return not (named or config.option.keyword or config.option.markexpr)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["everything"] = runs_everything(node.config)


@pytest.hookimpl(trylast=True)  # what -k and -m have left out waits for nothing
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if suits(item)]
    reasons = [waits_for(item) for item in items]
    if runs_everything(config) and not LONG:
        halves = (leaves_to_its_other_half(item) for item in items)
        reasons = [why or ("BSRGEMM_LONG=1" if half else None) for why, half in zip(reasons, halves, strict=True)]
        able = [item for item, reason in zip(items, reasons, strict=True) if not reason]
        beyond = beyond_the_sample(able)
        reasons = ["BSRGEMM_LONG=1" if item in beyond else why for item, why in zip(items, reasons, strict=True)]
    if not LONG and not config.option.keyword and not any("::" in name for name in config.args):
        beyond = beyond_the_sample_on_a_card(items)
        reasons = [why or ("BSRGEMM_LONG=1" if x in beyond else None) for x, why in zip(items, reasons, strict=True)]
    config.stash[_WAITING] = Counter(reason for reason in reasons if reason)
    config.hook.pytest_deselected(items=[item for item, reason in zip(items, reasons, strict=True) if reason])
    items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that fails on the emulator says which seed it ran with."""
    report = yield
    if report.failed and on_emulator(item):
        from .emulator import emulator

        report.sections.append(("emulator", f"BSRGEMM_EMULATOR_SEED={emulator.seed()}"))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist tells the one that started it what was left out; each of them left out the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["waiting"] = dict(session.config.stash.get(_WAITING, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_WAITING] = Counter(getattr(node, "workeroutput", {}).get("waiting", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in sorted(config.stash.get(_WAITING, Counter()).items()):
        tests = "1 test waits" if count == 1 else f"{count:,} tests wait"
        terminalreporter.write_line(f"{tests} for {reason}")


#: Every backend, for ``pytest.mark.parametrize("backend", BACKENDS, indirect=True)`` or the fixture alone.
BACKENDS = [
    pytest.param("cpu", id="numpy"),
    pytest.param("cuda", id="fake", marks=pytest.mark.fake),
    pytest.param("cuda", id="cupy", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def fake_card(request: pytest.FixtureRequest) -> Generator[ModuleType | None]:
    """A test with the mark `fake` finds a fake card where others find that of this machine."""
    if request.node.get_closest_marker("fake") is None or request.node.get_closest_marker("gpu"):
        yield None
        return
    pytest.importorskip("cupy")
    from .emulator import emulator
    from .fake_cupy import Card, installed

    if emulator.COMPILER is None:
        pytest.skip("there is neither g++ nor clang++ on the PATH")
    with installed(Card()) as cupy:
        yield cupy


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, fake_card: ModuleType | None) -> Backend:
    """The host, a fake card, and the GPU where there is one."""
    return by_name(request.param)


@pytest.fixture
def runs_on(request: pytest.FixtureRequest) -> str:
    """Where a test of a kernel runs: one of WAYS."""
    way: str = request.param
    return way


@pytest.fixture
def device(runs_on: str) -> Generator[devices.Device]:
    """An emulated card and the real one, with which the same library works."""
    with devices.opened(runs_on) as found:
        yield found
