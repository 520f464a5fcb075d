"""Files of measured rows: written whole or not at all, read with a reason where they are not such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FORMAT = 1
#: Fields of a row that say what was measured, not what was found
_IDENTITY = (
    "what", "case", "n", "block", "columns", "dtype", "precision", "pattern", "kernel", "shape", "mask", "problem",
    "unknowns", "smoother", "density",
)  # fmt: skip


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the whole file or nothing; an existing file is replaced."""
    whole = path.with_name(f".{path.name}.tmp")
    whole.write_text(json.dumps({"format": FORMAT} | found, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read a file that `write` wrote; ValueError with the reason for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("rows"), list):
        raise ValueError(f"{path}: expected a file of `python -m bsrgemm bench --json`, format {FORMAT}")
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A new file whose rows replace the rows of the same problems in an old file; its other rows stay.

    The machine and the commit of the old rows are kept in `earlier`.
    """
    fresh = {_identity(row): row for row in new["rows"]}
    kept = [fresh.pop(_identity(row), row) for row in old["rows"]]
    about = {name: old[name] for name in ("machine", "commit", "dirty") if name in old}
    now = {name: new[name] for name in about if name in new}  # a run that writes several times is one run
    earlier = [each for each in (about, *old.get("earlier", [])) if each != now]
    earlier = earlier if any(row not in new["rows"] for row in kept) else []
    return new | {"rows": [*kept, *fresh.values()]} | ({"earlier": earlier} if earlier else {})


def _identity(row: dict[str, Any]) -> str:
    """What a row measured, as text."""
    return json.dumps([row.get(name) for name in _IDENTITY])
