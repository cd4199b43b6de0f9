"""The tokenizer of a GGUF file gives llama.cpp's ids; its chat template runs in a sandbox."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.corpora.gguf_tokenizers import write_gguf_tokenizer
from tests.engine.smollm2 import model_file, recorded_ids
from workbench.corpora.tokenized_corpus import load_corpus
from workbench.corpora.tokenizers.gguf_tokenizer import METADATA, read_gguf_tokenizer
from workbench.corpora.tokenizers.model_tokenizer import ModelTokenizer
from workbench.corpora.tokenizers.text_tokenizer import load_tokenizer
from workbench.errors import PlanError
from workbench.plan.schema import Corpus


@pytest.fixture(scope="module")
def smollm2() -> ModelTokenizer:
    return read_gguf_tokenizer(model_file())


def test_ids_are_those_of_llama_cpp(smollm2: ModelTokenizer) -> None:
    lines, ids = recorded_ids()
    assert len(lines) == len(ids) == 1011
    for line, expected in zip(lines, ids):
        assert smollm2.encode(line) == expected, line
        if "<|" not in line:
            assert smollm2.decode(expected) == line


def test_digits_are_split_one_by_one(smollm2: ModelTokenizer) -> None:
    assert [smollm2.decode([index]) for index in smollm2.encode("in 2026")] == [
        *("in", " ", "2", "0", "2", "6")
    ]


def test_a_control_tokens_text_is_the_token_only_in_templates(smollm2: ModelTokenizer) -> None:
    assert smollm2.encode("<|im_end|>", control=True) == list(smollm2.ends) == [2]
    assert len(smollm2.encode("<|im_end|>")) > 1
    assert smollm2.decode(smollm2.encode("a<|im_end|>b", control=True)) == "ab"


def test_the_chat_template_is_the_files(smollm2: ModelTokenizer) -> None:
    assert smollm2.chat([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "too big"),
        ("{% for message in messages %}", "Unexpected end of template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        (None, "has no chat template"),
    ],
)
def test_a_template_that_fails_is_refused(
    smollm2: ModelTokenizer, template: str | None, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        replace(smollm2, template=template).chat([{"role": "user", "content": "x"}])


def test_a_corpus_in_the_files_tokens(tmp_path: Path, smollm2: ModelTokenizer) -> None:
    texts = ["In 2026, häßliche Wörter.", "a<|im_end|>b"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": it}) + "\n" for it in texts))
    corpus = Corpus(source=str(tmp_path / "a.jsonl"), tokenizer=str(model_file()), holdout=0)
    (tokens,) = load_corpus(corpus, 49_152, folder=tmp_path / "cache").sources
    expected = [index for it in texts for index in [*smollm2.encode(it, control=True), 2]]
    assert tokens.train.tolist() == expected
    with pytest.raises(PlanError, match="has 49152 ids, the model a vocabulary of 49151"):
        load_corpus(corpus, 49_151, folder=tmp_path / "cache")


TYPED = ["x", 7, -1, 2**31 - 1, 1.5, True, ["a"], [1, 2], [1.5], [True], [["a"], ["b"]]]

NAMED = {"tokenizer.ggml.padding_token_id": "pad_token", "tokenizer.ggml.merges": "the merge"}
"""Metadata that contradict the tokens -> their name in a message."""


@pytest.mark.parametrize("key", [*METADATA])
def test_metadata_of_any_type_are_read_or_refused_in_a_sentence(
    key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number, value in enumerate(TYPED):
        path = tmp_path / f"{number}.gguf"
        write_gguf_tokenizer(path, {key: value})
        try:
            read_gguf_tokenizer(path).encode("ab")
        except PlanError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            named = NAMED.get(key, key.split(".")[-1].removesuffix("_token_id"))
            assert key in str(error) or named in str(error)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model 'llama'; legal: gpt2"),
        ({"pre": "deepseek-llm"}, r"tokenizer\.ggml\.pre 'deepseek-llm'; legal: gpt-2, smollm"),
        ({"eos_token_id": 9}, "has eos_token 9, but 5 tokens"),
        ({"merges": ["x y"]}, "has no intact tokenizer: the merge 'x y' joins no two tokens"),
        ({"merges": ["b a"]}, "has no intact tokenizer: the merge 'b a' joins no two tokens"),
        ({"merges": ["a"]}, "the merge 'a' joins no two tokens"),
        ({"token_type": [1, 1]}, r"has 2 values of tokenizer\.ggml\.token_type, but 5 tokens"),
        ({"scores": [1.0]}, r"has 1 values of tokenizer\.ggml\.scores, but 5 tokens"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens None; legal: a list of text"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write_gguf_tokenizer(tmp_path / "a.gguf", **change)
    with pytest.raises(PlanError, match=words):
        read_gguf_tokenizer(tmp_path / "a.gguf")


DAMAGED: dict[str, Any] = {
    "a merge without its result": {"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}},
    "no charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "no expression": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(("},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "no type": {"decoder": {"type": 3}},
    "no token": {"added_tokens": [{"id": 2**32, "content": "x"}]},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_tokenizer_json_that_panics_is_one_sentence(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    good: dict[str, Any] = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
    for key, value in DAMAGED[name].items():
        good[key] = {**good[key], **value} if key == "model" else value
    path.write_text(json.dumps(good))
    with pytest.raises(PlanError, match=r"is no tokenizer of the `tokenizers` library") as raised:
        load_tokenizer(path)
    assert "\n" not in str(raised.value) and capfd.readouterr().err == ""
