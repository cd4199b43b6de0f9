"""Rows of conversations, as TRL's dataset formats write them, checked.

`messages`: a conversation. `completions`: a prompt and its completion. `preferences`: a prompt, a
chosen and a rejected answer; messages without a `prompt` share their beginning. Prompts and answers
are texts, or lists of messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from workbench.corpora.tokenizers.chat_template import CLOSE, OPEN
from workbench.runtime_facts.conversation_fields import FIELDS, row_format
from workbench.untrusted_text import shown

ROLES = ("system", "user", "assistant", "tool")
ASSISTANT = "assistant"
Message = dict[str, str]
Words = str | list[Message]


@dataclass(frozen=True)
class ChatRow:
    """What is read, and the answers to it: one, or the chosen and the rejected one."""

    prompt: Words
    """Of `messages` none: every assistant turn is an answer."""
    answers: tuple[Words, ...]

    @property
    def texts(self) -> list[str]:
        """What its messages say."""
        parts = [self.prompt, *self.answers]
        words = ([one] if isinstance(one, str) else [m["content"] for m in one] for one in parts)
        return [text for some in words for text in some]


def chat_row(row: Any, kind: str) -> ChatRow:
    """A row of format `kind`.

    Raises:
        ValueError: It is none; begins with a verb, to stand after the row's name.
    """
    legal = " and ".join(f"'{name}'" for name in FIELDS[kind])
    if not isinstance(row, dict):
        raise ValueError(f"is {shown(row)}; legal: an object with {legal}")
    if not row.keys() >= set(FIELDS[kind]):
        fields, other = ", ".join(map(shown, list(row)[:20])) or "no field", row_format(row)
        has = f"is of {other}" if other else f"has {fields}"
        raise ValueError(f"{has}, and its source is of {kind}; legal: an object with {legal}")
    if row.get("tools"):
        raise ValueError("has 'tools', which no template is given here; legal: rows without")
    return _ROWS[kind](row)


def _messages_row(row: Mapping[str, Any]) -> ChatRow:
    found = _messages(row["messages"], "messages")
    _check_answers(found, "messages")
    return ChatRow([], (found,))


def _completion_row(row: Mapping[str, Any]) -> ChatRow:
    prompt, completion = (_words(row[name], name) for name in ("prompt", "completion"))
    _check_alike(prompt, completion, "completion")
    _check_answers(completion, "completion")
    return ChatRow(prompt, (completion,))


def _preference_row(row: Mapping[str, Any]) -> ChatRow:
    chosen, rejected = (_words(row[name], name) for name in ("chosen", "rejected"))
    if row.get("prompt") is not None:
        prompt = _words(row["prompt"], "prompt")
    elif isinstance(chosen, str) or isinstance(rejected, str):
        raise ValueError("has no 'prompt'; legal: one, or messages that begin alike")
    else:
        pairs = zip(chosen, rejected)
        prompt = [mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen == rejected:
        raise ValueError("has a chosen and a rejected answer that are equal")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        _check_alike(prompt, answer, name)
        _check_answers(answer, name)
    return ChatRow(prompt, (chosen, rejected))


_ROWS = {"messages": _messages_row, "completions": _completion_row, "preferences": _preference_row}


def _words(value: Any, name: str) -> Words:
    if isinstance(value, str):
        _check_text(value, f"'{name}'")
        return value
    return _messages(value, name)


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"has '{name}' = {shown(value)}; legal: a list of messages")
    return [_message(one, f"{name}[{i}]") for i, one in enumerate(value)]


def _message(one: Any, name: str) -> Message:
    if not isinstance(one, dict):
        raise ValueError(f"has {name} = {shown(one)}; legal: an object with role and content")
    role, content = one.get("role"), one.get("content")
    if role is None:
        raise ValueError(f"has no role in {name}; legal: {', '.join(ROLES)}")
    if role not in ROLES:
        raise ValueError(f"has role {shown(role)} in {name}; legal: {', '.join(ROLES)}")
    if calls := one.get("tool_calls"):
        raise ValueError(f"has tool_calls {shown(calls)} in {name}; legal: messages of text")
    if not isinstance(content, str):
        raise ValueError(f"has content {shown(content)} in {name}; legal: text")
    _check_text(content, name)
    return {"role": role, "content": content}


def _check_text(text: str, name: str) -> None:
    if OPEN in text or CLOSE in text:
        raise ValueError(f"has U+FDD0 or U+FDD1 in {name}, which are no characters")


def _check_alike(prompt: Words, answer: Words, name: str) -> None:
    if isinstance(prompt, str) is not isinstance(answer, str):
        kinds = ["text" if isinstance(each, str) else "messages" for each in (prompt, answer)]
        raise ValueError(
            f"has a prompt of {kinds[0]} and '{name}' of {kinds[1]}; legal: both of one kind"
        )


def _check_answers(words: Words, name: str) -> None:
    if isinstance(words, str):
        if not words:
            raise ValueError(f"has an empty '{name}'; legal: text")
        return
    answers = [message for message in words if message["role"] == ASSISTANT]
    if not answers:
        raise ValueError(f"has no message of role {ASSISTANT} in '{name}'; legal: one or more")
    if not all(message["content"].strip() for message in answers):
        raise ValueError(f"has an empty message of role {ASSISTANT} in '{name}'; legal: text")
