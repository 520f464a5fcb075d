"""Imports point down: from a room to those below it, never upwards, between sisters or in a circle.

Imports inside functions and those for type checkers alone count too. The one exception is the table of engines, which
names modules of its own room by text.
"""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import bsrgemm
from bsrgemm.interop import mpi

PACKAGE = Path(bsrgemm.__file__).parent
#: Rooms and modules from the bottom up. Those of one line are sisters: neither imports the other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("_version", "dtypes"),
    ("_kernels",),
    ("_backend",),
    ("_plotting",),
    ("_array",),
    ("_products", "_attention"),
    ("bsr", "_kernel_index", "_environment", "_pullbacks"),
    ("_batch",),
    ("linalg",),
    ("interop",),
    ("__init__",),
    ("_cli",),
    ("__main__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
#: A public function's keywords are its interface; what it calls takes one object instead.
MOST_PARAMETERS = 8


class Arrow(NamedTuple):
    """An import: from a module to a module, with what it takes from it."""

    source: str
    target: str
    name: str | None
    line: int

    def __str__(self) -> str:
        return f"{self.source} line {self.line} -> {self.target}" + (f": {self.name}" if self.name else "")


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name below it, parsed."""
    paths = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for name, path in paths.items()}


@cache
def arrows() -> list[Arrow]:
    """All imports from one module of the package to another."""
    return [arrow for arrow in imports(modules()) if arrow.source != arrow.target]


def imports(trees: dict[str, ast.Module]) -> Iterator[Arrow]:
    """All imports from a module of the package to a module of it."""
    for source, tree in trees.items():
        room = source.split(".")[:-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "bsrgemm":
                        yield Arrow(source, alias.name.partition(".")[2] or "__init__", None, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                if node.level:
                    base = room[: len(room) - node.level + 1]
                elif (node.module or "").split(".")[0] == "bsrgemm":
                    base = []
                else:
                    continue
                below = (node.module or "").split(".") if node.level else (node.module or "").split(".")[1:]
                module = ".".join([*base, *filter(None, below)])
                for alias in node.names:
                    inner = f"{module}.{alias.name}" if module else alias.name
                    if inner in trees:
                        yield Arrow(source, inner, None, node.lineno)
                    elif module in trees:
                        yield Arrow(source, module, alias.name, node.lineno)
                    else:
                        yield Arrow(source, f"{module}.__init__".lstrip("."), alias.name, node.lineno)


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_every_module_has_a_floor() -> None:
    assert {room_of(module) for module in modules()} == set(FLOOR)


def test_imports_point_down() -> None:
    wrong = []
    for arrow in arrows():
        here, there = room_of(arrow.source), room_of(arrow.target)
        if here != there and FLOOR[there] >= FLOOR[here]:
            wrong.append(str(arrow))
    assert not wrong


def test_imports_make_no_circle() -> None:
    below = defaultdict(set)
    for arrow in arrows():
        below[arrow.source].add(arrow.target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(below[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())


def test_no_private_name_is_imported_across_rooms() -> None:
    taken = [a for a in arrows() if a.name and a.name.startswith("_") and not a.name.startswith("__")]
    assert not [str(a) for a in taken if room_of(a.source) != room_of(a.target)]


def test_no_private_name_of_another_room_is_reached_through_its_module() -> None:
    """``from .._kernels import jit`` and then ``jit._kernels`` would be the same by another way."""
    wrong = []
    for source, tree in modules().items():
        bound: dict[str, str] = {}
        for arrow in arrows():
            if arrow.source == source and arrow.name is None:
                bound[arrow.target.split(".")[-1]] = arrow.target
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
                target = bound[node.value.id]
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                if private and room_of(target) != room_of(source):
                    wrong.append(f"{source} line {node.lineno}: {node.value.id}.{node.attr}")
    assert not wrong


def test_no_module_is_shadowed_by_what_has_its_name() -> None:
    for name in modules():
        room, _, module = name.rpartition(".")
        if module in ("__init__", "__main__"):
            continue
        found = importlib.import_module(f"bsrgemm.{name}")
        parent = importlib.import_module(f"bsrgemm.{room}" if room else "bsrgemm")
        assert getattr(parent, module) is found, name


def test_no_inner_function_takes_more_than_eight_parameters() -> None:
    public = {*bsrgemm.__all__, *bsrgemm.linalg.__all__, *mpi.__all__}
    wrong = []
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len([name for name in names if name not in ("self", "cls")])
                constructor = node.name == "__init__" and module in ("_attention.kv_cache", "bsr")
                if count > MOST_PARAMETERS and node.name not in public and not constructor:
                    wrong.append(f"{module}.{node.name} takes {count}")
    assert not wrong
