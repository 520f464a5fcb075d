"""Figures stay valid while a kernel keeps its machine code: bench/publish/same_code.py and what reads its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bsrgemm._benchmark import machine_code, provenance
from bsrgemm._kernels import jit, sources

EXPAND = jit.KernelSpec("expand.cu", "expand", (("INDEX", "i32"),))
NAME = "expand.cu:expand -DINDEX=i32"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A file that says what has the same machine code, in place of the one of the checkout."""
    file = tmp_path / "same_code.json"
    monkeypatch.setattr(machine_code, "FILE", file)
    machine_code._groups.cache_clear()
    yield file
    machine_code._groups.cache_clear()


def compiled(folder: Path, old: str, new: str) -> bytes:
    """The binary of `expand` with a change in its source."""
    for name, text in sources.gather(EXPAND.source).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(old, new) if name == EXPAND.source else text)
    assert old == new or (folder / EXPAND.source).read_text() != sources.gather(EXPAND.source)[EXPAND.source]
    return jit.compile_cubin(EXPAND, "sm_90a", root=folder).cubin


def test_other_names_give_the_same_machine_code_and_other_operations_another(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    plain = machine_code.code_of(compiled(tmp_path / "a", "", ""))
    assert plain == machine_code.code_of(compiled(tmp_path / "b", "#include", "struct Unused { int x; };\n#include"))
    assert plain != machine_code.code_of(compiled(tmp_path / "c", "kEntries = 8", "kEntries = 16"))
    more = compiled(tmp_path / "d", "#include", "constexpr bool kUnused = false;\n#include")  # a place for its address
    assert plain == machine_code.code_of(more)


def test_a_figure_stays_valid_while_the_machine_code_is_the_same(groups: Path) -> None:
    now = provenance.digest(NAME)
    assert not provenance.changed({NAME: now})
    assert provenance.changed({NAME: "0123"})
    groups.write_text(json.dumps({"kernels": {NAME: [["0123", now]], "other": [["4567", now]]}}))
    machine_code._groups.cache_clear()
    assert not provenance.changed({NAME: "0123"})
    assert provenance.changed({NAME: "4567"})
    assert provenance.changed({})


def test_digests_of_one_machine_code_are_one_group() -> None:
    groups = machine_code.joined([], "a", "b")
    groups = machine_code.joined(groups, "c", "d")
    assert machine_code.joined(groups, "b", "c") == [["a", "b", "c", "d"]]
