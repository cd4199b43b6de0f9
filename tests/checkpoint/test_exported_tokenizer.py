"""Weights go out with the tokenizer they were trained with: beside them, and in a GGUF file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests.checkpoint.test_session_checkpoint import save
from tests.corpora.test_tokens_around import BEGINS, write_folder
from tests.corpora.written_sources import VOCAB
from tests.parallel.small import LLAMA, plan
from workbench import verbs
from workbench.corpora.tokenized_corpus import load_corpus
from workbench.corpora.tokenizers.gguf_tokenizer import GPT2, SPLITS
from workbench.corpora.tokenizers.read_tokenizer import read_tokenizer
from workbench.engine.export.export_gguf import export_gguf
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.errors import PlanError

TEXT = "the quick brown fox jumps over 12 lazy dogs, häßliche Wörter\n" * 3
BATCH = {"training.global_batch": 8}


pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text(TEXT * 5)
    return tmp_path


def checkpoint(folder: Path, **corpus: Any) -> Path:
    """Checkpoint of a run of one step, beside its plan."""
    shape = {**LLAMA, "hidden": 64, "vocab": VOCAB + 3}
    changes = {**BATCH, "corpus": {"source": str(folder / "a.txt"), **corpus}}
    made = plan(shape=shape, changes=changes).resolve()
    run_ranks(1, partial(save, made, folder / "run"))
    (folder / "run" / "plan.yaml").write_text(made.to_yaml())
    return folder / "run" / "checkpoints" / "step-00000001"


def test_a_run_of_bpe_exports_it(folder: Path) -> None:
    source = checkpoint(folder, tokenizer="bpe")
    made = plan(shape={**LLAMA, "vocab": VOCAB + 3}, changes=BATCH)
    corpus = made.corpus.model_copy(update={"source": str(folder / "a.txt"), "tokenizer": "bpe"})
    trained = load_corpus(corpus, VOCAB + 3).tokenizer_file
    assert trained is not None
    expected = Tokenizer.from_file(str(trained)).encode(TEXT).ids
    for to in (folder / "weights", folder / "weights.gguf"):
        verbs.weights(source, to)
        found = read_tokenizer(to)
        assert found.encode(TEXT) == expected and found.ends == {0}
        assert verbs.generate(to, "the fox", tokens=2)["prompt_tokens"] == len(
            found.encode("the fox")
        )


def test_a_folder_is_a_tokenizer(folder: Path) -> None:
    source = checkpoint(folder)
    write_folder(folder, BEGINS)
    expected = read_tokenizer(folder)
    for to in (folder / "weights", folder / "weights.gguf"):
        verbs.weights(source, to, tokenizer=folder)
        found = read_tokenizer(to)
        assert found.encode(TEXT) == expected.encode(TEXT)
        assert (found.template, found.ends) == (expected.template, expected.ends)
    with pytest.raises(ValueError, match=r"--tokenizer: '.*run' has no tokenizer; legal: a GGUF"):
        verbs.weights(source, folder / "other", tokenizer=folder / "run")


@pytest.mark.parametrize("name", SPLITS)
def test_how_a_text_is_split_has_gguf_s_name(name: str, folder: Path) -> None:
    tokenizer = write_folder(folder, None)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[name]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, last])
    tokenizer.model.ignore_merges = name == "llama-bpe"
    tokenizer.save(str(folder / "tokenizer.json"))
    to = folder / "weights.gguf"
    export_gguf(checkpoint(folder), to, tokenizer=folder)
    assert read_tokenizer(to).encode(TEXT) == read_tokenizer(folder).encode(TEXT)


def test_a_tokenizer_that_gguf_has_no_name_for_is_refused(folder: Path) -> None:
    tokenizer = write_folder(folder, None)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(GPT2), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    source, to = checkpoint(folder), folder / "weights.gguf"
    with pytest.raises(PlanError, match=r"--tokenizer: .*is no byte-level BPE whose splitting"):
        export_gguf(source, to, tokenizer=folder)
    assert not to.exists()
