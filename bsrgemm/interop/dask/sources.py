"""Where matrices in panels come from: memory, delayed panels, or disk; and how they are written to disk.

Panels on disk are a folder of ``.npz`` files or a zarr group, and a list of what it holds. The list is written last, so
that a folder whose writing was interrupted is recognised. Files are not trusted: nothing in them is unpickled, and each
panel is compared with the list when it is read.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import List, Task, TaskRef
from dask.tokenize import tokenize

from ..._array.base import BsrBase, check_shape, kind_of, no_bsr
from ..._array.construct import check_blocksize
from ..._array.files import load_npz, save_npz
from ...bsr import bsr_array
from ...dtypes import BFLOAT16, HOST_DTYPES, check_dtype
from . import tasks
from .array import PanelArray
from .tasks import Layout, check_sides

_KIND, _VERSION = "bsrgemm panels", 1
_FORMATS = ("npz", "zarr")
#: The file that lists the panels of a folder, and the attribute of a zarr group that does.
_LIST = "panels.json"
#: A folder with this file and without the list is one whose writing was interrupted.
_UNFINISHED_LIST = "panels.json.part"
#: The file that makes a folder a zarr group.
_ZARR_LIST = "zarr.json"
_ATTRIBUTE = "bsrgemm_panels"


def from_bsr(A: Any, rows_per_chunk: int) -> PanelArray:
    """Cut a matrix in memory into panels of block rows.

    Parameters
    ----------
    A : bsr_array or bsr_matrix
        The matrix, on any device.
    rows_per_chunk : int
        The rows of each panel but the last, which may have fewer: a multiple of the rows of a block.

    Returns
    -------
    PanelArray
        The matrix in panels. They share the blocks with `A`; values that are written into `A` later are seen by what
        is computed later.

    Raises
    ------
    TypeError
        If `A` is not a BSR matrix of this package.
    ValueError
        If `rows_per_chunk` is not a positive multiple of the rows of a block.

    Notes
    -----
    The panels are part of the graph. With Dask's distributed scheduler they travel to the workers through the
    scheduler; ``persist()`` makes them do so once, and `from_panels` lets the workers read them from disk.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> from bsrgemm.interop import dask as panels
    >>> panels.from_bsr(bg.eye(10, blocksize=(2, 2)), rows_per_chunk=4).chunks
    ((4, 4, 2), (10,))
    """
    if not isinstance(A, BsrBase):
        raise TypeError(f"A: wanted a bsr_array or bsr_matrix, got {kind_of(A)}; bsrgemm.bsr_array(A) makes one")
    matrix: Any = bsr_array(A)
    (M, N), (R, C) = matrix.shape, matrix.blocksize
    rows = _positive(rows_per_chunk, "rows_per_chunk")
    if rows % R:
        raise ValueError(
            f"rows_per_chunk: wanted a multiple of the {R} rows of a block, got {rows}; "
            f"{max(rows - rows % R, R)} and {max(rows - rows % R, R) + R} are"
        )
    sides = (rows,) * (M // rows) + ((M % rows,) if M % rows or not M else ())
    layout = Layout(sides, N, (R, C), matrix.dtype, tasks.device_of(matrix))
    name = f"bsr-from-bsr-{tokenize(matrix, rows)}"
    cuts = [(start // R, stop // R) for start, stop in layout.bounds]
    return PanelArray._of_tasks(name, layout, lambda key, i: Task(key, tasks.given, _rows(matrix, *cuts[i])))


def from_delayed(
    panels: Iterable[Delayed], rows: Iterable[int], columns: int, *, blocksize: Any, dtype: Any, device: str = "cpu"
) -> PanelArray:
    """Make a matrix of panels that are computed later, each by a task of its own.

    Parameters
    ----------
    panels : sequence of dask.delayed.Delayed
        The panels of block rows from top to bottom. Each is computed to a `bsr_array`.
    rows : sequence of int
        The rows of each panel, multiples of the rows of a block.
    columns : int
        The columns of the matrix, which all panels have.
    blocksize : (R, C)
        The block size of all panels.
    dtype : dtype
        The dtype of all panels.
    device : {"cpu", "cuda"}
        The device on which the panels are computed.

    Returns
    -------
    PanelArray
        The matrix. Computing a panel that has another shape, block size, dtype or device than was said raises
        ValueError, and one that is not a `bsr_array` raises TypeError; the messages name the panel.

    Raises
    ------
    ValueError
        If there are no panels or not as many as `rows`, or if the sizes are not multiples of the block size.
    TypeError
        If a panel is not delayed, or if a `bsr_array` cannot have the dtype.

    Examples
    --------
    >>> import dask, bsrgemm as bg
    >>> from bsrgemm.interop import dask as panels
    >>> @dask.delayed
    ... def assemble(part):
    ...     return bg.random(4, 8, blocksize=(2, 2), density=0.5, seed=part)
    >>> A = panels.from_delayed([assemble(0), assemble(1)], rows=[4, 4], columns=8, blocksize=(2, 2), dtype="float64")
    >>> A.shape, A.compute().blocksize
    ((8, 8), (2, 2))
    """
    panels = list(panels)
    for number, panel in enumerate(panels):
        if not isinstance(panel, Delayed):
            raise TypeError(
                f"panels: wanted delayed panels, got {type(panel).__name__} as panel {number}; use from_bsr"
            )
    sides = tuple(_size(side, f"rows[{number}]") for number, side in enumerate(rows))
    if not panels or len(sides) != len(panels):
        raise ValueError(f"rows: wanted one number for each of {len(panels)} panels, at least 1, got {len(sides)}")
    shape = check_shape((sum(sides), columns))
    block = check_blocksize(blocksize)
    if shape[1] % block[1]:
        raise ValueError(f"columns: wanted a multiple of the {block[1]} columns of a block, got {columns}")
    check_sides(sides, block[0], "rows")
    layout = Layout(sides, shape[1], block, check_dtype(dtype, HOST_DTYPES), device)
    name = f"bsr-from-delayed-{tokenize([panel.key for panel in panels], layout)}"

    def task(key: Any, i: int) -> Task:
        return Task(key, tasks.checked, TaskRef(panels[i].key), number=i, layout=layout)

    return PanelArray._of_tasks(name, layout, task, panels)


def _rows(A: Any, first: int, last: int) -> Any:
    """Return block rows of a matrix whose blocks are views of those of `A`."""
    start, stop = (int(n) for n in (A.indptr[first], A.indptr[last]))  # synchronize!
    arrays = (A.data[start:stop], A.indices[start:stop], A.indptr[first : last + 1] - start)
    return bsr_array(arrays, shape=((last - first) * A.blocksize[0], A.shape[1]))


def _size(number: Any, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
        raise ValueError(f"{what}: wanted an integer that is not negative, got {number!r}")
    return int(number)


def _positive(number: Any, what: str) -> int:
    if _size(number, what) == 0:
        raise ValueError(f"{what}: wanted a positive number, got 0")
    return int(number)


# ------------------------------------------------------------------------------------------ on disk
def to_panels(
    A: Any, folder: Any, *, rows_per_chunk: int | None = None, format: str = "npz", compressed: bool = False
) -> PanelArray:
    """Write a matrix to disk, one panel of block rows after another.

    Parameters
    ----------
    A : PanelArray, bsr_array or bsr_matrix
        The matrix. The panels of a `PanelArray` are computed, written and dropped one by one, so the matrix may be
        larger than the memory.
    folder : str or path
        A folder that holds no panels yet; it is made if it is not there. With Dask's distributed scheduler the workers
        write to it, so all of them must see it. For zarr it may also be a URL that zarr can write to.
    rows_per_chunk : int, optional
        The rows of a panel, for a matrix in memory; a `PanelArray` is written in the panels that it has.
    format : {"npz", "zarr"}
        One file for each panel, as `save_npz` writes it, or one zarr group for each, which needs the package zarr.
    compressed : bool
        Whether to compress the panels, which takes longer.

    Returns
    -------
    PanelArray
        The matrix on disk, as `from_panels` returns it.

    Raises
    ------
    TypeError
        If `A` is not one of these.
    ValueError
        If `rows_per_chunk` is missing or does not fit, if `format` is unknown, cannot hold the dtype or cannot be
        written to a URL, or if `A` is cut along its columns.
    FileExistsError
        If the folder holds panels already.
    ImportError
        If `format` is "zarr" and zarr cannot be imported.
    OSError
        If a file cannot be written.

    Examples
    --------
    >>> import tempfile, bsrgemm as bg
    >>> from bsrgemm.interop import dask as panels
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     A = panels.to_panels(bg.eye(10, blocksize=(2, 2)), folder, rows_per_chunk=4)
    ...     A.chunks, A.sum().compute()
    (((4, 4, 2), (10,)), np.float64(10.0))
    """
    if format not in _FORMATS:
        raise ValueError(f"format: wanted one of {', '.join(map(repr, _FORMATS))}, got {format!r}")
    if isinstance(A, BsrBase):
        if rows_per_chunk is None:
            raise ValueError("rows_per_chunk: wanted the rows of a panel, since A is a matrix in memory")
        A = from_bsr(A, rows_per_chunk)
    elif not isinstance(A, PanelArray):
        raise TypeError(f"A: wanted a PanelArray, a bsr_array or a bsr_matrix, got {no_bsr(A, 'A')}")
    elif rows_per_chunk is not None:
        raise ValueError("rows_per_chunk: is for a matrix in memory; A.rechunk({0: rows}) cuts a PanelArray anew")
    layout = A._layout
    if layout.axis == 1 and layout.count > 1:
        raise ValueError("A: is cut along its columns; write A.T and transpose what is read, or use A.rechunk")
    if format == "zarr" and layout.dtype.char in "gG":
        raise ValueError(f"format: zarr cannot hold {layout.dtype}; format='npz' can")
    where = _place(folder)
    if format == "npz" and "://" in where:
        raise ValueError(f"folder: wanted a folder for format='npz', got {where!r}; format='zarr' writes to URLs")
    store = _STORES[format](where, compressed)
    store.make()
    name = f"bsr-to-panels-{uuid4().hex}"
    layer: dict[Any, Any] = {}
    done = []
    for i, panel in enumerate(A._refs()):
        key = (name, i)
        layer[key] = Task(key, tasks.written, panel, store=store, number=i)
        done.append(TaskRef(key))
    layer[name] = Task(name, tasks.all_done, List(*done))
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[A])
    Delayed(name, graph, layer=name).compute()
    rows = layout.chunks[0]
    about = {
        "kind": _KIND,
        "version": _VERSION,
        "format": format,
        "id": uuid4().hex,
        "rows": list(rows),
        "columns": layout.shape[1],
        "blocksize": list(layout.blocksize),
        "dtype": layout.dtype.name,
    }
    store.write_list(json.dumps(about, indent=1))
    return from_panels(folder, device=layout.device)


def from_panels(folder: Any, *, device: str = "cpu") -> PanelArray:
    """Open a matrix whose panels are on disk; each is read by the task that needs it.

    Parameters
    ----------
    folder : str or path
        A folder or, for zarr, a URL to which `to_panels` has written, or a folder of ``.npz`` files of `save_npz`:
        these are panels of block rows, from top to bottom in the order of their names. Workers read the files, so all
        of them must see the folder.
    device : {"cpu", "cuda"}
        Where each worker puts the panels that it reads.

    Returns
    -------
    PanelArray
        The matrix. Only sizes have been read.

    Raises
    ------
    FileNotFoundError
        If there are no panels, or if writing them was interrupted.
    ValueError
        If the list of panels is damaged, or if panels differ in their columns, block size or dtype. A panel that is
        damaged or not the one that was listed raises ValueError when it is computed; the message names it.
    ImportError
        If the panels are in a zarr group and zarr cannot be imported.

    Examples
    --------
    >>> import tempfile, numpy as np, bsrgemm as bg
    >>> from bsrgemm.interop import dask as panels
    >>> A = bg.random(6, 4, blocksize=(2, 2), density=0.5, seed=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i in range(3):
    ...         bg.save_npz(f"{folder}/rows-{i}.npz", A[2 * i : 2 * i + 2])
    ...     y = (panels.from_panels(folder) @ np.ones(4)).compute()
    >>> np.allclose(y, A @ np.ones(4))
    True
    """
    where = _place(folder)
    store, text = _find(where)
    if text is None:
        found = _described(where)
        token: Any = [(name, os.stat(name).st_mtime_ns) for name in found.files]
        store = NpzFolder(where, files=found.files)
    else:
        found = _listed(text, where)
        token = text
    layout = Layout(found.rows, found.columns, found.blocksize, found.dtype, device)
    name = f"bsr-from-panels-{tokenize(where, token, device)}"

    def task(key: Any, i: int) -> Task:
        return Task(key, tasks.loaded, store=store, number=i, layout=layout)

    return PanelArray._of_tasks(name, layout, task)


def _place(folder: Any) -> str:
    text = os.fspath(folder)
    if not isinstance(text, str):
        raise TypeError(f"folder: wanted a str or a path, got {type(folder).__name__}")
    return text if "://" in text else os.path.abspath(text)


@dataclass(frozen=True)
class _Found:
    """What a folder says about its panels."""

    rows: tuple[int, ...]
    columns: int
    blocksize: tuple[int, int]
    dtype: np.dtype[Any]
    files: tuple[str, ...] = ()


def _listed(text: str, where: str) -> _Found:
    """Read the list of panels."""
    try:
        about = json.loads(text)
        if about["kind"] != _KIND or about["version"] != _VERSION:
            raise ValueError(
                f"it is of version {about['version']} of {about['kind']!r}, wanted {_VERSION} of {_KIND!r}"
            )
        rows = tuple(about["rows"])
        if not rows or not all(type(side) is int for side in (*rows, about["columns"])):
            raise ValueError("rows and columns are not integers")
        block = check_blocksize(about["blocksize"], check_shape((sum(rows), about["columns"])))
        check_sides(rows, block[0], "rows")
        dtype = BFLOAT16 if about["dtype"] == BFLOAT16.name else np.dtype(str(about["dtype"]))
        return _Found(rows, about["columns"], block, check_dtype(dtype, HOST_DTYPES))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"folder: the list of panels of {where!r} is damaged: {error}") from error


def _described(where: str) -> _Found:
    """Read the sizes of panels that nothing lists from the headers of their files."""
    files = tuple(sorted(str(path) for path in Path(where).glob("*.npz")))
    if not files:
        raise FileNotFoundError(
            f"folder: {where!r} holds no panels: wanted files that end in .npz, or what to_panels has written"
        )
    found = []
    for file in files:
        try:
            found.append(_header(file))
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"folder: {file!r} holds no BSR matrix of save_npz: {error}") from error
    first = found[0]
    for file, one in zip(files, found, strict=True):
        if one[1:] != first[1:]:
            raise ValueError(
                f"folder: {file!r} has (columns, block size, dtype) {one[1:]}, and {files[0]!r} has {first[1:]}; "
                "all panels of a matrix are of one kind"
            )
    rows = tuple(one[0] for one in found)
    return _Found(rows, *first[1:], files)


def _header(file: str) -> tuple[int, int, tuple[int, int], np.dtype[Any]]:
    """Return rows, columns, block size and dtype of the matrix in a file, without its blocks."""
    with zipfile.ZipFile(file) as archive:
        with archive.open("shape.npy") as member:
            rows, columns = check_shape(np.lib.format.read_array(member, allow_pickle=False).tolist())
        with archive.open("data.npy") as member:
            if np.lib.format.read_magic(member) != (1, 0):
                raise ValueError("its blocks are in an unknown version of the .npy format")
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    dtype = BFLOAT16 if dtype == np.dtype("V2") else dtype
    if len(shape) != 3:
        raise ValueError(f"its data has shape {shape}, wanted (blocks, R, C)")
    return rows, columns, check_blocksize(shape[1:], (rows, columns)), check_dtype(dtype, HOST_DTYPES)


# ------------------------------------------------------- where panels lie, which travels to workers
@dataclass(frozen=True)
class NpzFolder:
    """One ``.npz`` file for each panel."""

    where: str
    compressed: bool = False
    #: The files, if they are not named by their numbers.
    files: tuple[str, ...] = ()

    def name_of(self, number: int) -> str:
        return self.files[number] if self.files else os.path.join(self.where, f"panel-{number:06d}.npz")

    def make(self) -> None:
        folder = Path(self.where)
        folder.mkdir(parents=True, exist_ok=True)
        taken = any((folder / name).exists() for name in (_LIST, _UNFINISHED_LIST, _ZARR_LIST))
        if taken or any(folder.glob("*.npz")):
            raise FileExistsError(f"folder: {self.where!r} holds panels already; wanted an empty or a new one")
        (folder / _UNFINISHED_LIST).touch()

    def write(self, number: int, panel: Any) -> None:
        """Write a panel under another name first: a worker may be stopped, and its task be done again elsewhere."""
        name = self.name_of(number)
        unfinished = f"{name}.{uuid4().hex}.part"
        try:
            with open(unfinished, "wb") as file:
                save_npz(file, panel, compressed=self.compressed)
            os.replace(unfinished, name)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise

    def write_list(self, text: str) -> None:
        unfinished = Path(self.where, _UNFINISHED_LIST)
        unfinished.write_text(text + "\n", encoding="utf-8")
        os.replace(unfinished, Path(self.where, _LIST))

    def read(self, number: int) -> Any:
        return load_npz(self.name_of(number))


@dataclass(frozen=True)
class ZarrGroup:
    """One group with the arrays data, indices and indptr for each panel."""

    where: str
    compressed: bool = False

    def name_of(self, number: int) -> str:
        return f"{self.where}/panel-{number:06d}"

    def make(self) -> None:
        folder = Path(self.where)
        if folder.is_dir() and any(folder.iterdir()):
            raise FileExistsError(f"folder: {self.where!r} holds panels or other files; wanted an empty or a new one")
        _zarr().open_group(self.where, mode="w-")

    def write(self, number: int, panel: Any) -> None:
        group = _zarr().open_group(self.where, mode="a").create_group(f"panel-{number:06d}", overwrite=True)
        on_host = panel.to_device("cpu")  # synchronize!
        data = np.ascontiguousarray(on_host.data)
        options = {} if self.compressed else {"compressors": None}
        for name, array in (
            ("data", data.view(np.uint16) if data.dtype == BFLOAT16 else data),
            ("indices", on_host.indices),
            ("indptr", on_host.indptr),
        ):
            group.create_array(name, data=array, **options)
        group.attrs.update({"shape": list(panel.shape), "dtype": data.dtype.name})

    def write_list(self, text: str) -> None:
        _zarr().open_group(self.where, mode="a").attrs[_ATTRIBUTE] = text

    def read(self, number: int) -> Any:
        try:
            group = _zarr().open_group(self.name_of(number), mode="r")
            data, indices, indptr = (np.asarray(group[name][...]) for name in ("data", "indices", "indptr"))
            data = data.view(BFLOAT16) if group.attrs["dtype"] == BFLOAT16.name else data
            return bsr_array((data, indices, indptr), shape=tuple(group.attrs["shape"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it holds no valid matrix: {error}") from error


_STORES: dict[str, Any] = {"npz": NpzFolder, "zarr": ZarrGroup}


def _find(where: str) -> tuple[Any, str | None]:
    """Return where the panels are and their list; no list for a folder of files that nothing lists."""
    path = Path(where, _LIST)
    interrupted = f"folder: {where!r} has no list of its panels: to_panels was interrupted; write them again elsewhere"
    if "://" not in where:
        if path.is_file():
            return NpzFolder(where), path.read_text(encoding="utf-8")
        if Path(where, _UNFINISHED_LIST).exists():
            raise FileNotFoundError(interrupted)
        if not Path(where, _ZARR_LIST).is_file():
            return NpzFolder(where), None
    text = _zarr().open_group(where, mode="r").attrs.get(_ATTRIBUTE)
    if not isinstance(text, str):
        raise FileNotFoundError(interrupted)
    return ZarrGroup(where), text


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise ImportError(
            f"panels in zarr's format need zarr, which cannot be imported ({error}): pip install zarr; "
            "format='npz' needs nothing"
        ) from error
    return zarr
