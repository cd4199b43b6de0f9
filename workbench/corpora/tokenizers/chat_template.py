"""A chat template: jinja2 that renders messages as a model was trained on them.

A template is code of whoever made the file: it runs in jinja2's sandbox, which reaches neither
attributes of Python nor files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workbench.corpora.bounded_child import MOST_WORDS, TEMPLATE, StrangerError, bounded
from workbench.untrusted_text import brief

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Round what {% generation %} marks: noncharacters of Unicode, which no text has."""
MOST_TEXT = 2**20
"""Characters that a template may write by itself."""
MOST_TIMES = 8
"""Times that it may write what the messages say."""
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
        StrangerError: It is no template.
    """

    def __init__(self, text: str, special: Mapping[str, str], dated: bool = True) -> None:
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,  # what is computed ahead is computed before anything bounds it
        )
        environment.globals["raise_exception"] = _raise
        if dated:
            environment.globals["strftime_now"] = _now
        environment.filters["tojson"] = _json
        self.special, self.size = dict(special), len(text)
        try:
            with bounded(TEMPLATE, len(text)):
                self._compiled = _guarded(lambda: environment.from_string(text))
        except ValueError as error:
            raise StrangerError("chat template", f"cannot be read: {error}") from None

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
        content = sum(len(message["content"]) for message in messages)
        most = MOST_TEXT + (len(messages) + 1) * self.size + MOST_TIMES * content
        parts = self._compiled.generate(
            messages=list(messages), add_generation_prompt=generation_prompt, **self.special
        )
        with bounded(TEMPLATE, content):
            text: str = _guarded(lambda: "".join(_at_most(most, parts)))
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
    except Exception as error:  # a template may do what raises anything
        raise ValueError(brief(str(error), MOST_WORDS) or type(error).__name__) from None


def _at_most(most: int, parts: Iterable[str]) -> Iterator[str]:
    """The parts of a text. Raises ValueError where they have more characters."""
    size = 0
    for part in parts:
        size += len(part)
        if size > most:
            raise ValueError(f"it writes more than {most:,} characters")
        yield part


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which no text is multiplied to more than `MOST_TEXT`."""

    intercepted_binops = frozenset({"*"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The product, of numbers or of a short text."""
        for many, count in ((left, right), (right, left)):
            if isinstance(many, Sized) and isinstance(count, int) and len(many) * count > MOST_TEXT:
                raise ValueError(f"it multiplies a text to {len(many) * count:,} characters")
        return super().call_binop(context, operator, left, right)


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
