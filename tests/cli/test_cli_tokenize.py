"""`workbench tokenize`: sources or a plan into the cache, and out as Megatron-LM's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.corpora.written_sources import DOCUMENTS, byte_tokens, write_jsonl, write_tokenizer
from workbench import verbs
from workbench.cli.app import answer
from workbench.corpora.megatron_files import read_indexed


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = answer(["tokenize", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict) and code == found.get("exit_code", 0)
    return found


def test_sources_go_into_one_dataset(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(home / "a.jsonl", DOCUMENTS)
    (home / "b.txt").write_text("one more")
    found = answered(capsys, "a.jsonl", "b.txt", "-o", "out")
    assert (found["documents"], found["skipped"], found["vocabulary"]) == (5, 1, 256)
    tokens, documents, _ = read_indexed(home / "out.bin")
    assert tokens.tolist() == byte_tokens([*DOCUMENTS, "one more"])
    assert documents.tolist()[-2:] == [len(tokens) - 9, len(tokens)]
    again = answered(capsys, "out.idx", "-o", "again")
    assert again["documents"] == 5
    assert (home / "again.idx").read_bytes() == (home / "out.idx").read_bytes()
    assert (home / "again.bin").read_bytes() == (home / "out.bin").read_bytes()
    assert sorted(path.name for path in home.iterdir() if path.suffix in (".bin", ".idx")) == [
        "again.bin",
        "again.idx",
        "out.bin",
        "out.idx",
    ]


def test_a_plan_is_tokenized_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(home / "a.jsonl", DOCUMENTS)
    write_tokenizer(home / "tokenizer.json")
    (home / "plan.yaml").write_text(
        "model: tiny\ncluster: {gpu: local, gpus: 1}\n"
        "corpus: {source: a.jsonl, tokenizer: ./tokenizer.json}\n"
    )
    first = answered(capsys, "plan.yaml")
    assert first["sources"][0]["seconds"] > 0
    assert verbs.tokenize("plan.yaml")["sources"][0]["seconds"] is None
    assert verbs.tokenize("a.jsonl", tokenizer="tokenizer.json")["tokens"] == first["tokens"]
    assert answer(["tokenize", "plan.yaml"]) == 0
    assert "were tokenized already" in capsys.readouterr().out


def test_what_has_loss_is_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": "user", "content": "Hi\nyou"}, {"role": "assistant", "content": "Yes"}]
    rows = [{"messages": turns}, {"messages": [turns[0], {**turns[1], "content": "Y" * 90}]}]
    (home / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (found,) = answered(capsys, "a.jsonl")["sources"]
    assert found["documents"] == 2 and found["loss_tokens"] == 4 + 91
    assert found["first"] == [
        {"text": "user: Hi\nyou\nassistant: ", "loss": False},
        {"text": "Yes\0", "loss": True},
        {"text": "\n", "loss": False},
    ]
    (home / "plan.yaml").write_text(
        "model: tiny\ncluster: {gpu: local, gpus: 1}\ncorpus: {source: a.jsonl, holdout: 0}\n"
        "training: {sequence_length: 64}\n"
    )
    assert answer(["tokenize", "plan.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "tokens in 2 conversations, 95 of them with loss" in shown
    assert "2 conversations in 2 sequences, 71.9% filled; 1 cut, 0 left out" in shown
    assert "user: Hi\\nyou\\nassistant: ⟦Yes⟧\\n" in shown


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["plan.yaml", "--field", "text"], "--field"),
        (["a.jsonl", "--tokenizer", "bpe"], "--vocab"),
        (["a.jsonl", "--processes", "0"], "--processes"),
        (["a.jsonl", "--format", "csv"], "format"),
        (["a.jsonl", "-o", "no/such/folder"], "--output"),
        (["out.bin", "-o", "out"], "--output"),
        (["none.jsonl"], "corpus.source"),
        (["chat.jsonl", "-o", "out"], "--output"),
    ],
)
def test_refused(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], field: str
) -> None:
    write_jsonl(home / "a.jsonl", DOCUMENTS)
    (home / "plan.yaml").write_text("model: tiny\ncluster: {gpu: local, gpus: 1}\n")
    if words[0] == "out.bin":
        answered(capsys, "a.jsonl", "-o", "out")
    write_jsonl(home / "chat.jsonl", ["a"], field="messages")
    before = sorted(home.iterdir())
    found = answered(capsys, *words)
    assert found["problems"][0]["field"] == field
    assert [path for path in sorted(home.iterdir()) if path.name != "cache"] == [
        path for path in before if path.name != "cache"
    ]
