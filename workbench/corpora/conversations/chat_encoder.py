"""Conversations to token ids that say which tokens have loss.

An id is stored as it is where the token has loss, else as its complement (~id, which is negative):
one array holds both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.corpora.bounded_child import TOKENIZER, bounded, tokenizer_errors
from workbench.corpora.conversations.answer_spans import rendered_answers
from workbench.corpora.conversations.chat_rows import Words, chat_row
from workbench.corpora.conversations.docstring_chats import docstring_rows
from workbench.corpora.documents import BATCH_BYTES, json_objects, parquet_objects, row_name
from workbench.corpora.pieces import Piece
from workbench.corpora.tokenizers.chat_template import ChatTemplate, Rendered

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DTYPE = np.dtype(np.int32)
PLAIN_TEMPLATE = """\
{% for message in messages %}{{ message['role'] + ': ' }}\
{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}\
{% else %}{{ message['content'] + '\\n' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""For the tokenizers of this project, which have no template of their own: `user: ..`, a line each,
and the end of text after every answer."""

NO_TEMPLATE = (
    "is of messages, and corpus.tokenizer has no chat template; legal: corpus.template = a file "
    "with one"
)


@dataclass(frozen=True)
class ChatEncoding:
    """How conversations become tokens."""

    kind: str
    """messages, completions or preferences."""
    template: str | None
    """The chat template's text; None where there is none, which texts need not."""
    special: dict[str, str]
    """Name that templates use (eos_token) -> the token's text."""
    controls: list[str]
    """Texts of control tokens."""
    all_tokens: bool
    """Whether all tokens have loss, not those of answers alone."""


class ChatEncoder:
    """Encodes pieces of conversations.

    Args:
        chat: How.
        tokenizer: Of the text; None for bytes.
        end: Token after a text.
        before: Tokens before a text.
        after: Tokens after a text, before `end`.
    """

    def __init__(
        self,
        chat: ChatEncoding,
        tokenizer: Tokenizer | None,
        end: int,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        self.chat, self.tokenizer = chat, tokenizer
        first = np.array(before, DTYPE)
        self.before = first if chat.all_tokens else ~first
        self.after = np.array([*after, end], DTYPE)
        self.controls: Collection[str] = [*chat.controls, *chat.special.values()]
        self.template = None
        if chat.template is not None:
            self.template = ChatTemplate(chat.template, chat.special, dated=False)
        if tokenizer is not None:
            tokenizer.encode_special_tokens = False
            # One that trims offsets would hide white space of answers.
            tokenizer.post_processor = None

    def encode(self, piece: Piece) -> list[np.ndarray]:
        """Tokens of each conversation of `piece`; of a preference pair first the chosen one.

        Raises:
            ValueError: A row is no conversation; names the file and the row.
        """
        return [ids for batch in self._batches(piece) for ids in self.tokens(batch)]

    def _batches(self, piece: Piece) -> Iterator[list[Conversation]]:
        batch: list[Conversation] = []
        size = 0
        for number, row in _objects(piece, self.chat.kind):
            try:
                found = chat_row(row, self.chat.kind)
                batch += [self.conversation(found.prompt, answer) for answer in found.answers]
            except ValueError as error:
                raise ValueError(f"{row_name(piece, number)} {error}") from None
            size += sum(map(len, found.texts))
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def conversation(self, prompt: Words, answer: Words) -> Conversation:
        """The text of a prompt and its answer; messages by the chat template.

        Raises:
            ValueError: There is no template, it fails, or where it puts answers is not known.
        """
        if isinstance(prompt, str):
            assert isinstance(answer, str)
            spans = [(len(prompt), len(prompt) + len(answer))]
            return Conversation(Rendered(prompt + answer, spans), alone=True)
        assert not isinstance(answer, str)
        if self.template is None:
            raise ValueError(NO_TEMPLATE)
        found = rendered_answers(self.template, [*prompt, *answer], self.controls, len(prompt))
        return Conversation(found, alone=False)

    def tokens(self, batch: list[Conversation]) -> Iterator[np.ndarray]:
        """Token ids of each, of those without loss the complement."""
        if self.tokenizer is None:
            for one in batch:
                yield self._stored(one, *_byte_tokens(one.rendered))
            return
        texts = [one.rendered.text for one in batch]
        with bounded(TOKENIZER, sum(map(len, texts))):
            with tokenizer_errors():
                found = self.tokenizer.encode_batch(texts, add_special_tokens=False)
            yield from [
                self._stored(one, np.array(ids.ids, DTYPE), np.array(ids.offsets).reshape(-1, 2))
                for one, ids in zip(batch, found)
            ]

    def _stored(self, one: Conversation, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Ids, of tokens without loss their complement."""
        loss = np.full(len(ids), self.chat.all_tokens)
        for start, stop in one.rendered.marked:
            loss |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        found = np.where(loss, ids, ~ids).astype(DTYPE)
        return np.concatenate([self.before, found, self.after]) if one.alone else found


class Conversation(NamedTuple):
    """A conversation as text."""

    rendered: Rendered
    alone: bool
    """True where no template wrote what stands before and after it."""


def _byte_tokens(rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a text, and the characters [start, stop) of each."""
    ids = np.frombuffer(rendered.text.encode(), np.uint8)
    begins = (ids & 0xC0) != 0x80
    characters = np.cumsum(begins) - 1
    return ids.astype(DTYPE), np.stack([characters, characters + 1], 1)


def _objects(piece: Piece, kind: str) -> Iterator[tuple[int, Any]]:
    if piece.format == "python":
        path = Path(piece.path)
        yield from enumerate(docstring_rows(path, path.read_text(errors="replace"), kind))
    else:
        yield from (parquet_objects if piece.format == "parquet" else json_objects)(piece)


def refuse_first_messages(pieces: Iterable[Piece], kind: str) -> None:
    """Refuse a source without a chat template whose first row is of messages.

    Raises:
        ValueError: It is, or is no conversation; names the file and the row.
    """
    for piece in pieces:
        for number, row in _objects(piece, kind):
            try:
                if not isinstance(chat_row(row, kind).prompt, str):
                    raise ValueError(NO_TEMPLATE)
            except ValueError as error:
                raise ValueError(f"{row_name(piece, number)} {error}") from None
            return


def chat_texts(piece: Piece, kind: str) -> Iterator[str]:
    """What the messages of a piece say, for a tokenizer that is trained on them.

    Raises:
        ValueError: A row is no conversation; names the file and the row.
    """
    for number, row in _objects(piece, kind):
        try:
            yield "\n".join(chat_row(row, kind).texts)
        except ValueError as error:
            raise ValueError(f"{row_name(piece, number)} {error}") from None
