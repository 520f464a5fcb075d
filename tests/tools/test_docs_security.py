"""What docs/security.md says of the package is what the package does."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels import disk_cache

from .test_readme import ROOT

PAGE = " ".join((ROOT / "docs" / "security.md").read_text(encoding="utf-8").split())
PACKAGE = Path(bg.__file__).parent


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call in the package, with the dotted name of what is called."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node


def test_the_page_names_the_variables_that_are_read() -> None:
    read = {node.args[0].value for name, node in calls() if name in ("os.environ.get", "os.getenv")}
    sentence = re.search(r"The package itself reads (?P<names>.*?)\. They choose", PAGE)
    assert sentence and set(re.findall(r"`(\w+)`", sentence["names"])) == read


def test_the_package_starts_no_program() -> None:
    starts = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if re.search(r"subprocess\.(run|Popen|check_)|os\.system|os\.exec", path.read_text(encoding="utf-8"))
    }
    assert starts == set()
    assert "The package starts no program" in PAGE


def test_nothing_imports_a_library_of_the_network() -> None:
    assert "nothing uses the network" in PAGE
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"socket", "urllib", "http", "requests", "ssl"}, path


ran: list[int] = []


def run(number: int) -> int:
    ran.append(number)
    return number


class Runs:
    """An object that runs a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return run, (1,)


def test_a_file_is_never_unpickled() -> None:
    assert "`load_npz` unpickles nothing" in PAGE
    file = io.BytesIO()
    arrays = {"indices": [0], "indptr": [0, 1], "shape": [2, 2], "format": np.array(b"bsr")}
    np.savez(file, data=np.array([[[Runs(), 1], [1, 1]]], dtype=object), **arrays)
    file.seek(0)
    with pytest.raises(ValueError):
        bg.load_npz(file)
    assert ran == []
    file.seek(0)
    np.load(file, allow_pickle=True)["data"]
    assert ran == [1]


def test_bad_indices_are_refused_on_the_cpu() -> None:
    assert "Constructors check index arrays, on the CPU and on the GPU. A bad index raises ValueError." in PAGE
    with pytest.raises(ValueError, match="indices"):
        bg.bsr_array((np.ones((1, 2, 2)), [5], [0, 1, 1]), shape=(4, 4))
    assert "index arrays that were written in place are checked again before they are used" in PAGE
    for bad in (10**6, -5):
        A = bg.bsr_array((np.ones((2, 2, 2)), ([0, 1], [0, 1])), shape=(4, 4))
        A.indices[0] = bad
        with pytest.raises(ValueError, match="indices"):
            A @ np.ones(4)


def test_the_page_says_how_long_the_rest_of_a_killed_writer_stays() -> None:
    assert "What remains of the file is removed an hour later" in PAGE and disk_cache._ABANDONED == 3600


def test_the_short_page_leads_to_the_long_one() -> None:
    short = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", short)
    assert targets == ["docs/security.md"] and (ROOT / targets[0]).is_file()
