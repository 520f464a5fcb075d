"""Small errors in Python and in CUDA, by rule. What is said to people, type hints and assertions are left alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Error:
    """Replace `start` to `end` of a file by `new`. It can matter to tests that execute some of the `lines`, from 1."""

    file: str
    rule: str
    start: int
    end: int
    new: str
    lines: tuple[int, int]

    def applied(self, text: str) -> str:
        """The file with the error."""
        return text[: self.start] + self.new + text[self.end :]


#: A sign or word, and what it is exchanged for.
_EXCHANGES = "< <= >, <= < >, > >= <, >= > <, == !=, != ==, + -, - +, * + /, / *, // * %, % /, << >>, >> <<, & |, " \
             "| &, ^ |, && ||, || &&, += -=, -= +=, *= +=, |= &=, &= |="  # fmt: skip
_SIGNS = {old: news for old, *news in (words.split() for words in _EXCHANGES.split(", "))}
_NODES = "Lt < LtE <= Gt > GtE >= Eq == NotEq != Add + Sub - Mult * FloorDiv // Div / Mod % BitAnd & BitOr |"
_NODE_SIGNS = {getattr(ast, name): sign for name, sign in re.findall(r"(\w+) (\S+)", _NODES)}
_WORDS = {ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}
_PAIRS = "int32 int64, float32 float64, complex64 complex128, min max, any all, minimum maximum, zeros ones, floor ceil"
#: Names of dtypes and functions that are exchanged for each other.
_EXCHANGED = {a: b for pair in _PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
#: Functions of which the order of arguments changes nothing.
_SYMMETRIC = {"min", "max", "minimum", "maximum", "result_type", "broadcast_shapes", "lcm", "gcd", "logical_or"}
#: Functions whose arguments are text for people, or that say nothing about results.
_TALK = {"warn", "print", "add_argument", "cast", "TypeVar", "getattr", "hasattr", "isinstance", "issubclass"}
#: Keywords without which the same numbers come out.
_NO_MATTER = (None, "strict", "stacklevel", "copy")


class _Python(ast.NodeVisitor):
    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.errors = file, text, list[Error]()
        self.encoded = [line.encode() for line in text.split("\n")]
        self.starts = [0]
        for line in text.split("\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.statement, self.inside = (1, len(self.encoded)), 0

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.encoded[line - 1][:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def source(self, node: ast.AST) -> str:
        return self.text[slice(*self.span(node))]

    def add(self, rule: str, start: int, end: int, *news: str) -> None:
        self.errors += [Error(self.file, rule, start, end, new, self.statement) for new in news]

    def replace(self, rule: str, node: ast.AST, *news: str) -> None:
        self.add(rule, *self.span(node), *news)

    def between(self, rule: str, left: ast.AST, right: ast.AST, old: str, *news: str) -> None:
        """Exchange an operator that stands between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        found = re.search(re.escape(old).replace(r"\ ", r"\s+"), self.text[start:end])
        if found is not None:
            self.add(rule, start + found.start(), start + found.end(), *news)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and self.inside:
            last = node.body[0].lineno if isinstance(node, ast.FunctionDef) else node.end_lineno or node.lineno
            head = getattr(node, "test", getattr(node, "iter", None))
            self.statement = (node.lineno, head.end_lineno if head is not None else last)
        elif _is_for_people(node):
            return
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in ("__repr__", "__str__"):
            self.inside += 1
            for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
                self.visit(child)
            self.inside -= 1
            self.statement = (1, len(self.encoded)) if not self.inside else self.statement

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_Import(self, node: ast.Import | ast.ImportFrom | ast.Assert) -> None:
        pass

    visit_ImportFrom = visit_Assert = visit_Import

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if not isinstance(node.test, ast.Compare) or len(node.test.ops) > 1:
            self.replace("negate a condition", node.test, f"(not ({self.source(node.test)}))")
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace("drop a check", node, "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        if _last(last := node.targets[-1]) == "__all__":
            return
        if isinstance(last, ast.Subscript | ast.Attribute):
            alone = len(node.targets) == 1
            start, end = self.span(node) if alone else (self.span(last)[0], self.span(node.value)[0])
            self.add("drop an assignment", start, end, "pass" if alone else "")
        for target in (target for target in node.targets if isinstance(target, ast.Subscript)):
            self.visit(target.slice)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("drop a statement", node, "pass")
        if (sign := _NODE_SIGNS.get(type(node.op))) is not None:
            self.between("operator", node.target, node.value, *(f"{new}=" for new in (sign, *_SIGNS[sign])))
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _is_for_people(node.value):
            self.replace("drop a statement", node, "pass")
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
            sign = _NODE_SIGNS.get(type(op))
            self.between("comparison", left, right, *((sign, *_SIGNS[sign]) if sign else _WORDS[type(op)]))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sign = _NODE_SIGNS.get(type(node.op))
        texts = any(_is_for_people(x) or (isinstance(x, ast.Constant) and isinstance(x.value, str))
                    for x in (node.left, node.right))  # fmt: skip
        union = isinstance(node.op, ast.BitOr) and any(_last(x)[:1].isupper() for x in (node.left, node.right))
        if sign is not None and not texts and not union:
            self.between("operator", node.left, node.right, sign, *_SIGNS[sign])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("and, or", left, right, *words)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
            self.replace("drop a sign", node, f"({self.source(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace("constant", node, str(node.value + 1), *([str(node.value - 1)] if node.value else []))
        elif isinstance(node.value, float) and node.value:
            self.replace("constant", node, repr(node.value * 2))

    def visit_Name(self, node: ast.Name | ast.Attribute) -> None:
        end, name = self.span(node)[1], _last(node)
        if name in _EXCHANGED:
            self.add("exchange a name", end - len(name), end, _EXCHANGED[name])
        self.generic_visit(node)

    visit_Attribute = visit_Name

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound, step in ((node.lower, "+"), (node.upper, "-")):
            if bound is not None:
                self.replace("slice", bound, f"{self.source(bound)} {step} 1")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in (keyword for keyword in node.keywords if keyword.arg not in _NO_MATTER):
            first, last = self.span(keyword)
            behind = re.match(r"\s*,\s*", self.text[last:])
            before = re.search(r",\s*$", self.text[:first]) if behind is None else None
            self.add("drop a keyword", before.start() if before else first, last + (behind.end() if behind else 0), "")
        simple = ast.Name | ast.Attribute | ast.Subscript
        for left, right in zip(node.args, node.args[1:], strict=False) if _last(node.func) not in _SYMMETRIC else ():
            if type(left) is type(right) and isinstance(left, simple) and self.source(left) != self.source(right):
                (first, start), (end, last) = self.span(left), self.span(right)
                swapped = f"{self.source(right)}{self.text[start:end]}{self.source(left)}"
                self.add("swap arguments", first, last, swapped)
        self.generic_visit(node)


def _last(node: ast.AST) -> str:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_for_people(node: ast.AST) -> bool:
    """Is this text, or a call that makes a message?"""
    if isinstance(node, ast.Call):
        return _last(node.func) in _TALK or _last(node.func).endswith(("Error", "Warning", "Exception"))
    return isinstance(node, ast.JoinedStr)


def parses(text: str) -> bool:
    """Is this Python? A rule may leave something that is not."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


_HIDDEN = re.compile(
    r"""
    //[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'  # comments and strings
  | ^\#ifdef\ STRESS.*?^\#endif | ^\#if\ __CUDA_ARCH__\ >=\ 900.*?^\#else  # what the emulator does not compile
  | ^[ \t]*\#(?:[^\n\\]|\\\n|\\.)*                          # preprocessor lines
  | \b(?:asm|asm\ volatile|static_assert|alignas|__align__|__launch_bounds__)\s*
    \((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)
  | ^[^\n]*\btemplate\b[^\n]*
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
#: A rule, what it looks for (the last group, if there is one), and what it puts there. Operators stand between blanks;
#: what does not is a pointer, a template or a sign.
_RULES: tuple[tuple[str, str, Callable[[str], Iterable[str]]], ...] = (
    ("operator", r"(?<=\s)(<<|>>|<=|>=|==|!=|&&|\|\||[-+*|&]=|[-+*/%<>&|^])(?=\s)", lambda old: _SIGNS[old]),
    ("constant", r"(?<![\w.])(\d+)(?=[uUlL]*(?![\w.]))", lambda old: [str(int(old) + 1), str(max(0, int(old) - 1))]),
    ("min, max", r"\bf?(min|max)(?=f?\()", lambda old: [_EXCHANGED[old]]),
    ("remove a guard", r"\bif \(((?:[^()=]|[<>=!]=|\((?:[^()=]|[<>=!]=|\([^()=]*\))*\))*)\)", lambda old: ["true"]),
    ("remove a barrier", r"\b__sync(?:threads|warp)\s*\([^;]*\);", lambda old: [";"]),
    ("negate a condition", r"(?<=[(\s])!(?=[A-Za-z_(])", lambda old: [""]),
)  # fmt: skip


def errors(file: str, text: str) -> list[Error]:
    """Every error that the rules can make in a source, in the order of the text."""
    if file.endswith(".py"):
        finder = _Python(file, text)
        finder.visit(ast.parse(text))
        found = finder.errors
    else:
        found, code = [], _HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
        for rule, pattern, exchange in _RULES:
            for place in re.finditer(pattern, code):
                start, end = place.span(place.lastindex or 0)
                line = text.count("\n", 0, start) + 1
                news = [new for new in exchange(code[start:end]) if new != code[start:end]]
                found += [Error(file, rule, start, end, new, (line, line)) for new in news]
    return sorted(dict.fromkeys(found), key=lambda error: (error.start, error.end, error.new))
