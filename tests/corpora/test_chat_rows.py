"""Rows of conversations: recognised, tokenized with their loss, and refused by file and row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora.written_sources import VOCAB, write_tokenizer
from workbench.corpora.conversations.docstring_chats import docstring_rows
from workbench.corpora.tokenized_corpus import SourceTokens, check_encoding, load_corpus
from workbench.errors import PlanError
from workbench.plan import schema
from workbench.plan.corpus_files import source_format
from workbench.runs.launch.preflight import preflight

ASK = {"role": "user", "content": "Hi"}
YES = {"role": "assistant", "content": "Yes"}
NO = {"role": "assistant", "content": "No"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, **fields: Any) -> SourceTokens:
    corpus = schema.Corpus(source=str(path), **{"holdout": 0.0, **fields})
    return load_corpus(corpus, 400, folder=path.parent / "cache").sources[0]


def conversations(found: SourceTokens) -> list[str]:
    """Texts of bytes; what has loss stands in brackets."""
    assert found.conversations is not None
    words = []
    for start, stop in np.stack([found.conversations[:-1], found.conversations[1:]], 1):
        row = found.train[start:stop].tolist()
        marked = b"".join(bytes([id]) if id >= 0 else bytes([~id | 0x80]) for id in row)
        assert all(abs(id) < 0x80 for id in row)
        words.append("".join(chr(b & 0x7F) if b & 0x80 else f"[{chr(b)}]" for b in marked))
    return [each.replace("][", "") for each in words]


FORMATS: dict[str, tuple[Any, list[str]]] = {
    "messages": ({"messages": [ASK, YES]}, ["user: Hi\nassistant: [Yes\0]\n"]),
    "completions": ({"prompt": "a", "completion": " b"}, ["a[ b\0]"]),
    "completions of messages": (
        {"prompt": [ASK, NO, ASK], "completion": [YES]},
        ["user: Hi\nassistant: No\0\nuser: Hi\nassistant: [Yes\0]\n"],
    ),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, ["a[b\0]", "a[c\0]"]),
    "preferences of messages": (
        {"chosen": [ASK, YES], "rejected": [ASK, NO]},
        ["user: Hi\nassistant: [Yes\0]\n", "user: Hi\nassistant: [No\0]\n"],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_recognised_by_their_fields(name: str, tmp_path: Path) -> None:
    row, expected = FORMATS[name]
    path = write(tmp_path / "a.jsonl", row)
    found = load(path)
    assert found.kind == name.split()[0] == source_format(schema.Corpus(source=str(path)))
    assert (conversations(found), found.documents) == (expected, 1)
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = pytest.importorskip("pyarrow").Table.from_pylist([row])
    parquet.write_table(table, tmp_path / "a.parquet")
    again = load(tmp_path / "a.parquet", format=found.kind)
    assert conversations(again) == expected


def test_all_tokens_have_loss_where_the_plan_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", FORMATS["messages"][0])
    assert conversations(load(path, loss_on="all")) == ["[user: Hi\nassistant: Yes\0\n]"]


def test_the_plans_template_is_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", FORMATS["messages"][0])
    loop = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<"
    (tmp_path / "chat.jinja").write_text(loop + "{% endif %}")
    assert conversations(load(path, template=str(tmp_path / "chat.jinja"))) == ["<Hi><[Yes>]"]
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(PlanError, match=r"row 1 is of messages, and .* has no chat template"):
        load(path, tokenizer=tokenizer)
    assert load(path, tokenizer=tokenizer, template=str(tmp_path / "chat.jinja")).documents == 1
    (tmp_path / "chat.jinja").write_text("\n")
    with pytest.raises(PlanError, match=r"corpus\.template: .*chat\.jinja' is empty"):
        load(path, template=str(tmp_path / "chat.jinja"))
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}")
    with pytest.raises(PlanError, match=r"corpus\.template: .*Unexpected end of template"):
        load(path, template=str(tmp_path / "chat.jinja"))


def test_children_encode_the_same(tmp_path: Path) -> None:
    rows = [{"messages": [ASK, {**YES, "content": f"{i}" * 300}]} for i in range(4000)]
    corpus = schema.Corpus(source=str(write(tmp_path / "a.jsonl", *rows)), holdout=0.25)
    alone, pool = (
        load_corpus(corpus, 400, folder=tmp_path / str(n), processes=n).sources[0]
        for n in (None, 2)
    )
    assert alone.conversations is not None and pool.conversations is not None
    assert (alone.documents, len(alone.train)) == (4000, alone.conversations[3000])
    assert np.array_equal(alone.conversations, pool.conversations)
    assert np.array_equal(alone.train, pool.train)


REFUSED: dict[str, tuple[Any, str]] = {
    "no role": ({"messages": [ASK, {"content": "a"}]}, r"no role in messages\[1\]; legal: system"),
    "a role": ({"messages": [{**ASK, "role": "human"}]}, r"role 'human' in messages\[0\]"),
    "no answer": ({"messages": [ASK]}, "no message of role assistant in 'messages'"),
    "an empty answer": ({"messages": [ASK, {**YES, "content": " "}]}, "an empty message of role"),
    "no content": ({"messages": [ASK, {**YES, "content": None}]}, r"content None in messages\[1\]"),
    "a call": ({"messages": [{**YES, "tool_calls": [{"id": 1}]}]}, "tool_calls .* in messages"),
    "tools": ({"messages": [ASK, YES], "tools": ["f"]}, "'tools', which no template"),
    "no list": ({"messages": "Hi"}, "'messages' = 'Hi'; legal: a list of messages"),
    "another kind": ({"prompt": "a", "completion": "b"}, "is of completions, and its source is of"),
    "text": ({"text": "a"}, "has 'text', and its source is of messages"),
    "no object": ([1], "legal: an object with 'messages'"),
    "noncharacters": ({"messages": [ASK, {**YES, "content": "\ufdd0"}]}, r"U\+FDD0"),
}
PAIRS: dict[str, tuple[Any, str]] = {
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "answer that are equal"),
    "equal messages": ({"chosen": [ASK, YES], "rejected": [ASK, YES]}, "answer that are equal"),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": ""}, "an empty 'rejected'"),
    "no prompt": ({"chosen": "b", "rejected": "c"}, "no 'prompt'; legal: one, or messages"),
    "two kinds": ({"prompt": "a", "chosen": [YES], "rejected": [NO]}, "a prompt of text and 'ch"),
    "no answer": ({"prompt": [ASK], "chosen": [ASK], "rejected": [NO]}, "assistant in 'chosen'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_are_no_conversations_are_refused(name: str, tmp_path: Path) -> None:
    row, words = REFUSED[name]
    path = write(tmp_path / "a.jsonl", {"messages": [ASK, YES]}, row)
    with pytest.raises(PlanError, match=r"corpus\.source: \S*a\.jsonl: row 2 .*" + words):
        load(path)


@pytest.mark.parametrize("name", PAIRS)
def test_rows_that_are_no_pairs_are_refused(name: str, tmp_path: Path) -> None:
    row, words = PAIRS[name]
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"}, row)
    with pytest.raises(PlanError, match=r"corpus\.source: \S*a\.jsonl: row 2 .*" + words):
        load(path)


def test_an_empty_completion_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": ""})
    with pytest.raises(PlanError, match=r"row 1 has an empty 'completion'"):
        load(path)


MODULE = '''
def load(a):
    """Load what is to be loaded.

    And more.
    """

def _hidden():
    """Hide what nobody is to see."""

class Store:
    """Short."""

    async def put(self):
        """Put something into
        the store."""
'''


def test_docstrings_are_conversations_by_module(tmp_path: Path) -> None:
    path = tmp_path / "mod.py"
    rows = docstring_rows(path, MODULE, "messages")
    assert [[m["content"] for m in row["messages"]] for row in rows] == [
        ["What does mod.load do?", "Load what is to be loaded."],
        ["What does mod.Store.put do?", "Put something into the store."],
    ]
    pairs = docstring_rows(path, MODULE, "preferences")
    assert [row["rejected"][0]["content"] for row in pairs] == [
        "Put something into the store.",
        "Load what is to be loaded.",
    ]
    assert docstring_rows(path, "def broken(", "messages") == []


PLAN = "model: tiny\ncluster: {gpu: local, gpus: 1}\ncorpus: {source: stdlib, format: messages}\n"


DPO = {"corpus.format": "preferences", "finetune": {"preference": {"beta": 0.1}, "micro_batch": 2}}


def corpus_of(**changes: Any) -> schema.Corpus:
    return schema.parse_plan(PLAN).replace(**changes).resolve().corpus


def test_a_plan_says_what_has_loss_and_whether_conversations_are_packed() -> None:
    found = corpus_of()
    assert (found.loss_on, found.packing, found.separate_documents) == ("answers", True, True)
    alone = corpus_of(**{"corpus.packing": False})
    assert (alone.packing, alone.separate_documents) == (False, False)
    pairs = corpus_of(**DPO)
    assert (pairs.packing, pairs.separate_documents) == (False, False)
    text = schema.Plan.of("tiny").resolve().model_dump()["corpus"]
    assert not {"template", "loss_on", "packing", "format"} & text.keys()


ILLEGAL: dict[str, tuple[dict[str, Any], str]] = {
    "loss of text": (
        {"corpus.format": None, "corpus.loss_on": "all"},
        "corpus.loss_on: is all, an",
    ),
    "packed pairs": ({**DPO, "corpus.packing": True}, "corpus.packing: is true, and answers"),
    "pairs": ({**DPO, "corpus.loss_on": "all"}, "corpus.loss_on: is all, and of pref"),
    "no loss": (
        {"corpus.format": "preferences"},
        "corpus.format: is preferences, and training has no preference",
    ),
    "field": ({"corpus.field": "a"}, "corpus.field: is 'a', and messages has no fields"),
    "mixed": (
        {
            **DPO,
            "corpus": {
                "mix": [{"source": "stdlib", "weight": 1, "format": "preferences"}] * 1
                + [{"source": "stdlib", "weight": 1}]
            },
        },
        r"corpus\.mix\.1\.format: is text beside preferences",
    ),
    "operators": (
        {"strategy.operators": {"blocks.*.mlp.*": "replicate"}},
        "corpus.packing: is true, and strategy.operators may split sequences",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_plans_that_cannot_be_are_refused(name: str) -> None:
    changes, words = ILLEGAL[name]
    with pytest.raises(PlanError, match=words):
        schema.parse_plan(PLAN).replace(**changes).pin()


@pytest.mark.parametrize("name", FORMATS)
def test_messages_without_a_template_are_refused_before_a_rank_starts(
    name: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "a.jsonl", FORMATS[name][0])
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    corpus = schema.Corpus(source=str(source), tokenizer=tokenizer)
    if name not in ("completions", "preferences"):
        with pytest.raises(PlanError, match=r"row 1 is of messages, .* no chat template"):
            check_encoding(corpus, VOCAB)
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    check_encoding(corpus, VOCAB)


def test_a_tokenizer_of_another_model_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text " * 99)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    corpus = {"source": str(tmp_path / "a.txt"), "tokenizer": str(tokenizer)}
    changes = {"corpus": corpus, "model.vocab": VOCAB, "training.sequence_length": 16}
    made = schema.parse_plan(PLAN).replace(**changes)
    assert preflight(made, root=tmp_path, force=True) == []
    tokenizer.write_text("{")
    (problem,) = preflight(made, root=tmp_path, force=True)
    assert str(problem).startswith("corpus.tokenizer:") and "is no tokenizer" in str(problem)
