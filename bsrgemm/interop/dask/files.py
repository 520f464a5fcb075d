"""Panels on disk: a folder of ``.npz`` files or a zarr group, and a list of what it holds.

The list is written last, so that a folder whose writing was interrupted is recognised. Files are not trusted: nothing
in them is unpickled, and each panel is compared with the list when it is read.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import List, Task, TaskRef
from dask.tokenize import tokenize

from ..._array.base import BsrBase, check_shape, no_bsr
from ..._array.construct import check_blocksize
from ...dtypes import BFLOAT16, HOST_DTYPES, check_dtype
from . import storage, tasks
from .array import PanelArray
from .layout import Layout, check_sides
from .sources import from_bsr

_KIND, _VERSION = "bsrgemm panels", 1
_FORMATS = ("npz", "zarr")


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
    store = storage.STORES[format](where, compressed)
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
    store, text = storage.find(where)
    if text is None:
        found = _described(where)
        token: Any = [(name, os.stat(name).st_mtime_ns) for name in found.files]
        store = storage.NpzFolder(where, files=found.files)
    else:
        found = _listed(text, where)
        token = text
    layout = Layout(found.rows, found.columns, found.blocksize, found.dtype, device)
    name = f"bsr-from-panels-{tokenize(where, token, device)}"
    layer = {}
    for i in range(layout.count):
        key = layout.key(name, i)
        layer[key] = Task(key, tasks.loaded, store=store, number=i, layout=layout)
    return PanelArray(HighLevelGraph.from_collections(name, layer), name, layout)


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
