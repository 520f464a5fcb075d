"""What README says is what happens: its commands and its example. test_docs.py follows its links."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _command(part: str) -> str:
    """The one command line of README that contains `part`."""
    (line,) = [line for block in _blocks("sh") for line in block.splitlines() if part in line]
    return line


def _extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"]


def test_ci_runs_the_test_command_of_the_readme_in_an_environment_of_its_own() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    first, command = _command("pytest").split(" && ", 1)
    assert first == "venv=.venv"
    assert script.splitlines()[-1] == command
    assert "venv=$(mktemp -d)" in script
    assert "set -euo pipefail" in script


def test_the_long_profile_installs_what_builds_the_site() -> None:
    """Without it the test of the site would be skipped there, and run nowhere."""
    script = (ROOT / ".ci" / "long").read_text(encoding="utf-8")
    assert '".[test,long$' in script and "BSRGEMM_LONG" in script
    assert "bsrgemm[docs]" in _extras()["long"]


def test_the_commands_of_the_readme_name_extras_that_exist() -> None:
    asked = [re.sub(r"\$\(.*?echo (.*?)\)", r"\1", extras) for extras in re.findall(r'"\.\[([^"]*)\]"', README)]
    named = {name for extras in asked for name in extras.split(",")}
    assert {"test", "cuda12"} <= named <= set(_extras())


def test_the_table_of_extras_is_that_of_the_project() -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    table = page.partition("| extra | brings | for |")[2].partition("\n\n")[0]
    first = (line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert sorted(name for cell in first for name in re.findall(r"`(\w+)`", cell)) == sorted(_extras())


def test_the_main_command_of_the_readme_measures(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.__main__ import parser

    program, *command = shlex.split(_command("bench --quick").split(" && ")[-1])
    assert program == ".venv/bin/python" and command == ["-m", "bench", "--quick"]
    assert parser().parse_args(command[2:]).quick


def test_the_example_of_the_readme_runs_and_is_right() -> None:
    (example,) = _blocks("python")
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    A, B, C, G, H, S = (names[name] for name in "ABCGHS")
    dense = A.toarray()
    np.testing.assert_allclose(C, dense @ B)
    np.testing.assert_allclose(G.toarray(), dense @ dense.T)
    assert G.format == "bsr" and G.blocksize == (16, 16)
    np.testing.assert_allclose(H, C)
    assert S.format == "csr"
    np.testing.assert_allclose(S.toarray(), dense[:16])
    np.testing.assert_allclose(names["O"], 1)  # every value is


@pytest.mark.parametrize("name", re.findall(r"python -m bsrgemm (\w+)", README))
def test_the_readme_names_commands_that_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from bsrgemm.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert name in capsys.readouterr().out
