"""The writer of tables: columns, Markdown, JSON, pages and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import publish, report, studies
from bench.machine import commit, describe
from bench.report import RATE, TIME, USUAL, Column, Peers

ROWS: list[dict[str, Any]] = [
    {"what": "a", "seconds": 1e-3, "flops": 6e7, "peers": {"cuBLAS": {"ratio": 2.345}, "torch": {"without": "blocks"}}},
    {"what": "b | c", "seconds": 2e-3, "flops": 6e9, "peers": {"cuBLAS": {"failed": "OSError"}}, "sustained": 4e-3},
    {"what": "d", "wrong": True, "error": 3.0, "peers": {}},
]


def test_a_table_has_a_column_for_each_peer_that_serves_a_row() -> None:
    head, *lines = report.table(USUAL, ROWS)
    assert head == ["", "time", "rate", "cuBLAS", "back to back"]
    assert lines[0] == ["a", "1.00 ms", "60.0 GFLOP/s", "2.35 x", ""]
    assert lines[1] == ["b | c", "2.00 ms", "3.00 TFLOP/s", "failed", "1.50 TFLOP/s"]
    assert lines[2] == ["d", "WRONG: 3.00 times what rounding explains", "", "", ""]


def test_markdown_and_text_have_the_same_cells() -> None:
    table = report.table((TIME, RATE), ROWS)
    text = report.markdown(table)
    assert text.splitlines()[1] == "| --- | ---: | ---: |" and "| b / c | 2.00 ms | 3.00 TFLOP/s |" in text
    assert report.aligned(table).splitlines()[1].split() == ["a", "1.00", "ms", "60.0", "GFLOP/s"]
    assert report.line(USUAL, ROWS[0], 3) == "  a   1.00 ms | 60.0 GFLOP/s | cuBLAS 2.35 x"
    assert "WRONG" in report.line(USUAL, ROWS[2]) and report.line((Column("x", lambda row: ""),), ROWS[0])


def test_the_best_peer_back_to_back_is_a_multiple_of_our_time() -> None:
    row = {"what": "a", "seconds": 1.0, "flops": 1e12, "sustained": 2.0,
           "peers": {"x": {"ratio": 3.0, "sustained": 5.0}, "y": {"ratio": 4.0, "sustained": 3.0}}}  # fmt: skip
    head, line = report.table(USUAL, [row])
    assert line[head.index("best peer back to back")] == "1.50 x"
    assert report.table((Peers(),), [row])[1] == ["a", "3.00 x", "4.00 x"]


def test_files_are_written_whole_and_read_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    report.write(path, {"rows": ROWS})
    assert report.read(path)["rows"] == ROWS and [x.name for x in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(TypeError):
        report.write(path, {"rows": object()})
    assert report.read(path)["rows"] == ROWS
    for text in ("{", '{"format": 1, "rows": []}', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"a\.json"):
            report.read(path)


# ------------------------------------------------------------------------------------------- pages
def test_the_pages_show_the_results() -> None:
    assert publish.main(["--check"]) == 0, "run python -m bench publish"


def test_every_result_is_shown_and_every_study_of_a_table_has_one() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in publish.PAGES)
    shown = {name for _, name, _, _ in publish._MARKER.findall(text)}
    files = {path.stem.rpartition("_")[0].replace("_", "-") for path in publish.RESULTS.glob("*.json")}
    assert shown == files <= set(studies.ALL)


def test_every_result_says_where_it_comes_from() -> None:
    for path in publish.RESULTS.glob("*.json"):
        found = report.read(path)
        assert found["rows"] and (found["commit"] or "note" in found) and found["machine"]["date"], path
        assert path.name == f"{found['study'].replace('-', '_')}_{found['device']}.json"


def test_a_table_is_written_between_its_markers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench:products:2 -->\nold\n<!-- /bench:products -->\nafter\n")
    options = ["--pages", str(page), "--no-pictures"]
    assert publish.main([*options, "--check"]) == 1 and "old" in page.read_text()
    assert publish.main(options) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("\n| ") == 4 and "commit" in text
    assert publish.main([*options, "--check"]) == 0
    page.write_text("<!-- bench:nothing -->\n<!-- /bench:nothing -->")
    with pytest.raises(SystemExit):
        publish.main(options)
    assert "'nothing'" in capsys.readouterr().err


def test_pictures_are_drawn_of_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench import pictures

    drawn = pictures.draw_all(publish.RESULTS, tmp_path)
    assert [path.stem for path in drawn] == list(pictures.ALL)
    stored = {path.stem for path in publish.PICTURES.glob("*.svg")}
    assert stored == set(pictures.ALL)
    for path in drawn:
        text = path.read_text(encoding="utf-8")
        assert "H200" in text and "dc:date" not in text and len(text) < 200_000


def test_the_heading_names_machine_commit_and_versions() -> None:
    about = describe()
    found = {"machine": about | {"peers": {"nvidia-cudnn-cu12": "9.1"}}, "commit": "0123456789", "dirty": True,
             "cut": "interrupted", "note": "a note"}  # fmt: skip
    text = publish.heading(found)
    assert about["date"] in text and "commit 0123456 with changes" in text and "cudnn 9.1" in text
    assert text.endswith("; a note; cut short: interrupted.")


def test_the_commit_is_that_of_the_checkout_or_what_was_told(tmp_path: Path) -> None:
    assert commit("abc") == {"commit": "abc", "dirty": False}
    assert commit("abc+") == {"commit": "abc", "dirty": True}
    assert commit(root=tmp_path) == {"commit": None, "dirty": None}
