"""The report: units of the machine, the CPU's name, a warning where timings spread, and pictures without overlaps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bsrgemm._benchmark import machine
from bsrgemm._benchmark.show import page
from tests.tools.test_bench_command import of, row


def cpu_results(noise: float = 0.01) -> dict[str, Any]:
    """Rows of a CPU of 80 GFLOP/s that fill every picture."""
    about = {"date": "2031-05-04", "bsrgemm": "9.8", "cpu": "Some Maker's CPU 3000 @ 2.5 GHz", "cores": 2}
    peers = {"dense_BLAS": 9e-3, "scipy_bsr": 5e-2, "scipy_csr": 7e-2}
    rate = {"flops": 1e9, "traffic": 1e7}
    rows: list[dict[str, Any]] = []
    for place, block in enumerate((16, 32, 64, 128)):
        t = 2e-2 / (place + 1)
        rows.append(row(f"b{block}", t, noise, **peers) | {"block": [block, block], "tflops": 1e-3 / t} | rate)
        for density in (0.25, 0.5, 1.0):
            more = {"block": [block, block], "density": density, "asked_density": density, "columns": 8}
            rows.append(row(f"d{block} {density}", t * density, noise, **peers) | more | rate)
        for columns in (1, 4, 64):
            more = {"block": [block, block], "n": 65, "columns": columns, "tflops": 1e-3 / t * columns / 64}
            rows.append(row(f"c{block} {columns}", t, noise, **peers) | more | rate)
    for dtype in ("float32", "float64"):
        for block in (2, 3, 4):
            more = {"group": "spmv", "columns": 1, "dtype": dtype, "block": [block, block], "gbps": 8.0 + block}
            rows.append(row(f"v{block} {dtype}", 1e-2, noise, **peers) | more | rate)
    for mask in ("full", "causal", "window", "blocks"):
        for length in (1024, 2048, 4096):
            more = {"group": "attention", "shape": [1, 8, length, 64], "kv_heads": 8, "mask": mask}
            rows.append(row(f"{mask} {length}", 1e-6 * length, noise) | more | rate)
    roofs = {"bytes_per_second": 2.13e10, "flops_per_second": {"float32": 8e10, "float64": 4e10}}
    return of(*rows, machine=about, ceilings=roofs)


def test_a_cpu_is_read_in_its_own_units() -> None:
    text = page.page(cpu_results(), "", {})
    assert "dense float32 80 GFLOP/s" in text and "copy 21 GB/s" in text and "TFLOP/s" not in text
    assert "Some Maker&#x27;s CPU 3000 @ 2.5 GHz, 2 cores" in text


def test_the_machine_has_the_name_of_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "processor\t: 0\nmodel name\t: Some CPU 3000 @ 2.50GHz\n"
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: given)
    machine.cpu_name.cache_clear()
    try:
        assert machine.describe()["cpu"] == "Some CPU 3000 @ 2.50GHz"
    finally:
        machine.cpu_name.cache_clear()


def test_a_large_spread_is_a_warning_above_the_tables() -> None:
    assert 'class="warning"' not in page.page(cpu_results(), "", {})
    text = page.page(cpu_results(noise=0.3), "", {})
    assert text.index('<p class="warning">') < text.index("<h2>")
    assert "spread by more than 10%" in text and "by 30%: the machine was busy" in text


# ------------------------------------------------------------------------------------------ pictures
@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from bsrgemm._benchmark.show import figures

    with matplotlib.rc_context(figures.STYLE):
        found = figures.figures(cpu_results())
        for figure in found.values():
            FigureCanvasAgg(figure).draw()
    return found


PICTURES = ("roofline", "density", "block", "columns", "length", "spmv")
each_picture = pytest.mark.parametrize("name", PICTURES)


@each_picture
def test_no_footer_lies_on_a_legend_or_a_label(drawn: dict[str, Any], name: str) -> None:
    figure = drawn[name]
    (footer,) = figure.texts
    (axes,) = figure.axes
    foot = footer.get_window_extent()
    for other in (axes.get_legend(), axes.xaxis.label, *axes.get_xticklabels()):
        assert not foot.overlaps(other.get_window_extent()), other
    assert figure.bbox.y0 <= axes.get_legend().get_window_extent().y0


@pytest.mark.parametrize("name", ["roofline", "block", "length", "spmv"])
def test_no_legend_lies_on_the_axes_of_a_full_picture(drawn: dict[str, Any], name: str) -> None:
    (axes,) = drawn[name].axes
    legend = axes.get_legend().get_window_extent()
    assert not legend.overlaps(axes.get_window_extent()) and not legend.overlaps(axes.xaxis.label.get_window_extent())


@pytest.mark.parametrize("name", ["roofline", "block", "columns"])
def test_pictures_of_a_cpu_are_in_gflops(drawn: dict[str, Any], name: str) -> None:
    (axes,) = drawn[name].axes
    assert axes.get_ylabel() == "GFLOP/s"
    highest = max(float(y) for line in axes.get_lines() for y in line.get_ydata())
    assert 10 < highest < 1000
