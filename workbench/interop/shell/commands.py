"""Commands of a shell script: their words, and those that only lead to others (`eval`, `bash -c`,
functions).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.interop.shell.values import (
    Break,
    Either,
    Item,
    Text,
    Unknown,
    Value,
    line_of,
    quoted,
    shown_value,
    split,
)
from workbench.interop.shell.words import Source, Words

if TYPE_CHECKING:
    from tree_sitter import Node

DEEPEST = 12
"""Functions, `eval` and `bash -c` inside each other that are followed."""
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh")
_PLACE = "__place_"
_NO_WORDS = ("variable_assignment", "comment", "file_redirect", "herestring_redirect")


@dataclass(frozen=True)
class ShellCommand:
    """A command that the script would run, with its words; the first is its name."""

    words: tuple[Item, ...]
    line: int

    @property
    def name(self) -> str:
        """The command's first word, for people."""
        return shown_value(self.words[0]) if self.words and isinstance(self.words[0], tuple) else ""


@dataclass
class Script:
    """What a script holds."""

    commands: list[ShellCommand] = field(default_factory=list)
    variables: dict[str, Value] = field(default_factory=dict)
    comments: list[tuple[int, str]] = field(default_factory=list)
    """(line, text) of each comment."""
    decided_by: dict[str, str] = field(default_factory=dict)
    """Environment variable -> the default by which a condition was decided."""
    unread: list[tuple[int, str, str]] = field(default_factory=list)
    """(line, text, why) of what was not followed."""


class Ended(Exception):
    """`exit`, or `return`."""


