"""A chat template: jinja2 that renders messages as a model was trained on them.

A template is code of whoever made the file: it runs in jinja2's sandbox, which reaches neither
attributes of Python nor files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Round what {% generation %} marks: noncharacters of Unicode, which no text has."""
_MARKS = re.compile(f"[{OPEN}{CLOSE}]")


class Rendered(NamedTuple):
    """A rendered text and its parts between {% generation %} marks, [start, stop) in characters."""

    text: str
    marked: list[tuple[int, int]]


class ChatTemplate:
    """A compiled chat template.

    Args:
        text: The template.
        special: Name that templates use (bos_token) -> the token's text.
        dated: Whether templates may ask for today's date (`strftime_now`); what is trained on does
            not follow the day.

    Raises:
        ValueError: It is no template.
    """

    def __init__(self, text: str, special: Mapping[str, str], dated: bool = True) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.globals["raise_exception"] = _raise
        if dated:
            environment.globals["strftime_now"] = _now
        environment.filters["tojson"] = _json
        self.special = dict(special)
        self._compiled = _guarded(lambda: environment.from_string(text))

    def render(
        self, messages: Sequence[Mapping[str, str]], generation_prompt: bool = False
    ) -> Rendered:
        """Render messages.

        Args:
            messages: Mappings with role and content.
            generation_prompt: Whether the beginning of an answer follows them.

        Raises:
            ValueError: The template fails.
        """
        text: str = _guarded(
            lambda: self._compiled.render(
                messages=list(messages), add_generation_prompt=generation_prompt, **self.special
            )
        )
        try:
            text.encode()  # an escape in a template can say half of a character
        except UnicodeEncodeError as error:
            raise ValueError(str(error)) from None
        return _unmarked(text)


def _guarded(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (RecursionError, MemoryError):
        raise ValueError("it takes more depth or memory than there is") from None
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def _unmarked(text: str) -> Rendered:
    parts, marked, size, start = [], [], 0, 0
    here = 0
    for mark in _MARKS.finditer(text):
        parts.append(text[here : mark.start()])
        size += len(parts[-1])
        here = mark.end()
        if mark[0] == OPEN:
            start = size
        else:
            marked.append((start, size))
    return Rendered("".join([*parts, text[here:]]), marked)


class _Generation(Extension):
    """`{% generation %}` .. `{% endgeneration %}`, as transformers' templates mark answers."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _raise(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _json(value: Any, indent: int | None = None) -> str:
    """As transformers renders it: without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
