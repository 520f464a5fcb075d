"""How messages call what came: by its public class and its library."""

from __future__ import annotations

from typing import Any


def public_class(x: Any) -> type:
    """The class of `x`, or the nearest of its bases whose name is not private."""
    found = next(kind for kind in type(x).__mro__ if not kind.__name__.startswith("_"))
    return type(x) if found is object or found.__module__ in ("abc", "typing") else found


def class_of(x: Any) -> str:
    """The class of `x` after the name of its library, such as "numpy ndarray"; a class of Python alone: "list"."""
    kind = public_class(x)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library == "builtins" else f"{library} {kind.__name__}"


def named(x: Any) -> str:
    """`class_of`, with an article before a class of Python: "a list"; None is itself."""
    if x is None:
        return "None"
    name = class_of(x)
    if " " in name:
        return name
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
