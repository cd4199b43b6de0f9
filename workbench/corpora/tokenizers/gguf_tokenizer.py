"""The tokenizer and chat template of a GGUF file (byte-level BPE).

How text is split before merges is no list in the file but a name, `tokenizer.ggml.pre`, of which
llama.cpp knows the regular expressions (`llm_tokenizer_bpe` of llama-vocab.cpp). transformers' GGUF
reader ignores it, and so gives other ids for numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.corpora.bounded_child import StrangerError, tokenizer_errors
from workbench.corpora.tokenizers.model_tokenizer import ModelTokenizer
from workbench.errors import refuse
from workbench.safe_io.gguf_files import GgufFile, open_gguf
from workbench.safe_io.json_field_checks import Check, flag, list_of, or_null, text, whole
from workbench.untrusted_text import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.processors import PostProcessor

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [_LLAMA3 % "1,3"],
    "qwen2": [_LLAMA3 % "1"],
}
"""tokenizer.ggml.pre -> the regular expressions that split text, one after the other."""
IGNORES_MERGES = ("llama-bpe",)
"""Those in which a piece that is a token is not merged from its bytes."""
ADDS_BOS = ("llama-bpe",)
"""Values that begin a text with bos_token where `tokenizer.ggml.add_bos_token` is absent
(llama-vocab.cpp).
"""
KEYS = {"bos_token": "bos", "eos_token": "eos", "eot_token": "eot", "pad_token": "padding"}
"""Name that templates use -> the part of the file's key."""
ENDS = ("eos_token", "eot_token")
TOKENS = "tokenizer.ggml.tokens"
_OPTIONAL: list[tuple[str, Check, str]] = [
    ("ggml.pre", text, "text"),
    ("ggml.merges", list_of(text), "a list of text"),
    ("ggml.token_type", list_of(whole), "a list of whole numbers"),
    ("ggml.scores", list_of(lambda value: type(value) in (int, float)), "a list of numbers"),
    *((f"ggml.{key}_token_id", whole, "a token's number") for key in KEYS.values()),
    *((f"ggml.add_{key}_token", flag, "true or false") for key in ("bos", "eos")),
    ("chat_template", text, "text"),
]
METADATA: dict[str, tuple[Check, str]] = {
    "tokenizer.ggml.model": (text, "text"),
    TOKENS: (lambda value: list_of(text)(value) and len(value) > 0, "a list of text"),
    **{f"tokenizer.{key}": (or_null(check), legal) for key, check, legal in _OPTIONAL},
}
"""Key -> what may stand there, and that in words."""
CONTROL, USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type: tokens that text does not contain, and tokens that it does
contain, unsplit.
"""


def read_gguf_tokenizer(path: str | Path, field: str = "tokenizer") -> ModelTokenizer:
    """The tokenizer of a GGUF file.

    Args:
        path: The file.
        field: Field of the plan that errors name.

    Raises:
        PlanError: The file is damaged, or its tokenizer is of a kind not known here.
    """
    file = open_gguf(path, field)
    found = tokenizer_metadata(file, field)
    kind, split = found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"] or "gpt-2"
    if kind != "gpt2":
        raise refuse(field, f"'{path}' has tokenizer.ggml.model {shown(kind)}; legal: gpt2 (BPE)")
    if split not in SPLITS:
        raise refuse(
            field, f"'{path}' has tokenizer.ggml.pre {shown(split)}; legal: {', '.join(SPLITS)}"
        )
    tokens: list[str] = found["tokenizer.ggml.tokens"]
    written = {name: found[f"tokenizer.ggml.{key}_token_id"] for name, key in KEYS.items()}
    ids = {name: index for name, index in written.items() if index is not None}
    tokenizer = _bpe(path, found, split, field)
    tokenizer.post_processor = _around(path, found, ids, split, field)
    return ModelTokenizer(
        tokenizer,
        Path(path),
        frozenset(ids[name] for name in ENDS if name in ids),
        found["tokenizer.chat_template"],
        {name: tokens[index] for name, index in ids.items()},
    )


def tokenizer_metadata(file: GgufFile, field: str) -> dict[str, Any]:
    """The metadata of a file's tokenizer, by key; None where it has none.

    Args:
        file: A GGUF file with a tokenizer of any kind.
        field: Field of the plan that errors name.

    Raises:
        PlanError: One is of another type than it should be, or contradicts the number of tokens.
    """
    found = {key: file.get(key) for key in METADATA}
    for key, (check, legal) in METADATA.items():
        if not check(found[key]):
            raise refuse(field, f"'{file.path}' has {key} {shown(found[key])}; legal: {legal}")
    count = len(found[TOKENS])
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        if found[key] is not None and len(found[key]) != count:
            has = f"{len(found[key]):,} values of {key}, but {count:,} tokens"
            raise refuse(field, f"'{file.path}' has {has}; get the file again")
    for name, key in KEYS.items():
        index = found[f"tokenizer.ggml.{key}_token_id"]
        if index is not None and index >= count:
            has = f"{name} {index}, but {count:,} tokens"
            raise refuse(field, f"'{file.path}' has {has}; get the file again")
    return found


def gguf_split(state: dict[str, Any]) -> str | None:
    """The value of tokenizer.ggml.pre that splits a text as a tokenizer.json does; None where none
    does, or it is no byte-level BPE.

    Args:
        state: The tokenizer.json.
    """
    pre, model = state["pre_tokenizer"] or {}, state["model"]
    if model["type"] != "BPE" or state["normalizer"] is not None:
        return None
    *splits, last = pre.get("pretokenizers") or [pre]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    expressions = [
        r"\p{N}" if each.get("individual_digits") else (each.get("pattern") or {}).get("Regex", "")
        for each in splits
    ]
    expressions += [GPT2] if last["use_regex"] else []
    names = (name for name, known in SPLITS.items() if known == expressions)
    found = next(names, None)
    return found if (found in IGNORES_MERGES) is bool(model.get("ignore_merges")) else None


def _around(
    path: str | Path, found: dict[str, Any], ids: dict[str, int], split: str, field: str
) -> PostProcessor | None:
    """Post-processor that puts bos_token before and eos_token after a text, as the file says."""
    from tokenizers import processors

    pieces, special = ["$A"], []
    for name, usual in (("bos_token", split in ADDS_BOS), ("eos_token", False)):
        asked, index = found[f"tokenizer.ggml.add_{name}"], ids.get(name)
        if asked and index is None:
            key = f"tokenizer.ggml.{KEYS[name]}_token_id"
            raise refuse(field, f"'{path}' adds {name}, and has no {key}; get the file again")
        if index is not None and (usual if asked is None else asked):
            pieces = [name, *pieces] if name == "bos_token" else [*pieces, name]
            special.append({"id": name, "ids": [index], "tokens": [found[TOKENS][index]]})
    if not special:
        return None
    return processors.TemplateProcessing(single=pieces, special_tokens=special)


def _bpe(path: str | Path, found: dict[str, Any], split: str, field: str) -> Tokenizer:
    """Byte-level BPE from the file's tokens, merges and token types."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = found[TOKENS]
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in found["tokenizer.ggml.merges"] or []]
    for merge in merges:
        # The library panics of a merge that makes no token.
        if len(merge) != 2 or not all(each in ids for each in (*merge, "".join(merge))):
            why = f"{shown(' '.join(merge))} joins no two tokens into a third"
            raise refuse(field, f"'{path}' has no intact tokenizer: the merge {why}")
    types: list[int] = found["tokenizer.ggml.token_type"] or []
    try:
        with tokenizer_errors():
            model = models.BPE(ids, merges, ignore_merges=split in IGNORES_MERGES)
    except StrangerError as error:
        raise refuse(field, f"'{path}' has no intact tokenizer: it {error}") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[split]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer
