"""Two checkouts in turn: what counts as slower, and two real processes on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import compare, profile
from bench.compare import Line
from bench.machine import ROOT


def line(*rounds: tuple[float, float, float, float], **more: Any) -> Line:
    return Line("case", rounds=list(rounds), **more)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (line((1.0, 1.0, 1.01, 1.0)), "same"),
        (line((1.0, 1.0, 1.05, 1.0)), "slower"),
        (line((1.0, 1.0, 0.9, 1.0)), "faster"),
        (line((1.0, 1.0, 1.5, 1.5)), "same"),  # the card was slower, not we
        (line((1.0, 1.0, 1.05, 1.0), (1.0, 1.0, 1.2, 1.0)), "slower"),
        (line((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.4, 1.0)), "same"),  # as far as the spread
        (line((1.0, 1.0, 1.04, 1.0), least_loss=compare.LEAST_HOST_LOSS), "same"),
        (line(failed=(None, "ValueError")), "lost"),
        (line(failed=("ValueError", None)), "nothing"),
    ],
)
def test_the_verdict_of_a_line(found: Line, verdict: str) -> None:
    assert found.verdict == verdict
    assert verdict in found.cells()[-1] and len(found.cells()) == 7


class Told:
    """A side that answers from a list."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, list[str]()

    def ask(self, **command: Any) -> dict[str, Any]:
        self.asked.append(command["do"])
        found: dict[str, Any] = self.answers.get(command["do"], {})
        return found


def test_another_result_is_lost_and_is_not_timed() -> None:
    old, new = (Told(prepare={"checksum": x, "beside": "copy"}) for x in (1.0, 1.1))
    found = compare.compare_case(old, new, "a")
    assert found.verdict == "lost" and "another result" in found.cells()[-1] and "time" not in new.asked
    assert old.asked[-1] == new.asked[-1] == "drop"


def test_sides_take_turns() -> None:
    order: list[int] = []
    sides = [Told(prepare={"checksum": 1.0, "beside": "copy"}, time={"ours": 1.0, "card": 1.0}) for _ in range(2)]
    for k, side in enumerate(sides):
        plain = side.ask
        side.ask = lambda k=k, plain=plain, **c: (order.append(k) if c["do"] == "time" else None, plain(**c))[1]  # type: ignore[method-assign]
    assert compare.compare_case(*sides, "a", rounds=2).verdict == "same"
    assert order == [0, 1, 0, 1]


@pytest.fixture
def sides() -> Iterator[list[compare.Process]]:
    found = [compare.Process(ROOT, "cpu", ["products", "gradients"], False) for _ in range(2)]
    yield found
    for side in found:
        side.close()


def test_two_processes_time_the_cases_of_this_checkout(sides: list[compare.Process]) -> None:
    assert sides[0].hello == sides[1].hello
    cases = sides[0].hello["cases"]
    assert cases[0].startswith("products: float32 64 x 64")
    found = compare.compare_case(sides[0], sides[1], cases[0], rounds=1)
    assert found.failed == (None, None) and found.ratio > 0 and found.beside in ("copy", "dense product")
    assert "ValueError" in sides[0].ask(do="nothing")["failed"]
    assert "KeyError" in sides[0].ask(do="prepare", case="unknown")["failed"]


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a folder that holds a folder bsrgemm"):
        compare.Process(tmp_path, "cpu", ["products"], False)


def test_a_study_without_cases_is_refused() -> None:
    with pytest.raises(ValueError, match="llama: expected a study with cases"):
        compare.Process(ROOT, "cpu", ["llama"], False)


def test_the_package_of_a_tree_is_loaded_with_the_clock_of_this_checkout(tmp_path: Path) -> None:
    """A package of another checkout that has its own clock, and no benchmark."""
    kernels = tmp_path / "bsrgemm" / "_kernels"
    kernels.mkdir(parents=True)
    for folder in (kernels.parent, kernels):
        (folder / "__init__.py").write_text("")
    (kernels / "timing.py").write_text("raise AssertionError('the clock of this checkout was wanted')")
    code = (
        f"import runpy; worker = runpy.run_path({str(ROOT / 'bench' / 'compare_worker.py')!r})\n"
        f"worker['load']({str(tmp_path)!r})\nimport bsrgemm, bsrgemm._kernels.timing as clock, bench\n"
        "print(bsrgemm.__file__, clock.__file__, bench.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    package, clock, bench = map(Path, done.stdout.split())
    assert package.is_relative_to(tmp_path) and clock.is_relative_to(ROOT) and bench.is_relative_to(ROOT)


# ------------------------------------------------------------------------------------------ profile
def test_the_command_line_of_ncu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile.main(["products", "--block", "32", "--dry-run", "--", "--set", "full"]) == 0
    said = capsys.readouterr().out
    assert "--profile-from-start off --set full" in said and said.strip().endswith("products --block 32 --inside")
    monkeypatch.setenv("PATH", "/nowhere")
    for words in (["everyday"], ["llama"], ["nothing"], ["products"]):
        with pytest.raises(SystemExit):
            profile.main(words)
    assert "there is no program ncu" in capsys.readouterr().err
