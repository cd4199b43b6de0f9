"""Where answers stand in a rendered conversation: all that the model writes after a generation
prompt, with the token that ends it.

Where the template marks them ({% generation %}), these are the answers. Else a conversation is
rendered up to each answer, and with another text in the answer's place: what both renderings share
before and after it is the template's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from workbench.corpora.conversations.chat_rows import ASSISTANT, Message
from workbench.corpora.tokenizers.chat_template import ChatTemplate, Rendered

PROBE = "(an answer that nobody gives)"
"""Stands in an answer's place; longer than what templates look for in a text."""


def rendered_answers(
    template: ChatTemplate, messages: Sequence[Message], controls: Collection[str], first: int = 0
) -> Rendered:
    """Render messages, and find the answers from message `first` on.

    Args:
        template: The chat template.
        messages: All of them.
        controls: Texts of control tokens, of which the next one after an answer ends it.
        first: Assistant messages before it are no answers.

    Raises:
        ValueError: The template fails, or where it puts an answer is not known.
    """
    text, marked = _render(template, messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    own = [i for i in answers if i >= first]
    if not marked:
        return Rendered(text, [_answer(template, messages, controls, text, i) for i in own])
    if own != answers:
        if len(marked) != len(answers):
            raise ValueError(
                f"has {len(answers)} assistant messages, and the chat template marks "
                f"{len(marked)} with {{% generation %}}; legal: a template that marks each"
            )
        marked = marked[-len(own) :]
    return Rendered(text, marked)


def _answer(
    template: ChatTemplate,
    messages: Sequence[Message],
    controls: Collection[str],
    text: str,
    i: int,
) -> tuple[int, int]:
    probe = {**messages[i], "content": PROBE}
    before, after = _around(template, [*messages[:i], probe, *messages[i + 1 :]])
    prompt = _generation_prompt(template, messages[:i])
    start = next((len(each) for each in (prompt, before) if each and text.startswith(each)), None)
    if start is None or not text.endswith(after):
        raise _unknown(i)
    stop = len(text) - len(after)
    if not text[start:stop].strip():
        raise _unknown(i)
    _, alone = _around(template, [*messages[:i], probe])
    return start, stop + _ending(_shared(after, alone), controls)


def _around(template: ChatTemplate, messages: Sequence[Message]) -> tuple[str, str]:
    """What a template puts before and after `PROBE`."""
    before, found, after = _render(template, messages).text.partition(PROBE)
    if not found or PROBE in after:
        raise _unknown(next(i for i, each in enumerate(messages) if each["content"] == PROBE))
    return before, after


def _generation_prompt(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    try:
        return template.render(messages, generation_prompt=True).text
    except ValueError:  # some fail on conversations that nobody has begun
        return None


def _ending(after: str, controls: Collection[str]) -> int:
    """Characters after an answer that end it: up to the first control token, else all of them."""
    ends = [at + len(each) for each in controls if (at := after.find(each)) >= 0]
    return min(ends, default=len(after))


def _shared(a: str, b: str) -> str:
    """What both texts begin with."""
    return "".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


def _render(template: ChatTemplate, messages: Sequence[Message]) -> Rendered:
    try:
        return template.render(messages)
    except ValueError as error:
        raise ValueError(f"cannot be rendered by the chat template: {error}") from None


def _unknown(i: int) -> ValueError:
    return ValueError(
        f"has an answer, message {i + 1}, whose place in the rendered text is not known: the chat "
        "template leaves it out, repeats it, or renders what is round it otherwise without it; "
        "legal: a template that marks answers with {% generation %} (corpus.template)"
    )
