"""No file of code is longer than one can read through: 700 lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 700


def too_long(root: Path, names: list[str]) -> dict[str, int]:
    """The files below `root` with more than `MOST_LINES`, and their lines; what is not there has none."""
    paths = {name: root / name for name in names if (root / name).is_file()}
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in paths.items()}
    return {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_no_file_of_code_is_too_long() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    command = ["git", "ls-files", "*.py", "*.cu", "*.cuh"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    assert names
    assert too_long(ROOT, names) == {}


def test_a_file_that_is_too_long_is_told(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("pass\n" * MOST_LINES)
    (tmp_path / "long.py").write_text("pass\n" * (MOST_LINES + 1))
    assert too_long(tmp_path, ["short.py", "long.py", "gone.py"]) == {"long.py": MOST_LINES + 1}
