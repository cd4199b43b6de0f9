"""Words of a shell script to values: quotes, variables with their defaults, arrays, arithmetic."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from workbench.interop.shell import arithmetic
from workbench.interop.shell.values import (
    MOST,
    Break,
    Either,
    Piece,
    Text,
    Unknown,
    Value,
    alternatives,
    flattened,
    literal,
    merge,
    quoted,
    shown_value,
)

if TYPE_CHECKING:
    from tree_sitter import Node

_NAMED = re.compile(r"\$\{\s*(#|!)?(\w+|[@*#?$!])(?:\[([^\]]*)\])?(.*)\}", re.DOTALL)
_OPERATORS = (":-", "-", ":=", "=", ":+", "+", ":?", "?", ",,", "^^")
COMPUTED = ("command_substitution", "process_substitution")


class Source:
    """Text that was parsed, and the line of the file that each of its bytes stands in."""

    def __init__(self, text: bytes, line: Callable[[int], int]) -> None:
        self.text = text
        self.line = line

    def of(self, node: Node) -> str:
        """The text of a node."""
        return self.text[node.start_byte : node.end_byte].decode(errors="replace")

    def texts(self, start: int, end: int, quoted: bool, escapes: str = "") -> list[Text]:
        """Characters from byte to byte, one piece a line, with a backslash before `escapes` (a
        class) taken off.
        """
        found, at = [], start
        for part in self.text[start:end].splitlines(keepends=True):
            text = part.decode(errors="replace")
            if escapes:
                text = re.sub(rf"\\(\r?\n|{escapes})", lambda m: "" if "\n" in m[1] else m[1], text)
            found.append(Text(text, self.line(at), quoted))
            at += len(part)
        return found


class Words:
    """Expands nodes of one source with the variables of a script."""

    def __init__(self, source: Source, variables: Mapping[str, Value]) -> None:
        self.source = source
        self.variables = variables

    def value(self, node: Node, quoted: bool = False) -> Value:
        """What a node stands for."""
        kind = node.type
        if kind == "expansion" and node.has_error:
            return (Unknown(_short(self.source.of(node)), self._line(node), quoted),)
        if kind in ("simple_expansion", "expansion"):
            return self._lead(node, quoted) + self._expansion(node, quoted)
        if kind == "string":
            return tuple(self._inside(node, 1, len(node.children) - 1)) or (
                Text("", self._line(node), True),
            )
        if kind == "concatenation":
            return tuple(itertools.chain(*(self.value(child, quoted) for child in node.children)))
        if kind in ("raw_string", "ansi_c_string"):
            first = node.start_byte + (2 if kind == "ansi_c_string" else 1)
            found = self.source.texts(
                first, node.end_byte - 1, True, "[\\S\\s]" if kind == "ansi_c_string" else ""
            )
            return tuple(found) or (Text("", self._line(node), True),)
        if kind == "arithmetic_expansion":
            return self._arithmetic(node)
        if kind == "array":
            return self.array(node)
        if kind in COMPUTED:
            return (Unknown(_short(self.source.of(node)), self._line(node), quoted),)
        if kind in ("command_name", "translated_string") and node.named_children:
            return self.value(node.named_children[-1], quoted)
        return self._plain(node, quoted)

    def _plain(self, node: Node, quoted: bool) -> Value:
        """A bare word; a space behind a backslash is part of it, as if it stood in quotes."""
        found: list[Piece] = []
        at = node.start_byte
        for match in re.finditer(rb"\\[ \t]", self.source.of(node).encode()):
            found += self.source.texts(at, node.start_byte + match.start(), quoted, r"[\s\S]")
            found.append(Text(" ", self._line(node), True))
            at = node.start_byte + match.end()
        return (*found, *self.source.texts(at, node.end_byte, quoted, r"[\s\S]"))

    def array(self, node: Node) -> Value:
        """The elements of `( ... )`, each split where it is not quoted, with borders between
        them.
        """
        kept = [child for child in node.named_children if child.type != "comment"]
        found = [_elements(value) for value in self.each(kept)]
        return tuple(itertools.chain(*((Break(), *value) for value in found)))

    def each(self, nodes: Sequence[Node]) -> list[Value]:
        """The value of each word; words that nothing parts are one that the grammar tore, and
        unknown.
        """
        found: list[Value] = []
        for before, node in zip([None, *nodes], nodes, strict=False):
            if before is not None and before.end_byte == node.start_byte:
                torn = shown_value(found.pop()) + self.source.of(node)
                found.append((Unknown(_short(torn), self._line(node)),))
            else:
                found.append(self.value(node))
        return found

    def _line(self, node: Node) -> int:
        return self.source.line(node.start_byte)

    def _lead(self, node: Node, quoted: bool) -> Value:
        """Spaces and line continuations that the grammar takes into the beginning of an
        expansion.
        """
        lead = max(0, self.source.of(node).find("$"))
        return (
            tuple(self.source.texts(node.start_byte, node.start_byte + lead, quoted, r"[\s\S]"))
            if lead
            else ()
        )

    def _inside(self, node: Node, first: int, last: int, quoted: bool = True) -> Iterator[Piece]:
        """The pieces between two children of a node, with the text that no child holds."""
        escapes = r'["\\$`]' if quoted else r"[\s\S]"
        at = node.children[first - 1].end_byte
        for child in node.children[first:last]:
            yield from self.source.texts(at, child.start_byte, quoted, escapes)
            if child.type in ("string_content", "word", "number", "regex"):
                yield from self.source.texts(child.start_byte, child.end_byte, quoted, escapes)
            else:
                yield from self.value(child, quoted)
            at = child.end_byte
        yield from self.source.texts(at, node.children[last].start_byte, quoted, escapes)

    def _expansion(self, node: Node, on: bool) -> Value:
        text = self.source.of(node)
        text = text[max(0, text.find("$")) :].strip()
        match = _NAMED.fullmatch(text if text.startswith("${") else "${" + text[1:] + "}")
        if match is None or match[1]:
            return (Unknown(_short(text), self._line(node), on),)
        name, index, rest = match[2], match[3], match[4]
        sign = next((sign for sign in _OPERATORS if rest.startswith(sign)), "")
        if rest and not sign:
            return (Unknown(_short(text), self._line(node), on),)
        value = self._indexed(name, index, node)
        if sign in (",,", "^^"):
            value = _cased(value, str.lower if sign == ",," else str.upper)
        elif sign:
            value = self._or_default(node, name, value, sign)
        value = (Unknown(f"${name}", self._line(node), on, unset=True),) if value is None else value
        return quoted(value, on)

    def _indexed(self, name: str, index: str | None, node: Node) -> Value | None:
        """The value of a variable, or of elements of an array; None where nothing sets it."""
        value = self.variables.get(name)
        if value is None:
            return () if name in ("@", "*") else None
        if index in ("@",) or (index is None and name == "@"):
            return value
        if index == "*" or name == "*":
            return flattened(value[isinstance(value[0], Break) :] if value else value)
        elements = elements_of(value)
        if index is None:
            return elements[0] if elements else value
        known = re.fullmatch(r"\d{1,6}", index) and int(index) < len(elements)
        return (
            elements[int(index)]
            if known
            else (Unknown(_short(self.source.of(node)), self._line(node)),)
        )

    def _or_default(self, node: Node, name: str, value: Value | None, sign: str) -> Value | None:
        at = next(
            (k for k, child in enumerate(node.children) if self.source.of(child) == sign), None
        )
        if at is None:
            return (Unknown(_short(self.source.of(node)), self._line(node)),)
        other = tuple(self._inside(node, at + 1, len(node.children) - 1, quoted=False))
        unset = value is None or (
            len(value) == 1 and isinstance(value[0], Unknown) and value[0].unset
        )
        if sign in (":+", "+"):
            return () if unset or (sign == ":+" and literal(value or ()) == "") else other
        if sign in (":?", "?"):
            return value
        if unset:
            unknown = shown_value(value).lstrip("$") if value else name
            return tuple(
                Text(
                    piece.text,
                    piece.line or self._line(node),
                    piece.quoted,
                    piece.default or unknown,
                )
                if isinstance(piece, Text)
                else piece
                for piece in other
            )
        return other if sign[0] == ":" and literal(value or ()) == "" else value

    def _arithmetic(self, node: Node) -> Value:
        """The number of `$(( ))`: one for each combination of what its variables may be."""
        names = {self.source.of(found): found for found in _variables(node)}
        values = {text: alternatives(self._operand(found)) for text, found in names.items()}
        tagged = next(
            (d for options in values.values() for value in options for d in _defaults(value)), ""
        )
        combinations = list(itertools.islice(itertools.product(*values.values()), MOST + 1))
        results = []
        for chosen in combinations:
            known = {text: literal(value) for text, value in zip(values, chosen, strict=True)}
            number = arithmetic.evaluate(node, functools.partial(self._lookup, known))
            if number is None or len(combinations) > MOST:
                return (Unknown(_short(self.source.of(node)), self._line(node)),)
            results.append((Text(str(number), self._line(node), default=tagged),))
        return merge(results, "what its variables are")

    def _lookup(self, known: Mapping[str, str | None], node: Node) -> str | None:
        return known.get(self.source.of(node), self.source.of(node))

    def _operand(self, node: Node) -> Value:
        if node.type == "variable_name":
            found = self.variables.get(self.source.of(node))
            return (
                (Unknown(f"${self.source.of(node)}", self._line(node), unset=True),)
                if found is None
                else found
            )
        return self.value(node)


def elements_of(value: Value) -> list[Value]:
    """The elements of an array; none where the value is no array."""
    if not any(isinstance(piece, Break) for piece in value):
        return []
    found: list[list[Piece]] = []
    for piece in value:
        if isinstance(piece, Break):
            found.append([])
        elif found:
            found[-1].append(piece)
    return [tuple(element) for element in found]


def _elements(value: Value) -> Value:
    """One word of an array's parentheses as the elements that it becomes: unquoted spaces are
    borders.
    """
    found: list[Piece] = []
    for piece in value:
        if isinstance(piece, Text) and not piece.quoted:
            for k, part in enumerate(re.split(r"\s+", piece.text)):
                found += ([Break()] if k else []) + (
                    [Text(part, piece.line, True, piece.default)] if part else []
                )
        else:
            found.append(piece)
    while found and isinstance(found[0], Break):
        found.pop(0)
    while found and isinstance(found[-1], Break):
        found.pop()
    return tuple(found)


def _variables(node: Node) -> Iterator[Node]:
    """The variables of an arithmetic expression, each as its outermost node."""
    for child in node.named_children:
        if child.type in (
            "variable_name",
            "simple_expansion",
            "expansion",
            *COMPUTED,
            "subscript",
            "string",
        ):
            yield child
        else:
            yield from _variables(child)


def _defaults(value: Value) -> Iterator[str]:
    return (piece.default for piece in value if isinstance(piece, Text) and piece.default)


def _cased(value: Value | None, change: Callable[[str], str]) -> Value | None:
    if value is None or any(isinstance(piece, Either | Unknown) for piece in value):
        return value if value is None else (Unknown(shown_value(value), 0),)
    return tuple(
        Text(change(p.text), p.line, p.quoted, p.default) if isinstance(p, Text) else p
        for p in value
    )


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
