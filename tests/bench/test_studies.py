"""Every study: its cases can be named without a card, and the small ones are measured on the CPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import bench.place
from bench import report, studies
from bench.__main__ import chosen
from bench.machine import ROOT
from bench.measure import Run
from bench.place import Place
from bench.study import Sizes

CASES = [name for name, study in studies.ALL.items() if study.cases is not None]


class Card(Place):
    """What names the cases of a card and has none."""

    def __init__(self, quick: bool) -> None:
        super().__init__("cpu", quick)
        self.device, self.on_gpu = "cuda", True


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of a few calls, and roofs of a small product and a small copy."""
    monkeypatch.setattr(bench.place, "_LEAST", 2)
    monkeypatch.setattr(bench.place, "_MOST", 2)
    monkeypatch.setattr(bench.place, "ROUNDS", {"cpu": (1, 1)})
    monkeypatch.setattr(bench.place, "_DENSE", {"cpu": 64})
    monkeypatch.setattr(bench.place, "_COPIED", {"cpu": 1 << 16})


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_cases_of_a_card_are_named_without_one(name: str, quick: bool) -> None:
    cases = studies.ALL[name].cases(Card(quick))
    names = [str(case) for case in cases]
    assert names and len(set(names)) == len(names)
    for case in cases if quick else cases[:3]:  # counting the pairs of a large mesh takes a second
        assert case.flops > 0 and case.moved > 0 and case.memory > 0
        assert case.kind in ("float16", "bfloat16", "e4m3", "float32", "tf32", "float64")


@pytest.mark.parametrize("name", CASES)
def test_a_quick_run_has_fewer_cases(name: str) -> None:
    quick, every = ({str(case) for case in studies.ALL[name].cases(Card(quick))} for quick in (True, False))
    others = {"products-density": len(quick), "vectors": 1}.get(name, 0)  # other densities; a few columns
    assert len(quick) <= len(every) and len(quick - every) <= others


SMALL = {"products-error": 2, "masks": 5, "gradients-error": 4, "attention-error": 3, "overhead": 11}


@pytest.mark.parametrize("name", SMALL)
def test_studies_without_cases_measure_on_the_cpu(name: str) -> None:
    study = studies.ALL[name]
    rows = list(study.rows(Run(Place("cpu", quick=True))))
    assert len(rows) == SMALL[name] and not [row for row in rows if report.status(row)]
    table = report.table(study.columns, rows)
    assert len({len(line) for line in table}) == 1 and all(line[1] for line in table)


TINY = {
    "products": Sizes(size=(64,), block=(16,), columns=(8, 1), dtype=("float32", "float16", "float64")),
    "vectors": Sizes(size=(900,), block=(3,), columns=(1, 4)),
    "attention": Sizes(size=(64,), dtype=("float32",)),
    "decode": Sizes(size=(64,)),
}


@pytest.mark.parametrize("name", TINY)
def test_sizes_from_the_command_line_are_measured(name: str) -> None:
    (study,) = chosen([name], "cpu", TINY[name])
    rows = list(study.rows(Run(Place("cpu", quick=True))))
    assert rows and not [row for row in rows if report.status(row)]
    assert all(peer.get("ratio", 1) > 0 for row in rows for peer in row["peers"].values())
    assert all(row["seconds"] > 0 and row["error"] <= 1 and row["moved"] > 0 for row in rows)


def test_masks_and_densities_replace_full_and_causal() -> None:
    place = Place("cpu", quick=True)
    (study,) = chosen(["attention"], "cpu", Sizes(size=(128,), density=(0.5,), block=(32,), dtype=("float32",)))
    (row,) = study.rows(Run(place, with_peers=False))
    assert row["blocks"] == (32, 2) and row["error"] <= 1 and row["peers"] == {}


# ---------------------------------------------------------------------------------------- the command
def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_list_names_every_study() -> None:
    done = run("--list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(studies.ALL)
    assert set(studies.USUAL) <= set(studies.ALL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "there is no study 'nothing'"),
        (["everyday", "--device", "cpu", "--size", "8"], "change other studies"),
        (["conversions", "--device", "cpu"], "measured on cuda only"),
        (["products", "--device", "cpu", "--size", "100", "--block", "64"], "100 is not a multiple of the block 64"),
        (["products", "--density", "2"], "expected more than 0"),
        (["products", "--device", "cpu", "--dtype", "e4m3"], "there is no e4m3 on cpu"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(words: list[str], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2 and said in done.stderr


def test_a_run_writes_one_file_for_each_study(tmp_path: Any) -> None:
    words = ["products", "--device", "cpu", "--quick", "--no-peers", "--size", "64", "--block", "16", "--columns", "4"]
    done = run(*words, "--out", str(tmp_path), "--commit", "abc+")
    assert done.returncode == 0, done.stderr
    found = report.read(tmp_path / "products_cpu.json")
    assert (found["commit"], found["dirty"], found["study"]) == ("abc", True, "products")
    assert found["machine"]["numpy"] and "copy" in found["roofs"] and len(found["rows"]) == 1
    assert "float32 16 x 16" in done.stdout and "1 rows" in done.stdout
