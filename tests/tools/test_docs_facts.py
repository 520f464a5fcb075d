"""The facts on the pages are those of the results, the record and the code: docs/facts.py knows which."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .test_readme import ROOT


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bsrgemm_docs_facts", ROOT / "docs" / "facts.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


facts = _load()
_MARKER = re.compile(r"<!-- (/?)facts:([\w-]+) -->")


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", facts.PAGES, ids=_name)
def test_the_tables_of_the_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert facts.with_tables(text) == text, "run python docs/facts.py"


@pytest.mark.parametrize("fact", facts.SENTENCES, ids=lambda fact: f"{fact.page}: {fact.words}")
def test_the_values_of_the_sentence_are_true(fact: facts.Fact) -> None:
    (found,) = fact.pattern.finditer((ROOT / fact.page).read_text(encoding="utf-8"))
    assert found.groups() == tuple(str(value) for value in fact.values()), "run python docs/facts.py"


def test_every_table_stands_somewhere_and_every_marker_is_closed() -> None:
    shown = []
    for page in facts.PAGES:
        markers = _MARKER.findall(page.read_text(encoding="utf-8"))
        assert [name for end, name in markers if not end] == [name for end, name in markers if end], page
        shown += [name for end, name in markers if not end]
    assert set(shown) == set(facts.TABLES)


def test_every_page_of_a_fact_is_looked_at() -> None:
    assert {fact.page for fact in facts.SENTENCES} <= {_name(page) for page in facts.PAGES}


# ------------------------------------------------------------------------------ the checks can fail
def test_a_wrong_value_is_replaced() -> None:
    fact = facts.Fact("page", "found {} errors in {} runs", lambda: (0, "1,024"))
    assert facts.with_values("It found 2 errors\nin 7 runs.", [fact]) == "It found 0 errors\nin 1,024 runs."


def test_a_sentence_that_is_gone_or_there_twice_is_told() -> None:
    fact = facts.Fact("page", "found {} errors", lambda: (0,))
    for text in ("nothing", "found 1 errors, found 2 errors"):
        with pytest.raises(ValueError, match="times there"):
            facts.with_values(text, [fact])


def test_a_changed_cell_is_seen() -> None:
    text = facts.with_tables("<!-- facts:crossover -->\n<!-- /facts:crossover -->")
    assert facts.with_tables(text) == text
    changed = text.replace("| 64 x 64 |", "| 64 x 32 |")
    assert changed != text == facts.with_tables(changed)


def test_an_unknown_table_is_told() -> None:
    with pytest.raises(KeyError):
        facts.with_tables("<!-- facts:nothing -->\n<!-- /facts:nothing -->")


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.1e-3, "1.10"), (0.1452, "145"), (2.153, "2,153"), (0.9999, "1,000"), (7.8e-5, "0.0780")]
)
def test_milliseconds_have_three_digits(seconds: float, text: str) -> None:
    assert facts.ms(seconds) == text


#: Tables with figures of this package that a change of a kernel makes old.
_MEASURED = (
    "crossover", "cpu", "spgemm", "uneven", "host", "product-errors", "attention-errors", "first-call", "sizes",
    "other-dtypes", "rectangles", "mask-costs", "long-sequences", "gradient-rates",
)  # fmt: skip


@pytest.mark.parametrize("name", _MEASURED)
def test_figures_of_older_kernels_are_marked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = sys.modules["fact_tables"]
    read = tables.results
    for stale in (False, True):
        monkeypatch.setattr(tables, "results", lambda file, stale=stale: [r | {"stale": stale} for r in read(file)])
        text = tables.TABLES[name]()
        assert (tables.MARK in text) is stale
        assert text.endswith(tables.FOOTNOTE) is stale
