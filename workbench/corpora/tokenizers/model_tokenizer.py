"""A model's own tokenizer, its special tokens and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class ModelTokenizer:
    """A model's tokenizer, its special tokens and its chat template."""

    tokenizer: Tokenizer
    source: Path
    bos: int | None = None
    """Token at the beginning of a text, where `add_bos`."""
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    add_bos: bool = False
    """Where the library does not add it itself."""
    template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    """Name that templates use (bos_token) -> the token's text."""

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, control: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: The text.
            control: Whether the text of a control token, such as <|im_end|>, means that token: in a
                rendered template, not in what somebody wrote.
        """
        self.tokenizer.encode_special_tokens = not control
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not control).ids
        return [self.bos, *ids] if self.add_bos and self.bos is not None and not control else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens left out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Messages as the file's chat template renders them, with the beginning of an answer.

        Args:
            messages: Mappings with role and content.

        Raises:
            PlanError: The file has no template, or it fails.
        """
        from workbench.corpora.tokenizers.chat_template import ChatTemplate

        if self.template is None:
            raise refuse("chat", f"'{self.source}' has no chat template; give plain text")
        try:
            return ChatTemplate(self.template, self.special).render(messages, True).text
        except ValueError as error:
            why = f"the chat template of '{self.source}' fails: {error}"
            raise refuse("chat", why) from None
