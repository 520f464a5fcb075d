"""Where panels lie: a folder of ``.npz`` files or a zarr group. The objects here are small and travel to workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from ..._array.files import load_npz, save_npz
from ...bsr import bsr_array
from ...dtypes import BFLOAT16

#: The file that lists the panels of a folder, and the attribute of a zarr group that does.
LIST = "panels.json"
#: A folder with this file and without the list is one whose writing was interrupted.
_UNFINISHED_LIST = "panels.json.part"
#: The file that makes a folder a zarr group.
_ZARR_LIST = "zarr.json"
_ATTRIBUTE = "bsrgemm_panels"


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
        taken = any((folder / name).exists() for name in (LIST, _UNFINISHED_LIST, _ZARR_LIST))
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
        os.replace(unfinished, Path(self.where, LIST))

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


STORES: dict[str, Any] = {"npz": NpzFolder, "zarr": ZarrGroup}


def find(where: str) -> tuple[Any, str | None]:
    """Return where the panels are and their list; no list for a folder of files that nothing lists."""
    path = Path(where, LIST)
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
