"""A digest of CUDA code that edits of comments and of blank space do not change."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bsrgemm._kernels.jit import digest

_TOKEN = re.compile(
    r"""
    (?P<comment> //(?:\\\r?\n|[^\n])* | /\*.*?(?:\*/|\Z) )
  | (?P<raw>     (?:u8|[uUL])?R"(?P<fence>[^()\\\s]*)\(.*?\)(?P=fence)" )
  | (?P<quoted>  "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
  | (?P<word>    \.?\d(?:[eEpP][+-]|'?[\w.])* | [A-Za-z_]\w* )
  | (?P<blank>   \\\r?\n | [^\S\n]+ )
  | (?P<newline> \n )
  | (?P<other>   . )
    """,
    re.VERBOSE | re.DOTALL,
)


def strip(text: str) -> str:
    """Return C++ text without comments and with each run of blanks replaced by one; literals stay unchanged.

    A preprocessor directive keeps a line of its own. All other line ends count as blanks.
    """
    parts: list[str] = []
    blank = directive = False
    line_start = True
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind in ("comment", "blank"):
            blank = True
            continue
        if kind == "newline":
            if directive:
                parts.append("\n")
            blank, directive, line_start = not directive, False, True
            continue
        if line_start and match.group() == "#":
            parts.append("\n")
            directive = True
        elif blank:
            parts.append(" ")
        parts.append(match.group())
        blank = line_start = False
    return "".join(parts).strip()


def code_digest(texts: Mapping[str, str]) -> str:
    """Return the SHA-256 digest of the code alone. Edits of comments and blank space do not change it."""
    return digest({name: strip(text) for name, text in texts.items()})
