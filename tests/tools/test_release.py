"""A release: its version is one, its files are whole, and what they install works where nothing else is.

The long profile builds the source distribution and the wheel as they are published, which asks the package index.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import bsrgemm
from bsrgemm._kernels import jit

from .test_package import CUDA_FILES, ROOT, _run

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

TRY = """
import numpy as np, bsrgemm as bg
A = bg.bsr_array(np.kron(np.eye(3), np.ones((2, 2))), blocksize=(2, 2))
assert (A @ np.arange(6.0)).tolist() == [1, 1, 5, 5, 9, 9]
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 16))
scores = np.where(np.tri(40, dtype=bool), q @ k.swapaxes(-1, -2) / 4, -np.inf)
weights = np.exp(scores - scores.max(-1, keepdims=True))
expected = weights / weights.sum(-1, keepdims=True) @ v
np.testing.assert_allclose(bg.attention(q, k, v, causal=True), expected, rtol=1e-10, atol=1e-12)
print(bg.__file__)
"""
COMPILE = """
from bsrgemm._backend.array_kernels import Expand
from bsrgemm._kernels import jit
compiled = jit.compile_cubin(Expand("i32").spec(), "sm_80")
assert len(compiled.cubin) > 1000
print(jit.cuda_root())
"""


def _field(name: str) -> str | None:
    """The value of a field at the top level of the citation file."""
    found = re.search(rf"^{name}: (.*)$", CITATION, re.MULTILINE)
    return found and found[1].strip('"')


# ------------------------------------------------------------------------------------- the version
def test_the_citation_file_names_the_version_of_the_package() -> None:
    assert _field("version") == bsrgemm.__version__
    assert _field("license") == PROJECT["project"]["license"]


def test_the_version_is_the_newest_one_of_the_changes_and_its_day_that_of_the_citation() -> None:
    version, day = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d|unreleased)\)$", CHANGES, re.MULTILINE)[0]
    assert version == bsrgemm.__version__
    assert _field("date-released") == (None if day == "unreleased" else day)


# ------------------------------------------------------------------------------------ the metadata
def test_every_classifier_is_one_that_the_package_index_knows() -> None:
    known = pytest.importorskip("trove_classifiers").classifiers
    assert set(PROJECT["project"]["classifiers"]) <= known


# ----------------------------------------------------------------------------------- the file lists
def _listed(builder: str, name: str) -> set[str]:
    """The files that a builder of hatchling would take, by the configuration alone."""
    module = pytest.importorskip(f"hatchling.builders.{builder}")
    return {file.distribution_path for file in getattr(module, name)(str(ROOT)).recurse_included_files()}


def test_the_configuration_puts_every_cuda_source_into_the_wheel_and_the_source_distribution() -> None:
    assert {f"bsrgemm/cuda/{name}" for name in CUDA_FILES} <= _listed("wheel", "WheelBuilder")
    assert {f"cuda/{name}" for name in CUDA_FILES} <= _listed("sdist", "SdistBuilder")


def test_the_source_distribution_has_everything_that_the_checkout_has() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = set(subprocess.check_output(command, cwd=ROOT, text=True).split()) - {".gitignore", "pyproject.toml"}
    files = {name for name in files if (ROOT / name).exists()}
    assert files == _listed("sdist", "SdistBuilder")


# ---------------------------------------------------------------------------------- the files themselves
def _build(source: Path, kind: str, out: Path) -> Path:
    """A source distribution or a wheel, built with the declared requirements in an environment of its own."""
    _run(sys.executable, "-m", "build", f"--{kind}", "--outdir", out, source, cwd=out.parent)
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(ROOT, "sdist", tmp_path_factory.mktemp("build") / "sdist")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(ROOT, "wheel", tmp_path_factory.mktemp("build") / "wheel")


def _cupy() -> list[str]:
    """CuPy and NVRTC in the versions of this environment, if it has them."""
    if importlib.util.find_spec("cupy") is None:
        return []
    names = [d.name for d in importlib.metadata.distributions() if re.match(r"cupy-cuda|nvidia-cuda-nvrtc", d.name)]
    return [f"{name}=={importlib.metadata.version(name)}" for name in names]


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment in which one of the files was installed, with its dependencies."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "environment", with_pip=True, symlinks=True)
    python = folder / "environment" / "bin" / "python"
    _run(python, "-m", "pip", "install", "-q", request.getfixturevalue(request.param), *_cupy(), cwd=folder)
    return python


@pytest.mark.long
def test_what_is_installed_from_a_file_alone_works(installed: Path, tmp_path: Path) -> None:
    own = installed.parents[1]
    text = _run(installed, "-I", "-m", "bsrgemm", "info", cwd=tmp_path)
    assert re.search(rf"^bsrgemm +{re.escape(bsrgemm.__version__)}$", text, re.MULTILINE), text
    assert Path(_run(installed, "-I", "-c", TRY, cwd=tmp_path).strip()).is_relative_to(own)
    if _cupy():
        found = _run(installed, "-I", "-c", COMPILE, cwd=tmp_path).splitlines()[-1]
        assert Path(found).is_relative_to(own)


@pytest.mark.long
def test_the_wheel_made_from_the_source_distribution_is_the_same(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    again = _build(source, "wheel", tmp_path / "again")
    assert again.name == wheel.name
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())
        assert [name for name in first.namelist() if first.read(name) != second.read(name)] == []


def test_the_oldest_nvrtc_that_messages_name_is_the_first_that_is_tried() -> None:
    oldest = ".".join(map(str, jit.OLDEST_NVRTC))
    assert f'NVRTC = ("{oldest}", ' in (ROOT / "noxfile.py").read_text(encoding="utf-8")