class Calls:
    """Runs through commands without running them; what walks the statements is its heir."""

    def __init__(self, script: Script, given: dict[str, str]) -> None:
        self.script = script
        self.variables = script.variables
        self.given = given
        self.functions: dict[str, tuple[Node, Source]] = {}
        self.depth = 0
        self.variables |= {name: (Text(text, 0),) for name, text in given.items()}

    def text(self, data: bytes, line: Callable[[int], int]) -> None:
        """Read text as a script."""
        raise NotImplementedError

    def statement(self, node: Node, source: Source) -> None:
        """Read one statement."""
        raise NotImplementedError

    def words(self, source: Source) -> Words:
        """Expands words of `source` with the variables as they are now."""
        return Words(source, self.variables)

    def block(self, nodes: Sequence[Node], source: Source) -> None:
        """Statements one after the other."""
        for node in nodes:
            self.statement(node, source)

    def command(self, node: Node, source: Source) -> None:
        set_here = [child for child in node.children if child.type == "variable_assignment"]
        name = node.child_by_field_name("name")
        if set_here and name is not None:
            between = source.text[set_here[-1].end_byte : name.start_byte].replace(b"\\\n", b"")
            # The grammar takes `A=1 B=2`, a line of its own, for the beginning of the next line's
            # command.
            self.block(set_here if b"\n" in between else [], source)
        words = self.words(source)
        items: list[Item] = []
        kept = [child for child in node.children if child.type not in _NO_WORDS]
        items += [item for value in words.each(kept) for item in split(value)]
        command = ShellCommand(tuple(items), source.line(node.start_byte))
        if items:
            self._run(command)

    def _run(self, command: ShellCommand) -> None:
        name = command.name
        if name in ("exit", "return"):
            raise Ended
        if name in ("eval", "exec") and len(command.words) > 1:
            return self._inner(command.words[1:], command.line, again=name == "eval")
        if name in self.functions and self.depth < DEEPEST:
            return self._call(name, command.words[1:])
        if name in ("source", "."):
            text = " ".join(
                shown_value(word) for word in command.words[1:2] if isinstance(word, tuple)
            )
            self.script.unread.append(
                (command.line, f"{name} {text}", "another file, which is not read")
            )
            return None
        if (inner := self._script_word(command)) is not None and self.depth < DEEPEST:
            return self._inner((inner,), command.line, again=True)
        self.script.commands.append(command)
        return None

    def _script_word(self, command: ShellCommand) -> Item | None:
        """The script in `bash -c "..."`, wherever in the command it stands."""
        texts = [shown_value(word) if isinstance(word, tuple) else "" for word in command.words]
        for k, text in enumerate(texts[:-2]):
            if text in _SHELLS and texts[k + 1].startswith("-") and texts[k + 1].endswith("c"):
                return command.words[k + 2]
        return None

    def _inner(self, words: Sequence[Item], line: int, again: bool) -> None:
        """Words that are a command of their own; with `again` their text is read as a script once
        more.
        """
        if not again:
            return self._run(ShellCommand(tuple(words), line))
        places: dict[str, Value] = {}
        data, lines = _encoded(words, places, line)
        self.depth += 1
        try:
            if self.depth <= DEEPEST:
                self.variables |= places
                self.text(data, lambda byte: lines[min(byte, len(lines) - 1)] if lines else line)
        finally:
            self.depth -= 1
            for name in places:
                self.variables.pop(name, None)
        return None

    def _call(self, name: str, words: Sequence[Item]) -> None:
        node, source = self.functions[name]
        outer = {key: value for key, value in self.variables.items() if key.isdigit() or key == "@"}
        arguments = [word for word in words if isinstance(word, tuple)]
        mine = {str(k + 1): quoted(word, False) for k, word in enumerate(arguments)}
        everything: Value = tuple(piece for word in arguments for piece in (Break(), *word))
        self._positional({**mine, "@": everything})
        self.depth += 1
        with contextlib.suppress(Ended):
            self.block(node.named_children[1:], source)
        self.depth -= 1
        self._positional(outer)

    def _positional(self, values: dict[str, Value]) -> None:
        for key in [key for key in self.variables if key.isdigit() or key == "@"]:
            del self.variables[key]
        self.variables |= values

    def redirected(self, node: Node, source: Source) -> None:
        body = node.child_by_field_name("body")
        heredoc = next((child for child in node.children if child.type == "heredoc_redirect"), None)
        name = source.of(body).split()[0] if body is not None and source.of(body).split() else ""
        inner = (
            next((c for c in heredoc.children if c.type == "heredoc_body"), None)
            if heredoc
            else None
        )
        if (
            inner is not None
            and name in (*_SHELLS, "sbatch", "srun", "ssh")
            and self.depth < DEEPEST
        ):
            start = inner.start_byte
            self.depth += 1
            self.text(source.text[start : inner.end_byte], lambda byte: source.line(start + byte))
            self.depth -= 1
        elif body is not None:
            self.statement(body, source)
        if inner is not None:
            self.script.unread.append(
                (source.line(inner.start_byte), f"{name} << ...", "a text for another command")
            )


def _encoded(words: Sequence[Item], places: dict[str, Value], line: int) -> tuple[bytes, list[int]]:
    """Words as text to be read again, with the line of each byte; what is no text becomes a
    variable of `places`.
    """
    data, lines = bytearray(), []
    for word in words:
        for piece in word if isinstance(word, tuple) else (_as_piece(word),):
            if isinstance(piece, Text) and not piece.default:
                text, at = piece.text, piece.line or line
            else:
                name = f"{_PLACE}{len(places)}_{id(places)}"
                places[name] = (piece,)
                text, at = f"${{{name}}}", line_of((piece,)) or line
            raw = text.encode()
            data += raw
            lines += [at] * len(raw)
        data += b" "
        lines.append(lines[-1] if lines else line)
    return bytes(data), lines


def _as_piece(branch: Item) -> Either | Unknown:
    assert not isinstance(branch, tuple), "a word is its pieces"
    choices = []
    for choice in branch.choices:
        words = [quoted(word) if isinstance(word, tuple) else (_as_piece(word),) for word in choice]
        choices.append(
            tuple(piece for k, word in enumerate(words) for piece in ((Break(),) * (k > 0) + word))
        )
    return Either(tuple(choices), branch.why)
