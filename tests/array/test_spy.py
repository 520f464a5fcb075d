"""`A.spy()` draws the blocks that are stored, and counts those of each block row."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

from ..strategies import FLAVOURS, PLACES, Place, Sample, each_place

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Place("cpu")


@pytest.fixture(autouse=True)
def no_figure_stays() -> Iterator[None]:
    yield
    plt.close("all")


def sample(grid: tuple[int, int], block: tuple[int, int], *, density: float = 0.3, twice: int = 0) -> Sample:
    """Rows in random order, about `density` of the blocks, `twice` of them once more; every third row is empty."""
    rng = np.random.default_rng(0)
    stored = rng.random(grid) < density
    stored[1::3] = False
    places = np.flatnonzero(stored)
    places = np.concatenate([places, rng.choice(places, twice)]) if twice else places
    rng.shuffle(places)
    row, col = np.divmod(places[np.argsort(places // grid[1], kind="stable")], grid[1])
    indptr = np.searchsorted(row, np.arange(grid[0] + 1)).astype(np.int32)
    shape = (grid[0] * block[0], grid[1] * block[1])
    return Sample(np.zeros((len(row), *block), np.float32), col.astype(np.int32), indptr, shape)


def pattern_of(a: Sample) -> np.ndarray[Any, Any]:
    """Which blocks are stored, as booleans of block rows and block columns."""
    grid = len(a.indptr) - 1, a.shape[1] // a.blocksize[1]
    stored = np.zeros(grid, bool)
    stored[np.repeat(np.arange(grid[0]), np.diff(a.indptr)), a.indices] = True
    return stored


def drawn_shapes(ax: Any, block: tuple[int, int], grid: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Which blocks have a shape: their centers, and points beside their corners, all lie in it or none does."""
    (patch,) = ax.patches
    row, col = np.indices(grid)
    inside = [
        patch.get_path().contains_points(np.stack([(col + x) * block[1], (row + y) * block[0]], 2).reshape(-1, 2))
        for x, y in ((0.5, 0.5), (0.01, 0.01), (0.99, 0.01), (0.01, 0.99), (0.99, 0.99))
    ]
    assert all((found == inside[0]).all() for found in inside)
    return inside[0].reshape(grid)


def cells_of(ax: Any, block: tuple[int, int]) -> tuple[np.ndarray[Any, Any], int, int]:
    """The shares that an image shows, 0 where it is white, and the blocks of a cell down and across."""
    (image,) = ax.images
    share = image.get_array()
    left, right, bottom, top = image.get_extent()
    assert (left, top) == (0, 0)
    return share.filled(0), round(bottom / block[0] / share.shape[0]), round(right / block[1] / share.shape[1])


def shares(stored: np.ndarray[Any, Any], down: int, across: int) -> np.ndarray[Any, Any]:
    """The share of True in each cell of a boolean matrix."""
    rows, cols = stored.shape
    sums = np.add.reduceat(
        np.add.reduceat(stored.astype(int), np.arange(0, rows, down), 0), np.arange(0, cols, across), 1
    )
    sizes = np.add.reduceat(np.ones(rows, int), np.arange(0, rows, down))[:, None]
    return sums / (sizes * np.add.reduceat(np.ones(cols, int), np.arange(0, cols, across)))


def check_histogram(ax: Any, counts: np.ndarray[Any, Any]) -> None:
    """The bars say how many of the counts lie between their sides."""
    bars = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height()) for bar in ax.patches]
    assert [int(((counts > low) & (counts < high)).sum()) for low, high, _ in bars] == [height for *_, height in bars]
    assert sum(height for *_, height in bars) == len(counts)


