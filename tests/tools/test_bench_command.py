"""``python -m bsrgemm bench`` and ``report``: what they measure, show, keep, compare and refuse."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsrgemm.__main__ import main
from bsrgemm._benchmark import machine, place, results, timing
from bsrgemm._benchmark.cases.attentions import Attention, Decode
from bsrgemm._benchmark.cases.problem import Peer, Ready
from bsrgemm._benchmark.cases.products import Product
from bsrgemm._benchmark.measure import suite
from bsrgemm._benchmark.measure.suite import Choice, Suite, problems
from bsrgemm._benchmark.patterns import uniform
from bsrgemm._benchmark.peers import products as product_peers
from bsrgemm._benchmark.place import Cpu, Gpu
from bsrgemm._benchmark.show import cells, changes, figures, page, screen
from bsrgemm._cli import bench as bench_command

TINY: dict[str, list[Any]] = {
    "gemm": [Product("gemm", 64, (b, b), d, N, "float32")
             for b, d, N in ((8, 0.25, 16), (16, 0.25, 16), (32, 0.25, 16), (16, 0.5, 16), (16, 1.0, 16), (16, 0.25, 8),
                             (16, 0.25, 4))],
    "spmv": [Product("spmv", 60 * b, (b, b), 5 / 60, 1, "float64") for b in (1, 2, 3)],
    "attention": [Attention(1, 2, S, 16, window=8, dtype="float32") for S in (32, 64, 128)],
    "decode": [Decode(1, 64, heads=4, kv_heads=2, head_dim=16, dtype="float32")],
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the CPU, on problems of no size."""
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(suite, "_on_cpu", lambda group, quick: iter(TINY[group][:2] if quick else TINY[group]))
    monkeypatch.setattr(place, "_COPIED", {"cpu": 1 << 16})
    monkeypatch.setattr(place, "_DENSE", {"cpu": 32})
    monkeypatch.setattr(timing, "_BUDGET", 0.0)


def row(name: str = "a", seconds: float | None = 1e-3, noise: float = 0.01, **peers: float) -> dict[str, Any]:
    """A row of results by hand."""

    def timing(t: float) -> dict[str, Any]:
        return {"seconds": t, "low": t * (1 - noise), "high": t * (1 + noise), "count": 10}

    found: dict[str, Any] = {
        "group": "gemm", "name": name, "n": 64, "block": [16, 16], "density": 0.25, "asked_density": 0.25,
        "columns": 16, "dtype": "float32", "flops": 1e9, "traffic": 1e6, "peers": {}, "seconds": None,
    }  # fmt: skip
    if seconds is None:
        return found | {"failed": "OSError: no"}
    found |= timing(seconds) | {"tflops": 1e-3 / seconds, "gbps": 1e-3 / seconds, "of_roofline": 0.5, "error": 0.1}
    found["peers"] = {
        name.replace("_", " "): timing(t) | dict.fromkeys(("ratio", "ratio_low", "ratio_high"), t / seconds)
        for name, t in peers.items()
    }
    return found


