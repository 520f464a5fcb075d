"""A library for threads that the user has chosen for cuDSS is left to nvmath-python."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import scipy.sparse as sp

from bsrgemm.linalg import direct


def test_the_library_of_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvmath-python reads the variable if it gets no option."""
    module: Any = types.ModuleType("cuda.pathfinder")
    module.load_nvidia_dynamic_lib = lambda name: types.SimpleNamespace(abs_path=str(tmp_path / "libcudss.so.0"))
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", module)
    (tmp_path / "libcudss_mtlayer_gomp.so.0").symlink_to(sp._sparsetools.__file__)
    assert direct._threading_layer() is not None
    monkeypatch.setenv("CUDSS_THREADING_LIB", "another one")
    assert direct._threading_layer() is None
