"""Answers are found in rendered conversations, with and without a template's own marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import chat_templates
from tests.corpora.written_sources import DOCUMENTS, VOCAB
from tests.engine.smollm2 import model_file
from workbench.corpora.conversations.answer_spans import rendered_answers
from workbench.corpora.conversations.chat_encoder import PLAIN_TEMPLATE, ChatEncoder, ChatEncoding
from workbench.corpora.tokenizers.chat_template import ChatTemplate
from workbench.corpora.tokenizers.read_tokenizer import own_template
from workbench.corpora.tokenizers.text_tokenizer import control_tokens, load_tokenizer
from workbench.corpora.trained_bpe import train_bpe

TALK = [
    {"role": "user", "content": "Hi, häßlich? "},
    {"role": "assistant", "content": " \nYes\n"},
    {"role": "user", "content": "assistant: no"},
    {"role": "assistant", "content": "Later"},
]
UNMARKED = chat_templates.CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ANSWERS = {
    UNMARKED: [" \nYes\n<|im_end|>", "Later<|im_end|>"],
    chat_templates.CHATML: [" \nYes\n<|im_end|>", "Later<|im_end|>"],
    chat_templates.TRIMMED: ["Yes<|end|>", "Later<|end|>"],
    chat_templates.SPACED: [" Yes </s>", " Later </s>"],
    chat_templates.RENAMED: [" \nYes\n<end>", "Later<end>"],
    chat_templates.THINKING: [" \nYes\n<|im_end|>", "<think>\n\n</think>\n\nLater<|im_end|>"],
    chat_templates.BARE: [" \nYes\n\n", "Later\n"],
    chat_templates.PROMPTED: [" \nYes\n<|end|>", "Later<|end|>"],
    PLAIN_TEMPLATE: [" \nYes\n</s>", "Later</s>"],
}


def answers(template: str, messages: list[dict[str, str]], first: int = 0) -> list[str]:
    made = ChatTemplate(template, {"eos_token": "</s>"})
    found = rendered_answers(made, messages, chat_templates.CONTROLS, first)
    assert "generation" not in found.text and found.text == made.render(messages).text
    return [found.text[start:stop] for start, stop in found.marked]


@pytest.mark.parametrize("template", ANSWERS)
def test_answers_end_with_the_token_that_ends_them(template: str) -> None:
    assert answers(template, TALK) == ANSWERS[template]
    assert answers(template, TALK, first=2) == ANSWERS[template][1:]
    alone = answers(template, TALK[:2])
    assert alone[0].endswith(ANSWERS[template][0].lstrip())


def test_a_thought_in_the_answer_is_one_of_its_own() -> None:
    thought = [TALK[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}]
    kept = chat_templates.THINKING.replace("{% if loop.last %}", "{% if false %}")
    kept = kept.replace(".split('</think>')[-1]", "")
    assert answers(kept, thought) == ["<think>\nhm\n</think>\n\nYes<|im_end|>"]


@pytest.mark.parametrize("name", chat_templates.UNKNOWN)
def test_a_template_that_hides_answers_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"has an answer, message [24], whose place in the"):
        answers(chat_templates.UNKNOWN[name], [TALK[2], TALK[1], TALK[2], TALK[3]])


def test_marks_that_are_not_one_an_answer_are_refused_after_a_prompt() -> None:
    alone = "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    assert answers(alone, TALK) == ["Later"]
    with pytest.raises(ValueError, match=r"has 2 assistant messages, .* marks 1 with"):
        answers(alone, TALK, first=2)


def stored(encoder: ChatEncoder, messages: list[dict[str, str]]) -> np.ndarray:
    (found,) = encoder.tokens([encoder.conversation([], messages)])
    return found


def test_masks_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = train_bpe(iter(DOCUMENTS * 3), VOCAB)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_templates.CHATML
    )
    chat = ChatEncoding("messages", chat_templates.CHATML, {}, control_tokens(tokenizer), False)
    talks = [TALK, TALK[:2], [{"role": "system", "content": "S"}, *TALK], TALK[1:]]
    for talk in talks:
        wanted: Any = theirs.apply_chat_template(
            talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        for template in (chat_templates.CHATML, UNMARKED):
            made = ChatEncoding("messages", template, {}, chat.controls, False)
            found = stored(ChatEncoder(made, tokenizer, 0), talk)
            assert np.where(found < 0, ~found, found).tolist() == wanted["input_ids"]
            assert (found >= 0).astype(int).tolist() == wanted["assistant_masks"]


def test_smollm2_answers_by_its_own_template() -> None:
    path = model_file()
    template, special = own_template(path)
    tokenizer = load_tokenizer(path)
    chat = ChatEncoding("messages", template, special, control_tokens(tokenizer), False)
    found = stored(ChatEncoder(chat, tokenizer, 2), TALK)
    ends = np.flatnonzero(np.diff(np.concatenate([[False], found >= 0, [False]])))
    runs = [found[start:stop].tolist() for start, stop in ends.reshape(-1, 2)]
    texts = [tokenizer.decode(run, skip_special_tokens=False) for run in runs]
    # The line feed before an answer that begins with white space is a token with it or its own.
    assert [text.lstrip("\n") for text in texts] == [" \nYes\n<|im_end|>", "Later<|im_end|>"]
