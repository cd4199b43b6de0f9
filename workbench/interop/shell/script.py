"""A shell script read statement by statement, as far as that goes without running it: which
commands it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workbench.errors import refuse
from workbench.interop.shell import conditions
from workbench.interop.shell.commands import Calls, Ended, Script, ShellCommand
from workbench.interop.shell.grammar import parse_script
from workbench.interop.shell.values import (
    LONGEST,
    Either,
    Text,
    Unknown,
    Value,
    flattened,
    merge,
    quoted,
    shown_value,
    split,
    weight,
)
from workbench.interop.shell.words import Source

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["Script", "ShellCommand", "commands"]


def commands(text: str, given: dict[str, str] | None = None) -> Script:
    """The commands of a script's text, in order, with the variables that it sets.

    `given` are variables whose value is decided from outside, whatever the script sets them to.
    Raises `PlanError` naming the line where the text is no shell script.
    """
    data = text.encode()
    starts = [0, *(k + 1 for k, byte in enumerate(data) if byte == 10)]
    reader = _Statements(Script(), dict(given or {}))
    try:
        with contextlib.suppress(Ended):
            reader.text(data, lambda byte: _row(starts, byte))
    except RecursionError:
        raise refuse("file", "is no script that can be read: it is nested too deeply") from None
    return reader.script


def _row(starts: Sequence[int], byte: int) -> int:
    low, high = 0, len(starts)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starts[middle] <= byte else (low, middle)
    return low + 1


class _Statements(Calls):
    """Walks the statements; keeps variables and functions. Lives as long as one reading."""

    def text(self, data: bytes, line: Callable[[int], int]) -> None:
        """Read text as a script."""
        root, source = parse_script(data, line)
        self._comments(root, source)
        self.block(root.children, source)

    def _comments(self, node: Node, source: Source) -> None:
        for child in node.children:
            if child.type == "comment":
                self.script.comments.append((source.line(child.start_byte), source.of(child)))
            else:
                self._comments(child, source)

    def statement(self, node: Node, source: Source) -> None:
        """One statement; what is not followed is named in `unread`."""
        kind = node.type
        if kind == "variable_assignment":
            self._assign(node, source)
        elif kind == "command":
            self.command(node, source)
        elif kind == "if_statement":
            self._if(node, source)
        elif kind == "case_statement":
            self._case(node, source)
        elif kind in ("for_statement", "c_style_for_statement", "while_statement"):
            self._loop(node, source)
        elif kind == "list":
            self._list(node, source)
        elif kind == "function_definition":
            self.functions[source.of(node.child_by_field_name("name") or node)] = (node, source)
        elif kind == "redirected_statement":
            self.redirected(node, source)
        elif kind in (
            "declaration_command",
            "variable_assignments",
            "pipeline",
            "compound_statement",
            "subshell",
            "negated_command",
            "do_group",
            "program",
        ):
            self.block(node.children, source)

    def assign(self, name: str, value: Value, more: bool = False) -> None:
        """Set a variable, or with `more` add to it."""
        if name in self.given:
            return
        if more:
            value = (*self.variables.get(name, ()), *value)
        if weight(value) > LONGEST:
            raise refuse(
                "file", f"is no script that can be read: ${name} grows beyond {LONGEST} characters"
            )
        self.variables[name] = value

    def _assign(self, node: Node, source: Source) -> None:
        # By place: inside several assignments on a line the grammar names no fields.
        name, right = node.children[0], node.children[2] if len(node.children) > 2 else None
        if name.type != "variable_name":
            return
        value = quoted(self.words(source).value(right), False) if right is not None else ()
        if right is None or right.type != "array":
            value = flattened(value) or (Text("", source.line(node.start_byte)),)
        self.assign(source.of(name), value, any(child.type == "+=" for child in node.children))

    def _list(self, node: Node, source: Source) -> None:
        left, right = node.children[0], node.children[-1]
        wanted = any(child.type == "&&" for child in node.children)
        if not any(child.type in ("&&", "||") for child in node.children):
            return self.block(node.named_children, source)
        tests = _is_test(left)
        holds = (
            conditions.decide(left, self.words(source), self.script.decided_by) if tests else True
        )
        if not tests:
            self.statement(left, source)
        if holds is None:
            why = conditions.text_of(left, self.words(source))
            return self._either([lambda: self.statement(right, source), lambda: None], why)
        return self.statement(right, source) if holds == wanted else None

    def _if(self, node: Node, source: Source) -> None:
        branches, undecided = [], []
        for test, body in _arms(node):
            decided_by: dict[str, str] = {}
            words = self.words(source)
            holds = True if test is None else conditions.decide(test, words, decided_by)
            if holds is False:
                self.script.decided_by |= decided_by
                continue
            if holds and decided_by and _exits(body, source):
                holds = None  # what a script asks of its environment is taken as given
            branches.append(body)
            if holds:
                self.script.decided_by |= decided_by
                break
            undecided.append(conditions.text_of(test, words) if test is not None else "")
        else:
            branches.append([])
        runs = [lambda body=body: self.block(body, source) for body in branches]
        self._either(runs, undecided[0] if undecided else "")

    def _case(self, node: Node, source: Source) -> None:
        words = self.words(source)
        value = words.value(node.named_children[0], True)
        branches, sure = [], False
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = [
                child
                for k, child in enumerate(item.children)
                if item.field_name_for_child(k) == "value"
            ]
            holds = conditions.matches(
                value, [conditions.pattern(p, words) for p in patterns], self.script.decided_by
            )
            if holds is False:
                continue
            branches.append([child for child in item.named_children if child not in patterns])
            sure = holds is True
            if sure:
                break
        runs = [
            lambda body=body: self.block(body, source)
            for body in (branches if sure else [*branches, []])
        ]
        self._either(runs, f"case {shown_value(value)[:40]}")

    def _loop(self, node: Node, source: Source) -> None:
        body = node.child_by_field_name("body")
        if body is None:
            return
        if node.type == "while_statement":
            if "$#" in source.of(node.children[1]):
                line = source.line(node.start_byte)
                self.script.unread.append(
                    (line, "$#", "arguments of whoever runs the script; none were taken")
                )
                return
            self._either(
                [lambda: self.statement(body, source), lambda: None], "how often a loop runs"
            )
            return
        name = node.child_by_field_name("variable")
        if name is not None:
            self.assign(source.of(name), self._each(node, source))
        self.statement(body, source)

    def _each(self, node: Node, source: Source) -> Value:
        words = self.words(source)
        nodes = [
            child
            for k, child in enumerate(node.children)
            if node.field_name_for_child(k) == "value"
        ]
        items = [item for child in nodes for item in split(words.value(child))]
        values = [item for item in items if isinstance(item, tuple)]
        if not values or len(values) < len(items):
            return (Unknown(f"${source.of(node.named_children[0])}", source.line(node.start_byte)),)
        return (
            values[0]
            if len(values) == 1
            else (Either(tuple(values), "which turn of the loop it is"),)
        )

    def _either(self, runs: Sequence[Callable[[], None]], why: str) -> None:
        """Run each, from the same beginning, and keep what any of them may leave; one that exits
        leaves nothing.
        """
        before = dict(self.variables)
        after: list[dict[str, Value]] = []
        for run in runs:
            self.variables.clear()
            self.variables |= before
            try:
                run()
            except Ended:
                continue
            after.append(dict(self.variables))
        if not after:
            raise Ended
        self.variables.clear()
        for name in dict.fromkeys(name for state in after for name in state):
            unset = (Unknown(f"${name}", 0, unset=True),)
            self.variables[name] = merge([state.get(name, unset) for state in after], why)


def _arms(node: Node) -> list[tuple[Node | None, list[Node]]]:
    """(condition, statements) of `if`, each `elif` and `else` (whose condition is None)."""
    tests = [
        child
        for k, child in enumerate(node.children)
        if node.field_name_for_child(k) == "condition"
    ]
    found: list[tuple[Node | None, list[Node]]] = []
    body = [
        c
        for k, c in enumerate(node.named_children)
        if c not in tests and not c.type.endswith("_clause")
    ]
    found.append((tests[0] if tests else None, body))
    for clause in node.named_children:
        inner = clause.named_children
        if clause.type == "elif_clause":
            found.append((inner[0], inner[1:]))
        elif clause.type == "else_clause":
            found.append((None, inner))
    return found


def _exits(body: Sequence[Node], source: Source) -> bool:
    return any(
        node.type == "command" and source.of(node).split()[:1] in (["exit"], ["return"])
        for node in body
    )


def _is_test(node: Node) -> bool:
    if node.type == "list":
        return all(_is_test(child) for child in node.named_children)
    if node.type == "negated_command":
        return _is_test(node.named_children[0])
    if node.type == "command":
        return node.text in (b"true", b"false", b":")
    return node.type == "test_command"
