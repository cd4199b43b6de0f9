"""Tokens that a tokenizer puts round a text stand round every document, pair and prompt:
transformers' ids of a tokenizer.json, llama.cpp's rule of a GGUF file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from tests.corpora.gguf_tokenizers import write_gguf_tokenizer
from tests.corpora.written_sources import DOCUMENTS, VOCAB, write_jsonl, write_megatron
from workbench.corpora.tokenized_corpus import SourceTokens, load_corpus
from workbench.corpora.tokenizers.read_tokenizer import read_tokenizer
from workbench.corpora.trained_bpe import train_bpe
from workbench.errors import PlanError
from workbench.plan.schema import Corpus

BOS, EOS = ("<s>", VOCAB), ("</s>", VOCAB + 1)
IDS = VOCAB + 3
BEGINS = processors.TemplateProcessing(single="<s> $A", special_tokens=[BOS])
POST: dict[str, Any] = {
    "none": None,
    "begins": BEGINS,
    "begins and ends": processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[BOS, EOS]
    ),
    "ends": processors.TemplateProcessing(single="$A </s>", special_tokens=[EOS]),
    "Roberta": processors.RobertaProcessing(EOS, BOS),
    "Bert": processors.BertProcessing(("<sep>", VOCAB + 2), BOS),
    "in a sequence": processors.Sequence([processors.ByteLevel(), BEGINS]),
}
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
)
TALK = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "completions": ({"prompt": "the quick", "completion": " fox"}, ["the quick fox"]),
    "preferences": (
        {"prompt": "the", "chosen": " dog", "rejected": " fox"},
        ["the dog", "the fox"],
    ),
}


def write_folder(folder: Path, post: Any) -> Tokenizer:
    tokenizer = train_bpe(iter(DOCUMENTS * 3), VOCAB)
    tokenizer.add_special_tokens([BOS[0], EOS[0], "<sep>"])
    if post is not None:
        tokenizer.post_processor = post
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS[0], "eos_token": EOS[0], "chat_template": CHAT}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def load(folder: Path, source: Path, **fields: Any) -> SourceTokens:
    tokenizer = str(folder / "tokenizer.json")
    corpus = Corpus(source=str(source), **{"tokenizer": tokenizer, "holdout": 0.0, **fields})
    return load_corpus(corpus, IDS, folder=folder / "cache").sources[0]


def ids(found: SourceTokens) -> list[int]:
    """Token ids, whether they have loss or not."""
    whole: list[int] = np.where(found.train < 0, ~found.train.astype(int), found.train).tolist()
    return whole


def ended(ids: list[int]) -> list[int]:
    """A document's ids, the end of text once."""
    return ids if ids[-1] == EOS[1] else [*ids, EOS[1]]


@pytest.mark.parametrize("name", POST)
def test_documents_pairs_and_prompts_have_transformers_ids(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    write_folder(tmp_path, POST[name])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = [index for text in DOCUMENTS if text for index in ended(theirs(text).input_ids)]
    assert ids(load(tmp_path, write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))) == expected
    for kind, (row, texts) in ROWS.items():
        (tmp_path / f"{kind}.jsonl").write_text(json.dumps(row))
        found = load(tmp_path, tmp_path / f"{kind}.jsonl")
        assert ids(found) == [i for text in texts for i in ended(theirs(text).input_ids)]
        bare = len(theirs(row["prompt"], add_special_tokens=False).input_ids)
        before = theirs("").input_ids.count(BOS[1])
        assert int((found.train >= 0).argmax()) == before + bare  # what stands before has no loss
    ours = read_tokenizer(tmp_path)
    assert ours.encode(DOCUMENTS[0]) == theirs(DOCUMENTS[0]).input_ids
    prompt = ours.encode(DOCUMENTS[0], ends=False)
    assert theirs(DOCUMENTS[0]).input_ids[: len(prompt)] == prompt
    assert ours.tokenizer.decode(prompt) == DOCUMENTS[0]  # which no end of text follows


def test_a_saved_length_neither_cuts_nor_pads(tmp_path: Path) -> None:
    tokenizer = write_folder(tmp_path, BEGINS)
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    expected = ids(load(tmp_path, source))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert ids(load(tmp_path, source)) == expected


def test_a_template_that_writes_the_first_token_has_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    write_folder(tmp_path, BEGINS)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert ids(load(tmp_path, tmp_path / "a.jsonl")) == wanted and wanted.count(BOS[1]) == 1


def test_a_text_that_is_cut_begins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.corpora.pieces.LONG_TEXT", 1000)
    monkeypatch.setattr("workbench.corpora.pieces.TEXT_BYTES", 300)
    tokenizer = write_folder(tmp_path, BEGINS)
    text = "the quick brown fox\n" * 200
    (tmp_path / "a.txt").write_text(text)
    expected = [*tokenizer.encode(text).ids, EOS[1]]
    assert ids(load(tmp_path, tmp_path / "a.txt")) == expected


def test_tokens_of_files_are_left_as_they_are(tmp_path: Path) -> None:
    write_folder(tmp_path, BEGINS)
    written = [[5, 6, 7], [8, 9]]
    found = load(tmp_path, write_megatron(tmp_path / "a", written), separate_documents=True)
    assert ids(found) == [5, 6, 7, 8, 9]


def test_another_post_processor_makes_another_entry(tmp_path: Path) -> None:
    """An entry counts by all that it was made with, not by the tokenizer's file alone."""
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    for count, post in enumerate((None, BEGINS), 1):
        write_folder(tmp_path, post)
        assert ids(load(tmp_path, source)).count(BOS[1]) == (4 if post else 0)
        assert len(list((tmp_path / "cache").glob("*.bin"))) == count


@pytest.mark.parametrize(
    "post, words",
    [
        (
            processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 999)]),
            "token 999",
        ),
        (processors.TemplateProcessing(single="$A $A", special_tokens=[]), "more than put tokens"),
    ],
)
def test_a_post_processor_that_does_something_else_is_refused(
    post: Any, words: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, post)
    with pytest.raises(PlanError, match=rf"corpus\.tokenizer: .*tokenizer\.json' .*{words}"):
        load(tmp_path, write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))


@pytest.mark.parametrize("pre, usual", [("llama-bpe", True), ("qwen2", False), ("gpt-2", False)])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("add_eos", [None, True, False])
def test_a_gguf_files_tokens_follow_llama_cpps_rule(
    pre: str, usual: bool, add_bos: bool | None, add_eos: bool | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    write_gguf_tokenizer(path, pre=pre, add_bos_token=add_bos, add_eos_token=add_eos)
    tokenizer = read_tokenizer(path)
    before = [3] if (usual if add_bos is None else add_bos) else []
    assert tokenizer.encode("ab", ends=False) == [*before, 2]
    assert tokenizer.encode("ab") == [*before, 2, *([4] if add_eos else [])]
    source = write_jsonl(tmp_path / "a.jsonl", ["ab", "b"])
    found = load(tmp_path, source, tokenizer=str(path))
    assert ids(found) == [*before, 2, 4, *before, 1, 4]


def test_a_gguf_file_that_adds_a_token_it_does_not_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf_tokenizer(path, bos_token_id=None, add_bos_token=True)
    with pytest.raises(
        PlanError, match=r"adds bos_token, and has no tokenizer\.ggml\.bos_token_id"
    ):
        read_tokenizer(path)
