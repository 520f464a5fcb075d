"""Ranks that are processes: mpi4py with an MPI library that pip installs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..conftest import has_cuda

#: Seconds that ranks may take, many times of what they take on two idle cores.
PATIENCE = 120


def mpiexec() -> str:
    """The launcher that belongs to this Python."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip('mpi4py is not installed: pip install "bsrgemm[mpi]"')
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("mpiexec is not on the PATH")
    return found


def ranks(size: int, *programs: str) -> subprocess.CompletedProcess[str]:
    """Run programs of `mpi_programs` on so many ranks; options come before their names."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    # The mpiexec of Open MPI refuses to start for the user root, as whom containers run.
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpiexec(), "-n", str(size), sys.executable, "-m", "tests.interop.mpi_programs", *programs]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_two_ranks_of_mpi_compute_what_one_process_does() -> None:
    found = ranks(2, "communicator", "bad_input", "equality", "attention_ring")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 ranks: communicator, bad_input, equality, attention_ring passed" in found.stdout


@pytest.mark.long
@pytest.mark.skipif(not has_cuda(), reason="two ranks that share a card need one")
@pytest.mark.parametrize("programs", [("communicator", "bad_input", "equality"), ("attention_ring",)])
def test_two_ranks_that_share_a_card_compute_what_one_process_does(programs: tuple[str, ...]) -> None:
    found = ranks(2, "--device", "cuda", *programs)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"2 ranks: {', '.join(programs)} passed" in found.stdout


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3, 4])
def test_more_ranks_than_cores_compute_what_one_process_does(size: int) -> None:
    programs = (
        ("equality", "attention_ring") if size == 1 else ("communicator", "bad_input", "equality", "attention_ring")
    )
    found = ranks(size, *programs)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.long
def test_communicators_that_the_user_frees_are_freed() -> None:
    found = ranks(2, "freed")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.long
@pytest.mark.parametrize(("how", "message"), [("raise", "this rank has failed"), ("kill", "BAD TERMINATION")])
def test_a_rank_that_dies_ends_all_with_a_message(how: str, message: str) -> None:
    start = time.monotonic()
    found = ranks(2, how)
    assert found.returncode != 0 and "passed" not in found.stdout
    assert message in found.stdout + found.stderr
    if how == "raise":
        assert "rank 1 has failed (ArithmeticError): all ranks are ended" in found.stderr
    assert time.monotonic() - start < 30  # the other rank would sleep for 60 s
