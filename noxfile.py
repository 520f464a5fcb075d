"""The versions that are supported: ``nox`` runs the host tests with them, and compiles the kernels with every NVRTC."""

from __future__ import annotations

import re

import nox

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
PYTHONS = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", text)]
#: CuPy without the libraries that it loads on a card.
CUPY = {cuda: PROJECT["optional-dependencies"][f"cuda{cuda}"][0].replace("[ctk]", "") for cuda in (12, 13)}
#: What the tests need beside the package, in the newest versions.
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "matplotlib", "rich", "pyamg", "scikit-fem", "nvidia-cuda-nvrtc-cu12")
TESTS = ("tests/array", "tests/products", "tests/attention", "tests/linalg")
#: The oldest NVRTC is that of bsrgemm._kernels.jit.OLDEST_NVRTC; the last patch of each minor version is taken.
NVRTC = ("12.4", "12.5", "12.6", "12.8", "12.9", "13.0", "13.1", "13.2", "13.3", "13.4")

nox.options.sessions = ["tests"]


@nox.session(python=PYTHONS)
@nox.parametrize("versions", ["oldest", "newest"])
def tests(session: nox.Session, versions: str) -> None:
    """The host tests with the oldest versions that pyproject.toml allows, or the newest that pip finds."""
    wanted = [*PROJECT["dependencies"], CUPY[12]]
    if versions == "oldest":
        wanted = [requirement.replace(">=", "==") for requirement in wanted]
    session.install(*TOOLS, *wanted)
    session.run("python", "-m", "pytest", "-p", "no:cacheprovider", *(session.posargs or TESTS))


@nox.session
@nox.parametrize("version", NVRTC)
def nvrtc(session: nox.Session, version: str) -> None:
    """Compile the default set of ``python -m bsrgemm compile`` for Hopper, or what its options after ``--`` name."""
    cuda = int(version.partition(".")[0])
    package = "nvidia-cuda-nvrtc-cu12" if cuda == 12 else "nvidia-cuda-nvrtc"
    session.install(*PROJECT["dependencies"], CUPY[cuda], f"{package}=={version}.*")
    command = ("python", "-m", "bsrgemm", "compile", *(session.posargs or ("--arch", "sm_90a")))
    session.run(*command, env={"CUPY_CACHE_DIR": session.create_tmp()})
