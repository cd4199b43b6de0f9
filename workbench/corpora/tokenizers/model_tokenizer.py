"""A model's own tokenizer, its special tokens and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from workbench.corpora.bounded_child import (
    TOKENIZER,
    BoundedChild,
    StrangerError,
    bounded,
    refusal,
    tokenizer_errors,
)
from workbench.errors import refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokensAround(NamedTuple):
    """Tokens that a tokenizer puts before and after a text."""

    before: list[int]
    after: list[int]


def tokens_around(tokenizer: Tokenizer, source: Path, field: str = "tokenizer") -> TokensAround:
    """Tokens that a tokenizer's post-processor puts before and after a text, such as the first of
    Llama's.

    Args:
        tokenizer: The tokenizer.
        source: Its file, for messages.
        field: Field of the plan that errors name.

    Raises:
        PlanError: It does something else to a text, or puts tokens that the tokenizer lacks.
    """
    post = tokenizer.post_processor
    try:
        found = _around({} if post is None else json.loads(post.__getstate__()))
    except (LookupError, TypeError, ValueError) as error:
        why = f"has a post-processor that does more than put tokens round a text: {error!r}"
        raise refuse(field, f"'{source}' {why}") from None
    for index in [*found.before, *found.after]:
        if tokenizer.id_to_token(index) is None:
            raise refuse(field, f"'{source}' puts token {index} round a text, which it lacks")
    return found


def _around(post: Mapping[str, Any]) -> TokensAround:
    """Tokens that a post-processor of tokenizer.json adds to a single text."""
    kind = post.get("type")
    if kind in ("BertProcessing", "RobertaProcessing"):
        return TokensAround([post["cls"][1]], [post["sep"][1]])
    if kind == "Sequence":
        before, after = list[int](), list[int]()
        for inner in map(_around, post["processors"]):
            before, after = inner.before + before, after + inner.after
        return TokensAround(before, after)
    if kind != "TemplateProcessing":
        return TokensAround([], [])
    (text,) = (at for at, piece in enumerate(post["single"]) if "Sequence" in piece)
    before, after = (
        [i for one in part for i in post["special_tokens"][one["SpecialToken"]["id"]]["ids"]]
        for part in (post["single"][:text], post["single"][text + 1 :])
    )
    return TokensAround(before, after)


@dataclass(frozen=True)
class ModelTokenizer:
    """A model's tokenizer, its special tokens and its chat template."""

    tokenizer: Tokenizer
    source: Path
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    """Name that templates use (bos_token) -> the token's text."""

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, control: bool = False, ends: bool = True) -> list[int]:
        """Token ids of a text, between those that the tokenizer puts round every text.

        Args:
            text: The text.
            control: Whether the text of a control token, such as <|im_end|>, means that token, and
                nothing is put round it: in a rendered template, not in what somebody wrote.
            ends: Whether what the tokenizer puts after a text follows; a prompt goes on.
        """
        self.tokenizer.encode_special_tokens = not control
        with bounded(TOKENIZER, len(text)), tokenizer_errors():
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        if control:
            return ids
        before, after = tokens_around(self.tokenizer, self.source)
        return [*before, *ids, *(after if ends else [])]

    def encode_apart(self, text: str, **how: bool) -> list[int]:
        """Encode as `encode` does, in a child process within bounds of time and memory.

        Raises:
            PlanError: The tokenizer fails, or exceeds them.
        """
        request = {"tokenizer": self.tokenizer.to_str(), "text": text, "how": how}
        ids: list[int] = self._asked("model", {**request, "source": str(self.source)})["ids"]
        return ids

    def _asked(self, field: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with BoundedChild(__name__) as child:
                return child.ask(request)
        except StrangerError as error:
            why = f"the {error.what} of '{self.source}' {error}; get the file again"
            raise refuse(field, why) from None
        except ValueError as error:
            what = "chat template" if "template" in request else "tokenizer"
            raise refuse(field, f"the {what} of '{self.source}' fails: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens left out."""
        with tokenizer_errors():
            text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Messages as the file's chat template renders them, with the beginning of an answer: in a
        child process, within bounds of time and memory.

        Args:
            messages: Mappings with role and content.

        Raises:
            PlanError: The file has no template, or it fails.
        """
        if self.template is None:
            raise refuse("chat", f"'{self.source}' has no chat template; give plain text")
        request = {"template": self.template, "special": dict(self.special)}
        return str(self._asked("chat", {**request, "messages": list(messages)})["text"])


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Encode a text, or render messages, for each request: the child's side."""
    from tokenizers import Tokenizer

    from workbench.corpora.tokenizers.chat_template import ChatTemplate

    for line in requests:
        asked = json.loads(line)
        try:
            if "template" in asked:
                rendered = ChatTemplate(asked["template"], asked["special"])
                answer: dict[str, Any] = {"text": rendered.render(asked["messages"], True).text}
            else:
                tokenizer = Tokenizer.from_str(asked["tokenizer"])
                own = ModelTokenizer(tokenizer, Path(asked["source"]))
                answer = {"ids": own.encode(asked["text"], **asked["how"])}
        except BaseException as error:
            answer = refusal(error)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
