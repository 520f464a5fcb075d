"""bench/run/compare.py: what it asks of two trees, when it calls one slower, and two real processes on the CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsrgemm._benchmark.measure import compare, compare_worker
from bsrgemm._benchmark.measure.compare import Line, compare_case, compare_host

ROOT = Path(__file__).resolve().parents[2]
Asked = list[tuple[str, str, str]]


class Fake:
    """A tree whose times are known; it notes in which order it is asked."""

    def __init__(self, name: str, asked: Asked, seconds: list[float], peer: float = 1.0, **more: Any) -> None:
        self.name, self.asked, self.seconds, self.peer, self.more = name, asked, list(seconds), peer, more

    def ask(self, **command: Any) -> dict[str, Any]:
        what = command["do"]
        self.asked.append((self.name, what, command.get("case", "")))
        if what in self.more:
            return self.more[what]
        if what == "hello":
            return {"cases": ["a", "b", "solver"]}
        if what == "prepare":
            return {"checksum": 1.0, "peer": "cuBLAS"}
        if what == "time":
            return {"ours": self.seconds.pop(0), "peer": self.peer}
        return {"adds": {"host: call": self.seconds.pop(0)}} if what == "host" else {}


def both(old: list[float], new: list[float], **more: Any) -> tuple[Fake, Fake, Asked]:
    asked: Asked = []
    return Fake("old", asked, old), Fake("new", asked, new, **more), asked


def test_old_and_new_are_timed_in_turn_and_dropped() -> None:
    old, new, asked = both([1.0, 1.1, 1.2], [1.0, 1.1, 1.2])
    assert compare_case(old, new, "a").verdict == "same"
    assert sorted(asked[:2]) == [("new", "prepare", "a"), ("old", "prepare", "a")]
    assert [name for name, what, _ in asked if what == "time"] == ["old", "new"] * compare.ROUNDS
    assert [what for _, what, _ in asked[-2:]] == ["drop", "drop"]


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ([1.015, 1.015, 1.015], "same"),  # below 2 %
        ([1.03, 1.03, 1.03], "slower"),
        ([1.03, 1.10, 1.00], "same"),  # within the spread of the rounds
        ([0.9, 0.9, 0.9], "faster"),
    ],
)
def test_a_loss_beyond_two_percent_and_the_spread_is_slower(new: list[float], verdict: str) -> None:
    old_side, new_side, _ = both([1.0, 1.0, 1.0], new)
    assert compare_case(old_side, new_side, "a").verdict == verdict


def test_a_card_that_slows_down_for_both_is_not_a_slower_tree() -> None:
    old, new, _ = both([1.0] * 3, [1.3] * 3, peer=1.3)
    line = compare_case(old, new, "a")
    assert line.verdict == "same" and line.ratio == pytest.approx(1.0)
    assert line.old == 1.0 and line.new == 1.3 and line.peer == "cuBLAS"


def test_what_fails_or_gives_another_result_in_the_new_tree_alone_is_lost() -> None:
    for more in (
        {"prepare": {"failed": "ImportError: gone"}},
        {"time": {"failed": "OSError: gone"}},
        {"prepare": {"checksum": 1.5, "peer": ""}},
        {"prepare": {"checksum": float("nan"), "peer": ""}},
    ):
        old, new, _ = both([1.0] * 3, [1.0] * 3, **more)
        line = compare_case(old, new, "a")
        assert line.verdict == "lost" and "lost: " in line.cells()[-1] and line.rounds == []
    old, new, _ = both([], [])
    old.more["prepare"] = {"failed": "AttributeError: not there yet"}
    assert compare_case(old, new, "a").verdict == "nothing"


def test_host_times_are_multiples_of_an_addition_and_may_be_noisier() -> None:
    old, new, _ = both([10.0] * 3, [10.4] * 3)
    (line,) = compare_host(old, new)
    assert line.verdict == "same" and line.cells()[1:3] == ["10 x add", "10.4 x add"]
    old, new, _ = both([10.0] * 3, [10.6] * 3)
    assert compare_host(old, new)[0].verdict == "slower"
    old, new, _ = both([10.0] * 3, [], host={"failed": "TypeError: no"})
    assert compare_host(old, new)[0].verdict == "lost"


def test_all_wanted_cases_of_the_new_tree_are_compared() -> None:
    old, new, _ = both([1.0] * 9, [1.0] * 9)
    lines = compare.compare(old, new, lambda name: name != "solver", lambda text: None)
    assert [line.name for line in lines] == ["a", "b", "host: call"]
    text = compare.table([*lines, Line("c", 0.02, failed=(None, "no"))]).splitlines()
    assert text[0].split(" | ")[1:5] == ["    old", "    new", "ratio", "spread"]
    assert len({line.index("|") for line in text if "|" in line}) == 1 and text[-1].endswith("lost: no")


def test_the_cases_run_on_the_cpu_with_public_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compare_worker.SIZES["cpu"], "side", 256)
    worker = compare_worker.Worker("cpu")
    headline = {f"A @ B, blocks of {b}" for b in (128, 64, 32, 16)} | {
        f"attention, {mask}" for mask in ("full", "causal", "window", "random blocks")
    }
    assert headline < set(worker.cases()) and "solver" in worker.cases()
    for name in ("A @ B, blocks of 64", "attention, window", "A @ x, 3 x 3 float64", "sddmm, blocks of 128"):
        first, again = (worker.answer({"do": "prepare", "case": name}) for _ in range(2))
        assert first == again and np.isfinite(first["checksum"]) and first["checksum"] > 0
    assert worker.peer("A @ x, 3 x 3 float64")[0] == worker.peer("decode, 1 sequence")[0] == "copy"
    assert worker.peer("A @ B, blocks of 64")[0] == "cuBLAS"
    with pytest.raises(ValueError, match="do: expected"):
        worker.answer({"do": "nothing"})
    source = Path(compare_worker.__file__).read_text()
    assert "bsrgemm._" not in source and "from .." not in source


def test_two_processes_load_two_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "bsrgemm", tmp_path / "bsrgemm", ignore=shutil.ignore_patterns("__pycache__"))
    arguments = [str(tmp_path), str(ROOT), "--device", "cpu", "--only", "decode, 1"]
    compare.main(arguments)
    out = capsys.readouterr().out
    assert "decode, 1 sequence" in out and "1 cases" in out and "-: " not in out
    (tmp_path / "bsrgemm" / "_attention" / "decode.py").write_text("raise RuntimeError('spoiled')\n")
    with pytest.raises(SystemExit) as stop:
        compare.main(arguments)
    assert stop.value.code == 2 and "RuntimeError: spoiled" in capsys.readouterr().err


def test_a_folder_without_bsrgemm_is_refused(tmp_path: Path) -> None:
    script = ROOT / "bench" / "run" / "compare.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(ROOT), "--device", "cpu"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "expected a folder that holds a folder bsrgemm" in done.stderr
