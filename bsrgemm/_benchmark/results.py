"""Files of measured rows: written whole or not at all, read with a reason where they are not such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FORMAT = 1


def write(path: Path, found: dict[str, Any]) -> None:
    """All of it or nothing, also over a file that is there."""
    whole = path.with_name(f".{path.name}.tmp")
    whole.write_text(json.dumps({"format": FORMAT} | found, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote; ValueError with the reason for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("rows"), list):
        raise ValueError(f"{path}: expected a file of `python -m bsrgemm bench --json`, format {FORMAT}")
    return found