def of(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = {"date": "2031-05-04", "bsrgemm": "9.8", "cpu": "abacus", "cores": 2}
    return {
        "format": 1, "machine": about, "device": "cpu", "quick": False, "seed": 0, "duration": 1.0, "rows": list(rows),
        "ceilings": {"bytes_per_second": 1e10, "flops_per_second": {"float32": 1e12}},
    } | more  # fmt: skip


# --------------------------------------------------------------------------------------- the run
def test_everything_is_measured_checked_shown_and_kept(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, drawn = tmp_path / "all.json", tmp_path / "pictures"
    assert main(["bench", "--json", str(kept), "--plot", str(drawn)]) == 0
    said = capsys.readouterr().out
    found = results.read(kept)
    wanted = [problem for group in TINY.values() for problem in group]
    assert [r["name"] for r in found["rows"]] == list(map(str, wanted))
    assert "on the CPU" in said and "no GPU was found" in said and f"{len(wanted)} of {len(wanted)} problems" in said
    for r in found["rows"]:
        assert r["error"] <= 1 and r["low"] <= r["seconds"] <= r["high"] and r["count"] >= 5
        assert r["tflops"] == pytest.approx(r["flops"] / r["seconds"] / 1e12)
        peer = "NumPy" if r["group"] in ("attention", "decode") else "scipy bsr"
        assert r["peers"][peer]["ratio"] > 0
        assert r["name"] in said
    assert found["ceilings"]["bytes_per_second"] > 0 and found["ceilings"]["flops_per_second"]["float64"] > 0
    assert found["machine"]["numpy"] == np.__version__ and found["seed"] == 0
    assert found["command"] == "python -m bsrgemm bench all"
    names = {"roofline", "density", "block", "columns", "length", "spmv"}
    assert {path.name for path in drawn.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}


def test_a_quick_run_of_one_group_measures_less(tiny: None, tmp_path: Path) -> None:
    kept = tmp_path / "spmv.json"
    assert main(["bench", "spmv", "--quick", "--no-peers", "--json", str(kept)]) == 0
    found = results.read(kept)
    assert [r["block"] for r in found["rows"]] == [[1, 1], [2, 2]]
    assert all(r["peers"] == {} and "sustained" not in r for r in found["rows"])


def test_sizes_of_the_command_line_take_the_place_of_the_usual_ones(tiny: None, tmp_path: Path) -> None:
    kept = tmp_path / "own.json"
    command = ["bench", "gemm", "--size", "64", "--block", "16", "32", "--density", "0.5", "--columns", "4", "8"]
    assert main([*command, "--dtype", "float64", "float16", "--no-peers", "--json", str(kept)]) == 0
    found = results.read(kept)
    assert len(found["rows"]) == 8
    assert {(r["block"][0], r["columns"], r["dtype"]) for r in found["rows"]} == {
        (b, N, kind) for b in (16, 32) for N in (4, 8) for kind in ("float64", "float16")
    }
    assert main(found["command"].split()[3:]) == 0  # as it says, again


@pytest.mark.parametrize("group", suite.GROUPS)
@pytest.mark.parametrize("device", [Cpu(), types.SimpleNamespace(name="cuda")])
def test_problems_are_told_apart_by_their_names(group: str, device: Any) -> None:
    for quick in (False, True):
        found = problems([group], device, quick)
        assert found and len({str(problem) for problem in found}) == len(found)
        assert all(problem.flops > 0 and problem.memory >= problem.traffic > 0 for problem in found)
    few = problems([group], device, choice=Choice(sizes=(4096,), dtypes=("float16",)))
    assert few and all(problem.parameters()["dtype"] == "float16" for problem in few)


def test_a_wrong_result_is_shown_and_not_timed(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Product._ours

    def one_off(self: Product, A: Any, B: Any, out: Any) -> Callable[[], Any]:
        call = right(self, A, B, out)

        def wrong() -> Any:
            result = call()
            result[-1, -1] = -1000
            return result

        return wrong

    monkeypatch.setattr(Product, "_ours", one_off)
    kept = tmp_path / "wrong.json"
    assert main(["bench", "gemm", "--quick", "--json", str(kept)]) == 1
    assert all(r["wrong"] and r["seconds"] is None for r in results.read(kept)["rows"])
    assert capsys.readouterr().out.count("WRONG") == 2


@pytest.mark.parametrize("columns", [1, 7])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_single_element_that_is_not_there_is_noticed(columns: int, dtype: str) -> None:
    problem = Product("gemm", 96, (16, 16), 0.5, columns, dtype)
    ready = problem.ready(Cpu(), Cpu().normal)
    result = ready.call()
    assert ready.error(result) <= 1
    largest = np.unravel_index(np.abs(result.astype(np.float64)).argmax(), result.shape)
    result[largest] = 0
    assert ready.error(result) > 1
    result[largest] = np.nan
    assert not ready.error(result) <= 1


class _Odd:
    """A problem whose peers behave badly."""

    group = "gemm"
    computed_in = "float32"
    flops = traffic = memory = 1.0

    def __init__(self, **makers: Callable[[], Peer]) -> None:
        self.makers = makers

    def __str__(self) -> str:
        return "odd"

    def parameters(self) -> dict[str, Any]:
        return {}

    def ready(self, place: Any, draw: Any) -> Ready:
        return Ready(lambda: 0.0, lambda got: abs(got), {k.replace("_", " "): make for k, make in self.makers.items()})


def _raises(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def test_a_peer_that_fails_does_not_stop_the_run(tiny: None) -> None:
    later = iter([0.0, 0.0])

    def breaks() -> float:
        return next(later, None) or _fails_when_out(later)

    run = Suite(Cpu())
    found = run.measure(
        _Odd(
            missing=_raises(ModuleNotFoundError("no such library")),
            unsuited=_raises(NotImplementedError("no such block")),
            broken=_raises(RuntimeError("status 7\nmore")),
            wrong=lambda: Peer(lambda: 2.0),
            breaks_when_timed=lambda: Peer(breaks),
            otherwise_judged=lambda: Peer(lambda: 2.0, lambda got: 0.0),
            good=lambda: Peer(lambda: 0.0),
        )
    )
    assert "missing" not in found["peers"]
    assert found["peers"]["unsuited"] == {"without": "NotImplementedError: no such block"}
    assert found["peers"]["broken"] == {"failed": "RuntimeError: status 7"}
    assert found["peers"]["wrong"] == {"wrong": 2.0}
    assert found["peers"]["breaks when timed"] == {"failed": "ValueError: out"}
    assert {name for name, peer in found["peers"].items() if "ratio" in peer} == {"otherwise judged", "good"}
    assert found["seconds"] > 0
    assert cells.remarks([found]) == [
        "broken failed: RuntimeError: status 7 (odd)",
        "wrong is wrong and was not timed (odd)",
        "breaks when timed failed: ValueError: out (odd)",
    ]
    heads = cells.columns([found])
    assert "unsuited" not in heads and "broken" in heads


def test_a_ratio_is_the_median_of_those_of_the_rounds(tiny: None) -> None:
    """3, 2, 4, 5 and 1: the ratio of the medians of all times would be 2."""
    ours, theirs = [2.0, 8.0, 2.0, 8.0, 4.0], [6.0, 16.0, 8.0, 40.0, 4.0]

    class Scripted(timing.Clock):
        def samples(self, call: Callable[[], Any]) -> list[float]:
            seconds = call()
            return [seconds.pop(0)] * 5 if isinstance(seconds, list) else [1.0]

    class Place(Cpu):
        def clock(self, quick: bool) -> timing.Clock:
            return Scripted("cpu", quick)

    class Slow(_Odd):
        def ready(self, place: Any, draw: Any) -> Ready:
            return Ready(lambda: ours, lambda got: 0.0, {"peer": lambda: Peer(lambda: theirs)})

    found = Suite(Place()).measure(Slow())["peers"]["peer"]
    assert (found["ratio"], found["ratio_low"], found["ratio_high"]) == (3.0, 1.0, 5.0)
    assert found["seconds"] == 8.0 and found["count"] == 25


def _fails_when_out(rest: Iterator[float]) -> float:
    if next(rest, None) is None:
        raise ValueError("out")
    return 0.0


def test_what_does_not_fit_is_said_before_anything_is_allocated(tiny: None) -> None:
    class Full(Cpu):
        def free_bytes(self) -> int:
            return 1000

        def normal(self, shape: tuple[int, ...], kind: str) -> Any:
            raise AssertionError("allocated")

    found = Suite(Full()).measure(Product("gemm", 1 << 20, (64, 64), 0.5, 8192, "float32"))
    assert re.fullmatch(r"needs about [\d.]+ GB, 0.0 GB are free", found["failed"])


def test_a_place_without_room_has_no_roofs(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(place.Ceilings, "_copy", no_memory)
    monkeypatch.setattr(place.Ceilings, "_dense", no_memory)
    kept = tmp_path / "no_roof.json"
    assert main(["bench", "spmv", "--quick", "--json", str(kept)]) == 0
    found = results.read(kept)
    assert found["ceilings"] == {"bytes_per_second": None, "flops_per_second": {}}
    assert all(r["of_roofline"] is None and r["seconds"] for r in found["rows"])
    assert main(["report", str(kept)]) == 0


@pytest.mark.parametrize(("rows", "columns", "each"), [(8, 8, 3), (6000, 5000, 7), (4100, 4100, 4100)])
def test_even_patterns_have_distinct_sorted_columns(rows: int, columns: int, each: int) -> None:
    made = uniform(rows, columns, each)
    listed = made.indices.reshape(rows, each)
    assert (np.diff(listed, axis=1) > 0).all() and listed.min() >= 0 and listed.max() < columns


def test_an_interrupt_keeps_what_was_measured(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Suite._fill

    def stopped(self: Suite, found: dict[str, Any], problem: Any) -> None:
        if problem is TINY["gemm"][1]:
            raise KeyboardInterrupt
        real(self, found, problem)

    monkeypatch.setattr(Suite, "_fill", stopped)
    kept = tmp_path / "cut.json"
    assert main(["bench", "gemm", "--json", str(kept)]) == 130
    found = results.read(kept)
    assert found["cut"] == "interrupted" and [r["name"] for r in found["rows"]] == [str(TINY["gemm"][0])]
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["bench", "gems"], "invalid choice: 'gems'"),
        (["bench", "--size", "0"], "expected at least 1, got 0"),
        (["bench", "--density", "1.5"], "expected more than 0 and at most 1, got 1.5"),
        (["bench", "--dtype", "float8"], "invalid choice: 'float8'"),
        (["bench", "gemm", "--size", "100", "--block", "64"], "a size of 100 is not a multiple of the block 64"),
        (["bench", "decode", "--dtype", "tf32"], "nothing to measure: decode on cpu has no tf32"),
        (["bench", "attention", "--size", "100", "--density", "0.5"], "a length of 100 is not a multiple of the block"),
        (["bench", "--json", "/nowhere/at/all.json"], "/nowhere/at is not a folder"),
        (["bench", "--plot", "/nowhere/at/all"], "/nowhere/at is not a folder"),
        (["bench", "--compare", "/nowhere.json", "/nowhere.json"], "/nowhere.json: [Errno 2]"),
        (["report", "/nowhere.json"], "/nowhere.json: [Errno 2]"),
        (["report", "/nowhere.json", "-o", "/nowhere/at/all.html"], "/nowhere/at is not a folder"),
        (["report", "/nowhere.json", "-o", "/nowhere.json"], "/nowhere.json is the file of results"),
    ],
)  # fmt: skip
def test_bad_command_lines_are_refused(
    tiny: None, command: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bsrgemm._environment.cuda_problem", lambda: "a CUDA device (none)")
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--device", "cuda"])
    assert stop.value.code == 2
    assert "--device cuda: no GPU can be used here: a CUDA device (none)" in capsys.readouterr().err


# ---------------------------------------------------------------------------------- on a fake GPU
class _Clock:
    """cupy.cuda.Event: the n-th event is recorded after n milliseconds."""

    now = 0.0

    def record(self) -> None:
        _Clock.now += 1.0
        self.at = _Clock.now

    def synchronize(self) -> None:
        pass


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The GPU's place, on NumPy with CuPy's names."""
    names = ("asarray", "empty", "empty_like", "zeros", "ones", "concatenate", "einsum", "abs", "random")
    module: Any = types.ModuleType("cupy")
    for name in names:
        setattr(module, name, getattr(np, name))
    pool = types.SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)
    module.get_default_memory_pool = lambda: pool
    module.cuda = types.SimpleNamespace(
        Event=_Clock,
        Device=lambda: types.SimpleNamespace(synchronize=lambda: None),
        get_elapsed_time=lambda a, b: b.at - a.at,
        runtime=types.SimpleNamespace(memGetInfo=lambda: (1 << 40, 1 << 40)),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr("bsrgemm._kernels.timing._FLUSH_BYTES", 64)
    monkeypatch.setattr(timing.Clock, "__init__", partialmethod(timing.Clock.__init__, idle=0.0))
    monkeypatch.setattr("bsrgemm._kernels.timing.sleep_on_gpu", lambda nanoseconds: None)
    monkeypatch.setattr(place, "SUSTAINED", 0.0)
    monkeypatch.setattr(place, "_COPIED", {"cuda": 1 << 16})
    monkeypatch.setattr(place, "_DENSE", {"cuda": 32})

    def blas(A: Any, B: Any, out: Any, tf32: bool = False) -> Callable[[], Any]:
        return lambda: np.matmul(A, B, out=out)

    def sparse(A: Any, B: Any, out: Any) -> Callable[[], Any]:
        return lambda: A.toarray() @ B

    monkeypatch.setattr(product_peers, "dense_cublas", blas)
    monkeypatch.setattr(product_peers, "cusparse_bsr", sparse)
    monkeypatch.setattr(product_peers, "cusparse_ell", sparse)
    return Gpu()


def test_the_way_over_the_gpu_runs_on_a_fake_one(fake_gpu: Gpu) -> None:
    said: list[str] = []
    wanted = TINY["gemm"][:2] + TINY["spmv"][:2]
    run = Suite(fake_gpu, say=said.append)
    run.meet(wanted)
    assert said == []
    for problem in wanted:
        found = run.measure(problem)
        assert found["seconds"] == pytest.approx(1e-3) and found["sustained"] > 0, found
        if problem.group == "gemm":
            assert {n for n, p in found["peers"].items() if "ratio" in p} >= {"cuBLAS", "cuSPARSE BSR", "Blocked-ELL"}
    assert run.ceilings.as_dict()["flops_per_second"]["float32"] == pytest.approx(2 * 32**3 / 1e-3)
    assert run.ceilings.bytes_per_second() == pytest.approx(2 * (1 << 16) / 1e-3)


def test_kernels_that_cannot_be_met_are_said_and_measured_all_the_same(fake_gpu: Gpu) -> None:
    said: list[str] = []

    class Never(_Odd):
        def ready(self, place: Any, draw: Any) -> Ready:
            raise RuntimeError("no such kernel")

    run = Suite(fake_gpu, say=said.append)
    run.meet([Never()])
    assert said == ["odd: RuntimeError: no such kernel"]
    assert run.measure(Never())["failed"] == "RuntimeError: no such kernel"


# ------------------------------------------------------------------------------------- comparing
def test_what_got_slower_beyond_the_noise_is_told_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    before = [row("same"), row("slower"), row("faster"), row("noisy", noise=0.2), row("gone"), row("fails")]
    after = [row("same", 1.02e-3), row("slower", 1.2e-3), row("faster", 0.8e-3), row("noisy", 1.2e-3, 0.2),
             row("fails", None), row("new")]  # fmt: skip
    results.write(old, of(*before))
    results.write(new, of(*after))
    assert main(["bench", "--compare", str(old), str(new)]) == 1
    lines = capsys.readouterr().out.splitlines()
    verdicts = {line.split()[2].rstrip(":"): line.split()[0] for line in lines[:-1]}
    assert verdicts == {"slower": "slower", "noisy": "same", "same": "same", "faster": "faster", "fails": "lost"}
    assert lines[-1] == "4 problems in both: 1 slower, 1 faster, 1 lost"
    assert main(["bench", "--compare", str(old), str(old)]) == 0
    results.write(new, of(row("other")))
    assert main(["bench", "--compare", str(old), str(new)]) == 1
    assert "nothing in common" in capsys.readouterr().err


def test_a_slower_card_is_not_a_slower_kernel() -> None:
    old = of(row("a", 1e-3, cuBLAS=2e-3), row("b", 1e-3, cuBLAS=2e-3))
    new = of(row("a", 1.3e-3, cuBLAS=2.6e-3), row("b", 1.3e-3, cuBLAS=2e-3))
    a, b = changes.changes(old, new)
    assert not a.slower and a.reference == "cuBLAS" and a.times == pytest.approx(1)
    assert b.slower and b.times == pytest.approx(1.3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "rows": []}', "\xff"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"other\.json: "):
        results.read(path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    results.write(path, of(row()))
    with pytest.raises(TypeError):
        results.write(path, {"rows": [object()]})
    assert results.read(path)["rows"][0]["name"] == "a"


# --------------------------------------------------------------------------------------- showing
def test_a_terminal_gets_tables_that_grow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    with screen.screen(2) as shown:
        assert isinstance(shown, screen.Live)
        shown.doing("a", "timing")
        shown.row([row("a", scipy_bsr=2e-3, dense_BLAS=0.5e-3)])
        shown.row([row("a", scipy_bsr=2e-3, dense_BLAS=0.5e-3), row("b", None)])
        shown.end([row("a")])
    said = capsys.readouterr().out
    for text in ("A @ B, block-sparse A, dense B", "2.00 x", "0.50 x", "OSError: no", "1.00 ms", "50%"):
        assert text in said


def test_without_a_terminal_each_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.screen(2) as shown:
        shown.row([row("a", scipy_bsr=2e-3)])
        shown.row([row("a"), row("b", None)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:2] == ["A @ B, block-sparse A, dense B"]
    assert lines[2].split(" | ")[1:] == [
        "+- 1.0%",
        "1.0 TFLOP/s",
        "50% of the roof",
        "2.00 x scipy bsr",
    ]
    assert lines[3].split() == ["b", "OSError:", "no"]


# ------------------------------------------------------------------------------------- the report
class _Page(html.parser.HTMLParser):
    """Opens and closes of a page, and what it refers to."""

    void = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        assert tag != "script"
        if tag not in self.void:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    kept = tmp_path / "r.json"
    rows = [row("<b>&", scipy_bsr=2e-3), row("slow", 2e-3, dense_BLAS=1e-3), row("none", None)]
    results.write(kept, of(*rows, command="python -m bsrgemm bench gemm", cut="interrupted"))
    assert main(["report", str(kept)]) == 0
    assert f"written: {tmp_path / 'r.html'}" in capsys.readouterr().out
    return tmp_path / "r.html"


def test_a_report_is_one_page_that_needs_nothing_else(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    found = _Page(text)
    assert found.stack == [] and all(link.startswith("data:image/svg+xml;base64,") for link in found.links)
    assert "http" not in re.sub(r"data:[^\"]*", "", text) and "url(" not in text
    whole = " ".join(found.texts)
    for part in ("<b>&", "2.00 x", "0.50 x", "OSError: no", "python -m bsrgemm bench gemm", "cut short: interrupted",
                 "abacus, 2 cores", "copy 10 GB/s"):  # fmt: skip
        assert part in whole


def test_a_report_opens_in_a_browser(report: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("there is no Chromium or Chrome on the PATH")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", profile, "--dump-dom", report.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("<tr>") >= 4 and "&lt;b&gt;&amp;" in done.stdout


def test_pictures_show_what_was_measured() -> None:
    blocks = [row(str(b), 1e-3 / b, cuBLAS=2e-4) | {"block": [b, b]} for b in (16, 32, 64)]
    densities = [
        row(f"d{d}", 1e-3 * d, cuBLAS=6e-4) | {"density": d, "asked_density": d, "columns": 8}
        for d in (0.25, 0.5, 0.75, 1.0)
    ]
    found = figures.figures(of(*blocks, *densities))
    assert set(found) == {"roofline", "density", "block"}
    (line,) = [x for x in found["block"].axes[0].get_lines() if x.get_label() == "bsrgemm"]
    np.testing.assert_allclose(line.get_xdata(), [16, 32, 64])
    np.testing.assert_allclose(line.get_ydata(), [16.0, 32.0, 64.0])
    labels = [text.get_text() for text in found["density"].axes[0].get_legend().get_texts()]
    assert labels == ["16 x 16 (up to 0.60)"]
    assert figures.figures(of()) == {}


def test_page_and_terminal_say_the_same() -> None:
    rows = [row("a", scipy_bsr=2e-3)]
    heads = cells.columns(rows)
    text = page.page(of(*rows), "command", {})
    assert all(cell in text for cell in cells.cells(rows[0], heads))


def test_the_command_line_knows_the_groups_and_kinds_of_the_suite() -> None:
    assert bench_command._GROUPS == suite.GROUPS
    assert json.dumps(bench_command._DTYPES) == json.dumps(suite.KINDS)
