"""The tokenizer of a folder of Hugging Face weights: transformers' ids and rendered chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from workbench.corpora.tokenizers.read_tokenizer import read_tokenizer
from workbench.errors import PlanError

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "<|{{ message.role }}|>{{ message | tojson }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "<ab> & 'ba'"}, {"role": "assistant", "content": "a b"}]


def write(folder: Path, **changes: Any) -> Path:
    """A byte-level tokenizer that begins a text with <s>, as Llama 3's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<s>", "</s>", "<|end|>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "chat_template": TEMPLATE,
    }
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return folder


def test_ids_and_chats_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(write(tmp_path))
    ours = read_tokenizer(tmp_path)
    text = "ab ä\n 12"
    assert ours.encode(text) == theirs(text).input_ids and ours.encode(text)[0] == 256
    rendered = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.chat(MESSAGES) == rendered
    expected = theirs(rendered, add_special_tokens=False).input_ids
    assert ours.encode(rendered, control=True) == expected and 258 in expected
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def test_answers_end_where_the_folder_says(tmp_path: Path) -> None:
    assert read_tokenizer(write(tmp_path)).ends == {257}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    assert read_tokenizer(tmp_path).ends == {257, 258}


def test_a_template_of_its_own_comes_first(tmp_path: Path) -> None:
    write(tmp_path, chat_template=[{"name": "tools", "template": "t"}])
    with pytest.raises(PlanError, match=f"'{tmp_path}' has no chat template"):
        read_tokenizer(tmp_path).chat(MESSAGES)
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    assert read_tokenizer(tmp_path).chat(MESSAGES) == "2"


@pytest.mark.parametrize(
    "template, words",
    [
        ("{% macro a(x) %}{{ a(x) }}{% endmacro %}{{ a(1) }}", "takes more depth or memory"),
        (r"{{ '\ud800' }}", "surrogates not allowed"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
    ],
)
def test_a_template_that_fails_is_refused(tmp_path: Path, template: str, words: str) -> None:
    write(tmp_path, chat_template=template)
    with pytest.raises(PlanError, match=f"the chat template of .* fails: .*{words}"):
        read_tokenizer(tmp_path).chat(MESSAGES)


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("tokenizer.json", b"{}", "is no tokenizer of the `tokenizers` library"),
        ("tokenizer_config.json", b"[1]", "tokenizer_config.json' is no JSON mapping"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: not valid JSON at line 1"),
        ("generation_config.json", b"\xff", "generation_config.json' cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: bytes, words: str) -> None:
    (write(tmp_path) / file).write_bytes(content)
    with pytest.raises(PlanError, match=words):
        read_tokenizer(tmp_path)


def test_what_has_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no tokenizer\.json; legal: a folder of Hugging Face"):
        read_tokenizer(tmp_path)
    with pytest.raises(PlanError, match=r"model: '.*gone\.gguf' does not exist; legal: a GGUF"):
        read_tokenizer(tmp_path / "gone.gguf")