# ------------------------------------------------------------------------------------------ the pattern
@each_place
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    ("grid", "block"), [((7, 5), (2, 3)), ((64, 3), (1, 1)), ((3, 64), (16, 16)), ((1, 1), (4, 4))]
)
def test_few_blocks_are_shapes(place: Place, flavour: type, grid: tuple[int, int], block: tuple[int, int]) -> None:
    a = sample(grid, block)
    pattern, rows = place.bsr(a, flavour).spy()
    np.testing.assert_array_equal(drawn_shapes(pattern, block, grid), pattern_of(a))
    check_histogram(rows, np.diff(a.indptr))
    assert not pattern.images
    assert pattern.get_xlim() == (0, a.shape[1]) and pattern.get_ylim() == (a.shape[0], 0)
    pattern.figure.canvas.draw()


@each_place
@pytest.mark.parametrize(("grid", "block"), [((65, 3), (2, 3)), ((3, 65), (1, 1)), ((100, 150), (4, 2))])
def test_more_blocks_are_an_image(place: Place, grid: tuple[int, int], block: tuple[int, int]) -> None:
    a = sample(grid, block)
    pattern, rows = place.bsr(a).spy()
    share, down, across = cells_of(pattern, block)
    assert (down, across) == (1, 1) and not pattern.patches
    np.testing.assert_array_equal(share, pattern_of(a))
    check_histogram(rows, np.diff(a.indptr))
    assert pattern.get_xlim() == (0, a.shape[1]) and pattern.get_ylim() == (a.shape[0], 0)
    assert pattern.images[0].cmap(1.0) == pattern.images[0].to_rgba(1.0)  # a stored block is as dark as can be
    pattern.figure.canvas.draw()


@pytest.mark.parametrize(("grid", "block"), [((1001, 900), (1, 1)), ((3000, 7), (2, 3)), ((7, 3000), (16, 1))])
@pytest.mark.parametrize("histogram", [True, False])
def test_many_blocks_share_the_cells_of_an_image(
    grid: tuple[int, int], block: tuple[int, int], histogram: bool
) -> None:
    a = sample(grid, block, density=0.01)
    axes = HERE.bsr(a).spy(histogram=histogram)
    pattern = axes[0] if histogram else axes
    share, down, across = cells_of(pattern, block)
    assert max(down, across) > 1
    np.testing.assert_allclose(share, shares(pattern_of(a), down, across))
    sizes = np.full(share.shape, down * across, float)
    sizes[-1] *= (grid[0] % down or down) / down
    sizes[:, -1] *= (grid[1] % across or across) / across
    assert round((share * sizes).sum()) == len(a.indices)
    pattern.figure.canvas.draw()
    box = pattern.get_window_extent()
    assert share.shape[0] <= box.height and share.shape[1] <= box.width  # a cell has a pixel


