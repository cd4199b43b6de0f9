"""Functions of a Python file that return configurations: what is literal in them, by `ast`.

Nothing is run. Read are literals, calls by keyword (kept as their name and arguments), names of the
same function or file, functions of the same file, and assignments to attributes of what they
returned. Everything else is a value that the file leaves open, with its line.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import UndecidedValue
from workbench.untrusted_text import shown, visible

MOST_NODES = 50_000
"""Expressions of one configuration, each as often as it is read and as large as what it names: one
that calls others, or doubles what it has, could have any number.
"""
DEEPEST = 40
"""Functions and attributes within each other."""
MOST = 2**63
"""Numbers that are computed with: no setting is near it."""
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)


@dataclass
class Call:
    """A call that is not run: its dotted name, and its arguments, those without a name by
    number.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    line: int = 0


def parse(text: str) -> ast.Module:
    """The syntax of Python `text`. Raises `PlanError`."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise refuse("file", f"not valid Python: {error.msg} (line {error.lineno})") from None
    except ValueError:
        raise refuse("file", "not valid Python: it holds a null byte") from None
    except (RecursionError, MemoryError):
        raise refuse("file", "not valid Python: nested too deeply") from None


class PythonConfigs:
    """The functions of one file, by name; `returned` gives what one of them returns."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self.constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.imported = {
            alias.asname or alias.name: node.module or ""
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.bases = {
            n.name: [dotted(base) for base in n.bases]
            for n in tree.body
            if isinstance(n, ast.ClassDef)
        }
        self._left = MOST_NODES

    def returned(self, name: str, given: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
        """Value that function `name` returns, with arguments `given` by name or number. Raises
        `PlanError` where its calls have no end.
        """
        if depth == 0:
            try:
                return self.returned(name, given, 1)
            except RecursionError:
                raise refuse("file", f"nests expressions too deeply in {name}") from None
        if depth > DEEPEST:
            raise refuse(name, f"calls {DEEPEST} functions within each other; nothing is run")
        names = self._parameters(self.functions[name].args, given or {}, depth)
        for statement in self.functions[name].body:
            if isinstance(statement, ast.Return):
                return self._value(statement.value, names, depth)
            self._statement(statement, names, depth)
        return None

    def _parameters(
        self, said: ast.arguments, given: Mapping[str, Any], depth: int
    ) -> dict[str, Any]:
        """Parameters of a function: as given, by default, or left open."""
        usual = [*said.posonlyargs, *said.args]
        missing: list[ast.expr | None] = [None] * (len(usual) - len(said.defaults))
        pairs = zip(usual, [*missing, *said.defaults], strict=True)
        found: dict[str, Any] = {}
        for place, (one, default) in enumerate([*pairs, *zip(said.kwonlyargs, said.kw_defaults)]):
            value = given.get(one.arg, given.get(str(place)))
            if value is None:
                value = self._open(one) if default is None else self._value(default, {}, depth + 1)
            found[one.arg] = value
        return found

    def _statement(self, node: ast.stmt, names: dict[str, Any], depth: int) -> None:
        self._spend()
        if isinstance(node, _BLOCKS):
            self._leave_open(node, names)
        elif isinstance(node, ast.AugAssign):
            _assign(node.target, self._open(node), names)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            _assign(node.target, self._value(node.value, names, depth), names)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                _assign(target, self._value(node.value, names, depth), names)
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            # A call for its effect, as `config.override.imports.append(x)`.
            owner = node.value.func if isinstance(node.value, ast.Call) else None
            if isinstance(owner, ast.Attribute):
                _assign(owner.value, self._open(node), names)

    def _leave_open(self, block: ast.stmt, names: dict[str, Any]) -> None:
        """Leave open what a block may assign, or refuse one that may return."""
        for node in ast.walk(block):
            self._spend()
            if isinstance(node, ast.Return):
                raise refuse(
                    "file",
                    f"returns within {type(block).__name__.lower()} (line {node.lineno}), and "
                    "nothing of it is run; legal: one return at the end of a function",
                )
            for target in _targets(node):
                _assign(target, self._open(node), names)

    def _spend(self, size: int = 1) -> None:
        self._left -= size
        if self._left < 0:
            raise refuse("file", f"is more than {MOST_NODES} expressions, one within another")

    def _open(self, node: ast.AST) -> UndecidedValue:
        """A value that the file leaves open; its text is paid for, for it is written each time."""
        head = ast.For(node.target, node.iter, [], []) if isinstance(node, ast.For) else node
        try:
            text = ast.unparse(ast.copy_location(head, node))
        except (RecursionError, MemoryError, ValueError):
            text = type(node).__name__
        self._spend(len(text) // 16)
        return left_open(visible(text.partition("\n")[0])[:60], int(getattr(node, "lineno", 0)))

    def _value(self, node: ast.expr | None, names: dict[str, Any], depth: int) -> Any:
        self._spend()
        if node is None or (isinstance(node, ast.Constant) and node.value is not Ellipsis):
            return None if node is None else self._plain(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(item, names, depth) for item in node.elts]
        if isinstance(node, ast.Dict) and all(_is_text(key) for key in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {key.value: self._value(v, names, depth) for key, v in pairs}  # type: ignore
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self._value(node.operand, names, depth)
            number = isinstance(inner, int | float) and not isinstance(inner, bool)
            return -inner if number else self._open(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            sides = [self._value(side, names, depth) for side in (node.left, node.right)]
            return self._computed(node, *sides)
        if isinstance(node, ast.Name):
            return self._named(node, names, depth)
        if isinstance(node, ast.Call):
            return self._called(node, names, depth)
        return self._open(node)

    def _named(self, node: ast.Name, names: dict[str, Any], depth: int) -> Any:
        if node.id in names:
            for _ in _inside(names[node.id]):
                self._spend()
            return names[node.id]
        if node.id in self.constants and depth < DEEPEST:
            return self._value(self.constants[node.id], {}, depth + 1)
        return self._open(node)

    def _called(self, node: ast.Call, names: dict[str, Any], depth: int) -> Any:
        name = dotted(node.func)
        if not name or any(word.arg is None for word in node.keywords):
            return self._open(node)
        given = [(str(place), argument) for place, argument in enumerate(node.args)]
        given += [(str(word.arg), word.value) for word in node.keywords]
        values = {key: self._value(argument, names, depth) for key, argument in given}
        if name in self.functions:
            return self.returned(name, values, depth + 1)
        return Call(name, values, node.lineno)

    def _computed(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        """Numbers added, subtracted or multiplied, within what any setting is."""
        plain = all(type(side) in (int, float) and abs(side) < MOST for side in (left, right))
        return _ARITHMETIC[type(node.op)](left, right) if plain else self._open(node)

    def _plain(self, node: ast.Constant) -> Any:
        plain = node.value is None or isinstance(node.value, bool | int | float | str)
        return node.value if plain else self._open(node)


def _inside(value: Any) -> Iterator[Any]:
    """Everything within a value, each as often as it stands there."""
    left = [value]
    while left:
        yield (one := left.pop())
        inner = one.arguments if isinstance(one, Call) else one
        left += inner.values() if isinstance(inner, dict) else inner if type(inner) is list else ()


def dotted(node: ast.expr) -> str:
    """A name with its attributes as `a.b.c`; empty for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < DEEPEST:
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _assign(target: ast.expr, value: Any, names: dict[str, Any]) -> None:
    """Set a name, or an attribute of a call that a name stands for; another target is left as it
    is.
    """
    first, *attributes = dotted(target).split(".")
    if first and not attributes:
        names[first] = value
    holder = names.get(first)
    for attribute in attributes[:-1]:
        if not isinstance(holder, Call):
            return
        holder = holder.arguments.setdefault(attribute, Call(""))
    if attributes and isinstance(holder, Call):
        holder.arguments[attributes[-1]] = value


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        yield from node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        yield node.target


def left_open(text: str, line: int) -> UndecidedValue:
    """A value that the file computes, as it is written in a line."""
    return UndecidedValue(((text, line),), "Python that is not run", "a literal in the file")


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def chosen(names: list[str], wanted: str | None) -> str:
    """The one of several configurations that is read. Raises `PlanError` naming them."""
    if wanted is not None and wanted not in names:
        raise refuse(
            "config", f"is {shown(wanted)}, which the file does not have; legal: {', '.join(names)}"
        )
    if wanted is None and len(names) != 1:
        raise refuse(
            "config", f"the file has {len(names)}: give one (--config), of {', '.join(names)}"
        )
    return names[0] if wanted is None else wanted
