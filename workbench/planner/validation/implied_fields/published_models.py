"""Published models by the names that rows give them, and what a row that names one leaves out."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from workbench import data_files
from workbench.plan.catalog import catalog
from workbench.plan.catalog.catalog import ModelEntry
from workbench.planner.validation.measured_rows import MeasuredRow

TOKENIZERS_FILE = "data/validation/tokenizers.yaml"
STATED_FIELDS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
"""Fields of a shape that rows have columns for."""
SIZE_TOLERANCE = 0.06
"""Share by which a size in a name (671B) may differ from the published count and still be it."""
VOCAB_TOLERANCE = 0.02
"""Rows print vocabularies padded, and Megatron pads them to 128 x tensor ranks."""
_SIZE_WORDS = frozenset({"a", "b"})
_WITHOUT_MEANING = ("moe", "dense", "base", "hf", "instruct", "lora", "meta", "model", "sft")


@lru_cache(maxsize=4096)
def find_published_model(name: str) -> str | None:
    """The catalog's name of the published model that a row calls `name`; None where it names none.

    The words of one name begin with those of the other, whatever separates them, and sizes agree:
    "DeepSeek V3 671B" is deepseek-v3, "Qwen3 MoE 30B" qwen3-30b-a3b.
    """
    words = _name_words(name)
    known = {
        own: catalog.models()[own]
        for own in catalog.models()
        if not _is_ours(catalog.models()[own])
    }
    found = [own for own, entry in known.items() if _is_called(words, own, entry)]
    return max(found, key=lambda own: len(_name_words(own))) if found else None


def published_model(row: MeasuredRow) -> ModelEntry | None:
    """The published model that `row` names; None where any field it states is another one's."""
    name = find_published_model(row.model)
    if name is None:
        return None
    entry = catalog.models()[name]
    stated = {field: getattr(row, field) for field in STATED_FIELDS if getattr(row, field)}
    shape = entry.shape
    ours = shape.model_copy(update={"head_dim": None}) if shape.mla else shape
    same = all(_agrees(field, value, getattr(ours, field)) for field, value in stated.items())
    experts = shape.moe.experts if shape.moe else None
    same = same and row.experts in (None, experts) and row.gated in (None, shape.gated)
    return entry if same else None


def with_published_shape(row: MeasuredRow) -> MeasuredRow:
    """`row`, with the fields of a shape that it leaves out as the model that it names has them; the
    vocabulary also by the tokenizer that it names.
    """
    entry = published_model(row)
    left_out: dict[str, Any] = {}
    if entry is not None:
        shape = entry.shape
        left_out = {field: getattr(shape, field) for field in STATED_FIELDS}
        left_out |= {"tied": shape.tied, "gated": shape.gated}
        if shape.mla:
            left_out |= {"head_dim": None, "kv_heads": None}
        if shape.moe:
            left_out |= {"experts": shape.moe.experts, "top_k": shape.moe.top_k}
    if row.vocab is None and not left_out.get("vocab"):
        left_out["vocab"] = tokenizer_vocab(row.text)
    filled = {
        field: value
        for field, value in left_out.items()
        if value is not None and getattr(row, field) is None
    }
    return replace(row, **filled) if filled else row


def tokenizer_vocab(text: str) -> int | None:
    """Vocabulary of the tokenizer that `text` names, in entries; None where it names none."""
    text = text.lower()
    return next((vocab for words, vocab in _tokenizers() if words.search(text)), None)


@lru_cache(maxsize=1)
def _tokenizers() -> list[tuple[re.Pattern[str], int]]:
    """(how rows name a tokenizer, its vocabulary) of each one of `TOKENIZERS_FILE`."""
    table: list[dict[str, Any]] = data_files.read_data_file(TOKENIZERS_FILE)
    names = [one["name"].replace("-", "[-_ ]?") for one in table]
    said = [rf"\b{name}[-_ ]tokenizer|\btokenizer\W{{0,3}}{name}\b" for name in names]
    return [(re.compile(words), int(one["vocab"])) for words, one in zip(said, table)]


def _is_ours(entry: ModelEntry) -> bool:
    return entry.source.startswith("made for")


def _name_words(name: str) -> tuple[str, ...]:
    """Words and numbers of a name: `Qwen3_30B_a3B` is qwen 3 30 b a 3 b, `GPT-OSS` gptoss."""
    plain = re.sub(r"\([^()]*\)", " ", name.lower())
    words: list[str] = []
    for word in re.findall(r"[a-z]+|\d+(?:\.\d+)?", plain):
        if word in _WITHOUT_MEANING:
            continue
        joins = words and word.isalpha() and words[-1].isalpha()
        if joins and not {word, words[-1]} & _SIZE_WORDS:
            words[-1] += word
        else:
            words.append(word)
    return tuple(words)


def _is_called(words: tuple[str, ...], own: str, entry: ModelEntry) -> bool:
    mine = _name_words(own)
    if words[: len(mine)] == mine:
        rest = words[len(mine) :]
        return not rest or (
            len(rest) == 2 and rest[1] == "b" and _is_size_of(rest[0], entry.parameters)
        )
    # A name that stops after the size: qwen 3 30 b of qwen 3 30 b a 3 b.
    return len(words) > 2 and words[-1] == "b" and mine[: len(words)] == words


def _is_size_of(billions: str, parameters: int | None) -> bool:
    return (
        parameters is not None
        and abs(float(billions) * 1e9 - parameters) <= SIZE_TOLERANCE * parameters
    )


def _agrees(field: str, stated: int, published: int | None) -> bool:
    if published is None:
        return True
    if field == "vocab":
        return abs(stated - published) <= VOCAB_TOLERANCE * published
    return stated == published