def test_a_lone_block_among_many_is_seen() -> None:
    n = 5000
    A = bg.bsr_array((np.ones((2, 1, 1)), ([1234, n - 1], [4321, n - 1])), shape=(n, n))
    pattern = A.spy(histogram=False)
    share, down, across = cells_of(pattern, (1, 1))
    assert np.argwhere(share).tolist() == [[1234 // down, 4321 // across], [(n - 1) // down, (n - 1) // across]]
    image = pattern.images[0]
    red, green, blue, alpha = image.to_rgba(image.get_array()).transpose(2, 0, 1)
    np.testing.assert_array_equal(alpha > 0, share > 0)  # cells without blocks show the white of the axes
    assert (0.2126 * red + 0.7152 * green + 0.0722 * blue)[share > 0].max() < 0.9  # neither is white


@pytest.mark.parametrize("whole", [True, False])
def test_a_full_cell_of_few_blocks_at_the_end_does_not_make_the_others_pale(whole: bool) -> None:
    n = 5003
    row = np.arange(n) if whole else np.array([n - 1])
    pattern = bg.bsr_array((np.ones((len(row), 1, 1)), (row, row)), shape=(n, n)).spy(histogram=False)
    share, down, _ = cells_of(pattern, (1, 1))
    assert n % down and np.count_nonzero(share) == (len(share) if whole else 1)
    assert pattern.images[0].get_clim() == (0, pytest.approx(1 / down if whole else 1 / (n % down) ** 2))


def test_shades_go_from_light_to_dark() -> None:
    pattern = HERE.bsr(sample((1000, 1000), (1, 1))).spy(histogram=False)
    red, green, blue, _ = pattern.images[0].cmap(np.linspace(0, 1, 50)).T
    assert (np.diff(0.2126 * red + 0.7152 * green + 0.0722 * blue) < 0).all()


def test_a_large_grid_takes_no_memory_but_for_its_blocks() -> None:
    n = 1 << 20
    A = bg.bsr_array((np.ones((n, 1, 1), np.int8), np.arange(n, dtype=np.int32), np.arange(n + 1)), shape=(n, n))
    A.spy()  # imports
    tracemalloc.start()
    try:
        pattern, _ = A.spy()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * n  # a bit for each of the n * n places would be 1300 times as much
    share, down, across = cells_of(pattern, (1, 1))
    assert down == across and (np.diag(share) > 0).all() and np.count_nonzero(share) == len(share)


# ------------------------------------------------------------------------------ blocks in any order, twice
@each_place
@pytest.mark.parametrize("grid", [(9, 8), (70, 90), (900, 1000)])
def test_a_block_stored_twice_is_drawn_once_and_counted_twice(place: Place, grid: tuple[int, int]) -> None:
    a = sample(grid, (1, 2), density=0.1, twice=9)
    pattern, rows = place.bsr(a).spy()
    stored = pattern_of(a)
    if grid[0] < 64:
        np.testing.assert_array_equal(drawn_shapes(pattern, (1, 2), grid), stored)
    else:
        share, down, across = cells_of(pattern, (1, 2))
        np.testing.assert_allclose(share, shares(stored, down, across))
    check_histogram(rows, np.diff(a.indptr))
    assert f"{len(a.indices):,} blocks at {stored.sum():,} places" in pattern.get_title()


def test_the_title_says_shape_block_number_and_density() -> None:
    a = sample((40, 50), (48, 32))
    A = HERE.bsr(a)
    title = A.spy(histogram=False).get_title()
    assert title == f"1,920 x 1,600, blocks 48 x 32\n{len(a.indices)} blocks, density {A.density:.3g}"


# ------------------------------------------------------------------------------------------ transposes
@each_place
@pytest.mark.parametrize("grid", [(7, 5), (70, 90)])
def test_a_transpose_is_drawn_without_being_built(place: Place, grid: tuple[int, int]) -> None:
    a = sample(grid, (2, 3), twice=3)
    T = place.bsr(a).T
    pattern, rows = T.spy()
    assert "data" not in T.__dict__ and "indices" not in T.__dict__
    stored = pattern_of(a).T
    if grid[0] < 64:
        np.testing.assert_array_equal(drawn_shapes(pattern, (3, 2), stored.shape), stored)
    else:
        np.testing.assert_array_equal(cells_of(pattern, (3, 2))[0], stored)
    check_histogram(rows, np.bincount(a.indices, minlength=grid[1]))
    assert pattern.get_title().startswith(f"{a.shape[1]} x {a.shape[0]}, blocks 3 x 2")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.fake
def test_of_a_device_matrix_only_the_index_arrays_are_copied(monkeypatch: pytest.MonkeyPatch, transposed: bool) -> None:
    place = Place("cuda")
    a = sample((7, 5), (2, 3))
    A = place.bsr(a)
    copied = []
    to_host = type(place.backend).to_host
    monkeypatch.setattr(type(place.backend), "to_host", lambda self, x: copied.append(x.shape) or to_host(self, x))
    (A.T if transposed else A).spy()
    assert sorted(copied) == sorted([a.indices.shape, a.indptr.shape])


# ------------------------------------------------------------------------------------------ the histogram
def histogram_of(counts: np.ndarray[Any, Any]) -> Any:
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices = np.arange(indptr[-1]) - np.repeat(indptr[:-1], counts)
    cols = max(1, int(counts.max()))
    A = bg.bsr_array((np.zeros((len(indices), 1, 1), np.int8), indices, indptr), shape=(len(counts), cols))
    _, ax = A.spy()
    check_histogram(ax, counts)
    ax.figure.canvas.draw()
    return ax


def test_a_bar_is_one_number_of_blocks_unless_there_are_many() -> None:
    few, many = np.array([3, 0, 5, 3]), np.arange(500) % 250
    assert [bar.get_width() for bar in histogram_of(few).patches] == [1] * 6
    assert 1 < len(histogram_of(many).patches) <= 60


def test_heights_are_logarithms_where_low_bars_would_be_hidden() -> None:
    even, uneven = np.repeat([4, 5, 6], 50), np.append(np.full(500, 2), 400)
    assert histogram_of(even).get_yscale() == "linear"
    ax = histogram_of(uneven)
    assert ax.get_yscale() == "log" and ax.get_ylim()[0] < 1  # one row has a height


def test_empty_block_rows_are_counted() -> None:
    assert "2 of 5 empty" in histogram_of(np.array([0, 3, 1, 0, 1])).get_title()
    assert histogram_of(np.array([3, 3])).get_title() == "3 blocks in every block row"
    assert all(tick >= -0.7 for tick in histogram_of(np.array([0, 0])).get_xlim())


# ------------------------------------------------------------------------------------------ odd and bad input
@each_place
@pytest.mark.parametrize("shape", [(0, 0), (0, 40), (40, 0), (0, 4000), (4000, 0), (40, 80), (4000, 8000)])
def test_matrices_without_blocks_are_drawn(place: Place, shape: tuple[int, int]) -> None:
    indptr = np.zeros(shape[0] // 4 + 1, np.int32)
    A = place.bsr(Sample(np.zeros((0, 4, 8)), np.zeros(0, np.int32), indptr, shape))
    pattern, rows = A.spy()
    check_histogram(rows, np.zeros(shape[0] // 4, int))
    assert not pattern.images and "0 blocks, density 0" in pattern.get_title()
    assert pattern.get_xlim() == (0, max(1, shape[1])) and pattern.get_ylim() == (max(1, shape[0]), 0)
    pattern.figure.canvas.draw()


@pytest.mark.parametrize("grid", [(5, 5), (90, 90), (900, 900)])
def test_what_is_returned_is_what_was_drawn_on(grid: tuple[int, int]) -> None:
    A = HERE.bsr(sample(grid, (2, 2)))
    pattern, rows = A.spy()
    assert pattern.figure is rows.figure and rows.patches
    alone = A.spy(histogram=False)
    assert isinstance(alone, matplotlib.axes.Axes) and alone.figure is not pattern.figure
    _, mine = plt.subplots()
    before = plt.get_fignums()
    assert A.spy(mine) is mine and A.spy(mine, histogram=False) is mine
    assert plt.get_fignums() == before  # no figure of its own


def test_other_axes_are_refused_by_name() -> None:
    A = HERE.bsr(sample((3, 3), (2, 2)))
    for ax in ("left", 3, plt.figure(), [plt.gca()]):
        with pytest.raises(TypeError, match=r"^ax: wanted a matplotlib.axes.Axes or None, got"):
            A.spy(ax)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.pyplot", "matplotlib.axes"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "bsrgemm\[bench\]"'):
        HERE.bsr(sample((3, 3), (2, 2))).spy()


@pytest.mark.parametrize("place", PLACES[:2])
def test_indices_that_were_made_wrong_later_are_told(place: Place) -> None:
    A = place.bsr(sample((7, 5), (2, 3)))
    A.indices[0] = 5
    with pytest.raises(ValueError, match=r"^indices: column index values must be < 5"):
        A.spy()
    assert not plt.get_fignums()
