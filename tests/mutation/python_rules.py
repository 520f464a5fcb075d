"""Small semantic errors in Python, by rule: exact source positions come from the syntax tree.

Docstrings, messages of errors and warnings, type hints, decorators, imports, assertions, `__repr__` and `__str__` are
left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .sites import Site

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_OPERATORS: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("//", "+")),
    ast.FloorDiv: ("//", ("*", "%")),
    ast.Div: ("/", ("*",)),
    ast.Mod: ("%", ("//",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
}
#: Names that are exchanged for each other: dtypes, and functions with an opposite.
_PAIRS = (("int32", "int64"), ("float32", "float64"), ("complex64", "complex128"), ("FLOAT16", "BFLOAT16"))
_EXCHANGED = {
    **{a: b for pair in _PAIRS for a, b in (pair, pair[::-1])},
    **{"uint8": "int8", "uint16": "int16", "uint32": "int32", "uint64": "int64", "float16": "float32", "bool_": "int8"},
}
_OPPOSITES = {
    **{"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"},
    **{"zeros": "ones", "ones": "zeros", "floor": "ceil", "ceil": "floor"},
}
#: Functions of which the order of arguments changes nothing.
_SYMMETRIC = {"min", "max", "minimum", "maximum", "result_type", "broadcast_shapes", "lcm", "gcd", "logical_or"}
#: Functions whose arguments are text for people, or that say nothing about results.
_TALK = {"warn", "print", "add_argument", "cast", "TypeVar", "getattr", "hasattr", "isinstance", "issubclass"}


class _Finder:
    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.lines = text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.sites: list[Site] = []
        self.statement: tuple[int, int] = (1, 1)

    def at(self, line: int, column: int) -> int:
        """Offset in characters of a line from 1 and a column in bytes."""
        text = self.lines[line - 1]
        return self.starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def source(self, node: ast.AST) -> str:
        first, last = self.span(node)
        return self.text[first:last]

    def add(self, rule: str, start: int, end: int, *news: str) -> None:
        for new in news:
            if new != self.text[start:end] and "# pragma" not in self.lines[self.text.count("\n", 0, start)]:
                self.sites.append(Site(self.file, rule, start, end, new, *self.statement))

    def replace(self, rule: str, node: ast.AST, *news: str) -> None:
        self.add(rule, *self.span(node), *news)

    def between(self, rule: str, left: ast.AST, right: ast.AST, old: str, news: tuple[str, ...]) -> None:
        """Exchange an operator that stands between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(r"#[^\n]*", lambda found: " " * len(found.group()), self.text[start:end])
        pattern = (
            r"(?<!\w)" + r"\s+".join(map(re.escape, old.split())) + r"(?!\w)" if old[0].isalpha() else re.escape(old)
        )
        found = re.search(pattern, gap)
        if found is not None:
            self.add(rule, start + found.start(), start + found.end(), *news)

    # ------------------------------------------------------------------------------------------- statements
    def body(self, statements: list[ast.stmt]) -> None:
        for number, statement in enumerate(statements):
            if number == 0 and _is_docstring(statement):
                continue
            self.visit_statement(statement)

    def visit_statement(self, node: ast.stmt) -> None:
        self.statement = (node.lineno, node.end_lineno or node.lineno)
        match node:
            case ast.FunctionDef():
                if node.name in ("__repr__", "__str__"):
                    return
                first = node.body[1 if _is_docstring(node.body[0]) and len(node.body) > 1 else 0]
                self.statement = (node.lineno, first.lineno)
                for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                    self.visit(default)
                self.body(node.body)
            case ast.ClassDef():
                self.body(node.body)
            case ast.If() | ast.While():
                if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                    return
                self.statement = (node.lineno, node.test.end_lineno or node.lineno)
                self.condition(node.test)
                self.visit(node.test)
                self.body(node.body)
                self.body(node.orelse)
            case ast.For():
                self.statement = (node.lineno, node.iter.end_lineno or node.lineno)
                self.visit(node.iter)
                self.body(node.body)
                self.body(node.orelse)
            case ast.With():
                for item in node.items:
                    self.visit(item.context_expr)
                self.body(node.body)
            case ast.Try():
                self.body(node.body)
                for handler in node.handlers:
                    self.body(handler.body)
                self.body(node.orelse)
                self.body(node.finalbody)
            case ast.Raise():
                self.replace("drop a check", node, "pass")
            case ast.Assign():
                self.assignment(node)
            case ast.AugAssign():
                self.replace("drop a statement", node, "pass")
                self.augmented(node)
                self.visit(node.value)
            case ast.AnnAssign():
                if node.value is not None:
                    self.visit(node.value)
            case ast.Expr():
                if isinstance(node.value, ast.Call) and self.called(node.value) not in _TALK:
                    self.replace("drop a statement", node, "pass")
                self.visit(node.value)
            case ast.Return():
                if node.value is not None:
                    self.visit(node.value)
            case ast.Continue():
                self.replace("drop a statement", node, "pass")
            case ast.Match():
                for case in node.cases:
                    self.body(case.body)

    def assignment(self, node: ast.Assign) -> None:
        targets = [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript | ast.Attribute):
            self.replace("drop a statement", node, "pass")
        elif len(node.targets) > 1 and isinstance(node.targets[-1], ast.Subscript | ast.Attribute):
            first, last = self.span(node.targets[-1])[0], self.span(node.value)[0]
            self.add("drop an assignment to a cache", first, last, "")
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self.visit(target.slice)

    def augmented(self, node: ast.AugAssign) -> None:
        known = _OPERATORS.get(type(node.op))
        if known is not None and not _is_text(node.value):
            self.between("operator", node.target, node.value, known[0] + "=", tuple(f"{new}=" for new in known[1]))

    def condition(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.replace("negate a condition", test, f"({self.source(test.operand)})")
        elif not isinstance(test, ast.Compare) or len(test.ops) > 1:
            self.replace("negate a condition", test, f"not ({self.source(test)})")

    # ------------------------------------------------------------------------------------------ expressions
    def visit(self, node: ast.expr) -> None:
        match node:
            case ast.JoinedStr():
                return
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
                    self.between("comparison", left, right, *_COMPARISONS[type(op)])
            case ast.BinOp():
                known = _OPERATORS.get(type(node.op))
                if (
                    known is not None
                    and not _is_text(node.left)
                    and not _is_text(node.right)
                    and not self.is_union(node)
                ):
                    self.between("operator", node.left, node.right, *known)
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    self.between("and, or", left, right, old, (new,))
            case ast.UnaryOp(op=ast.Not()):
                self.replace("negate a condition", node, f"({self.source(node.operand)})")
            case ast.UnaryOp(op=ast.USub()):
                if not isinstance(node.operand, ast.Constant):
                    self.replace("operator", node, f"({self.source(node.operand)})")
            case ast.IfExp():
                self.condition(node.test)
            case ast.Constant():
                self.constant(node)
            case ast.Name() | ast.Attribute():
                self.name(node)
            case ast.Subscript():
                self.subscript(node)
            case ast.Call():
                self.call(node)
                return
            case ast.Lambda():
                self.visit(node.body)
                return
        for child in self.children(node):
            self.visit(child)

    def children(self, node: ast.AST) -> Iterator[ast.expr]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield child
            elif isinstance(child, ast.comprehension):
                yield from (child.iter, *child.ifs)
            elif isinstance(child, ast.keyword):
                yield child.value
            elif isinstance(child, ast.Slice):
                yield from self.children(child)

    def is_union(self, node: ast.BinOp) -> bool:
        """Is this a union of classes, `int | str`?"""
        if not isinstance(node.op, ast.BitOr):
            return False
        names = [_last(x) for x in (node.left, node.right)]
        return any(name[:1].isupper() or name in ("int", "float", "str", "list", "tuple", "bool") for name in names)

    def constant(self, node: ast.Constant) -> None:
        value = node.value
        if value is True or value is False:
            self.replace("constant", node, str(not value))
        elif isinstance(value, int):
            self.replace("constant", node, str(value + 1), *([str(value - 1)] if value > 0 else []))
        elif isinstance(value, float) and value not in (0.0,):
            self.replace("constant", node, repr(value * 2))

    def name(self, node: ast.Name | ast.Attribute) -> None:
        name = _last(node)
        if name in _EXCHANGED:
            end = self.span(node)[1]
            self.add("dtype", end - len(name), end, _EXCHANGED[name])

    def subscript(self, node: ast.Subscript) -> None:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice):
                for bound, step in ((part.lower, "+"), (part.upper, "-")):
                    if bound is not None:
                        self.replace("slice", bound, f"{self.source(bound)} {step} 1")
                if part.lower is not None and part.upper is not None:
                    self.replace("slice", part.lower, "")

    def called(self, node: ast.Call) -> str:
        return _last(node.func)

    def call(self, node: ast.Call) -> None:
        name = self.called(node)
        if name in _TALK or name.endswith(("Error", "Warning", "Exception")):
            return
        if name in _OPPOSITES:
            end = self.span(node.func)[1]
            self.add("opposite function", end - len(name), end, _OPPOSITES[name])
        if isinstance(node.func, ast.Name | ast.Attribute):
            self.name(node.func)
        for keyword in node.keywords:
            self.drop_keyword(node, keyword)
        for left, right in zip(node.args, node.args[1:], strict=False) if name not in _SYMMETRIC else ():
            simple = ast.Name | ast.Attribute | ast.Subscript
            if type(left) is type(right) and isinstance(left, simple) and self.source(left) != self.source(right):
                first, last = self.span(left)[0], self.span(right)[1]
                middle = self.text[self.span(left)[1] : self.span(right)[0]]
                self.add("swap arguments", first, last, f"{self.source(right)}{middle}{self.source(left)}")
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
        said = (keyword.value for keyword in node.keywords if keyword.arg != "strict")  # as in `drop_keyword`
        for child in (*node.args, *said):
            if not (name == "reshape" and isinstance(child, ast.UnaryOp)):  # any negative number means "the rest"
                self.visit(child)

    def drop_keyword(self, node: ast.Call, keyword: ast.keyword) -> None:
        if keyword.arg is None or keyword.arg in ("strict", "stacklevel", "copy"):
            return  # without `strict` or `copy` the same numbers come out
        first, last = self.span(keyword)
        behind = re.compile(r"\s*,\s*").match(self.text, last)
        if behind is not None:
            self.add("drop a keyword", first, behind.end(), "")
        else:
            before = re.compile(r",\s*$").search(self.text[:first])
            self.add("drop a keyword", before.start() if before else first, last, "")


def _last(node: ast.AST) -> str:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def sites(file: str, text: str) -> list[Site]:
    """Every error that the rules can make in a Python source, in the order of the text."""
    finder = _Finder(file, text)
    finder.body(ast.parse(text).body)
    return sorted(dict.fromkeys(finder.sites), key=lambda site: (site.start, site.end, site.new))


def parses(text: str) -> bool:
    """Is this Python? A rule may leave something that is not."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
