"""Small semantic errors in CUDA, by rule: in tokens, not in comments, strings, assembly and preprocessor lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .sites import Site

_HIDDEN = re.compile(
    r"""
    //[^\n]* | /\*.*?\*/                                   # comments
  | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'               # strings
  | ^\#ifdef\ STRESS.*?^\#endif | ^\#if\ __CUDA_ARCH__\ >=\ 900.*?^\#else  # what the emulator does not compile
  | ^[ \t]*\#(?:[^\n\\]|\\\n|\\.)*                          # preprocessor lines
  | \b(?:static_assert|alignas|__align__|__launch_bounds__)\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_ASSEMBLY = re.compile(r"\basm(?:\s+volatile)?\s*\(")
_OPERATORS = {
    "<": ("<=", ">"),
    "<=": ("<",),
    ">": (">=", "<"),
    ">=": (">",),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "/": ("*",),
    "%": ("/",),
    "<<": (">>",),
    ">>": ("<<",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
    "&&": ("||",),
    "||": ("&&",),
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("+=",),
    "|=": ("&=",),
    "&=": ("|=",),
}
#: Operators stand between blanks; what does not is a pointer, a template or a sign.
_OPERATOR = re.compile(r"(?<=\s)(<<|>>|<=|>=|==|!=|&&|\|\||[-+*|&]=|[-+*/%<>&|^])(?=\s)")
_KINDS = {**dict.fromkeys(("+", "-", "*", "/", "%", "+=", "-=", "*="), "operator"), "<<": "shift", ">>": "shift"}
_MASKS = {"&", "|", "^", "|=", "&="}
_NUMBER = re.compile(r"(?<![\w.])(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)(?![\w.])")
_EXTREMES = re.compile(r"\b(f?)(min|max)(f?)(?=\()")
_GUARD = re.compile(r"\bif\s*\(")
_BARRIER = re.compile(r"\b__sync(?:threads|warp)\s*\([^;]*\);")
_NOT = re.compile(r"(?<=[(\s])!(?=[A-Za-z_(])")


def hidden(text: str) -> str:
    """The text with everything in which no error is made as blanks, of the same length."""
    text = _HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
    for found in list(_ASSEMBLY.finditer(text)):
        end = _closing(text, found.end() - 1)
        text = text[: found.start()] + re.sub(r"[^\n]", " ", text[found.start() : end]) + text[end:]
    return text


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` is closed."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return len(text)


def sites(file: str, text: str) -> list[Site]:
    """Every error that the rules can make in a CUDA source."""
    return [
        Site(file, rule, start, end, new, line, line)
        for rule, start, end, new in _found(hidden(text))
        for line in (text.count("\n", 0, start) + 1,)
    ]


def _found(text: str) -> Iterator[tuple[str, int, int, str]]:
    for found in _OPERATOR.finditer(text):
        old = found.group()
        if old in "<>" and "template" in text[text.rfind("\n", 0, found.start()) : found.start()]:
            continue
        rule = "mask" if old in _MASKS else _KINDS.get(old, "and, or" if old in ("&&", "||") else "comparison")
        for new in _OPERATORS[old]:
            yield rule, *found.span(), new
    for found in _NUMBER.finditer(text):
        value = int(found.group(1), 0)
        for other in (value + 1, value - 1):
            if other >= 0:
                yield "constant", *found.span(1), hex(other) if found.group(1)[:2] in ("0x", "0X") else str(other)
    for found in _EXTREMES.finditer(text):
        yield "min, max", *found.span(2), "max" if found.group(2) == "min" else "min"
    for found in _GUARD.finditer(text):
        end = _closing(text, found.end() - 1)
        if "constexpr" not in text[found.start() : found.end()] and "=" not in text[found.end() : end].replace(
            "==", ""
        ):
            yield "remove a guard", found.end(), end - 1, "true"
    for found in _BARRIER.finditer(text):
        yield "remove a barrier", *found.span(), ";"
    for found in _NOT.finditer(text):
        yield "negate a condition", *found.span(), ""
