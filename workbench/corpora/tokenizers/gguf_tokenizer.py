"""The tokenizer and chat template of a GGUF file (byte-level BPE).

How text is split before merges is no list in the file but a name, `tokenizer.ggml.pre`, of which
llama.cpp knows the regular expressions (`llm_tokenizer_bpe` of llama-vocab.cpp). transformers' GGUF
reader ignores it, and so gives other ids for numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.corpora.tokenizers.model_tokenizer import ModelTokenizer
from workbench.errors import refuse
from workbench.safe_io.gguf_files import GgufFile, open_gguf
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
"""Those that begin a text with bos_token where `tokenizer.ggml.add_bos_token` is absent
(llama-vocab.cpp).
"""
KEYS = {"bos_token": "bos", "eos_token": "eos", "eot_token": "eot", "pad_token": "padding"}
"""Name that templates use -> the part of the file's key."""
ENDS = ("eos_token", "eot_token")
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
    kind, split = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise refuse(field, f"'{path}' has tokenizer.ggml.model {shown(kind)}; legal: gpt2 (BPE)")
    if split not in SPLITS:
        raise refuse(
            field, f"'{path}' has tokenizer.ggml.pre {shown(split)}; legal: {', '.join(SPLITS)}"
        )
    tokens: list[str] = file.get("tokenizer.ggml.tokens", [])
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in KEYS.items()}
    for name, index in ids.items():
        if index is not None and index >= len(tokens):
            raise refuse(
                field, f"'{path}' has {name} {index}, but {len(tokens)} tokens; get the file again"
            )
    tokenizer = _bpe(file, tokens, split, field)
    tokenizer.post_processor = _around(file, tokens, ids, split, field)
    return ModelTokenizer(
        tokenizer,
        Path(path),
        frozenset(ids[name] for name in ENDS if ids[name] is not None),
        file.get("tokenizer.chat_template"),
        {name: tokens[index] for name, index in ids.items() if index is not None},
    )


def _around(
    file: GgufFile, tokens: list[str], ids: dict[str, int | None], split: str, field: str
) -> PostProcessor | None:
    """What puts bos_token before a text and eos_token after it, where the file says so."""
    from tokenizers import processors

    pieces, special = ["$A"], []
    for name, usual in (("bos_token", split in ADDS_BOS), ("eos_token", False)):
        asked, index = file.get(f"tokenizer.ggml.add_{name}"), ids[name]
        if asked and index is None:
            key = f"tokenizer.ggml.{KEYS[name]}_token_id"
            raise refuse(field, f"'{file.path}' adds {name}, and has no {key}; get the file again")
        if index is not None and (usual if asked is None else asked):
            pieces = [name, *pieces] if name == "bos_token" else [*pieces, name]
            special.append({"id": name, "ids": [index], "tokens": [tokens[index]]})
    if not special:
        return None
    return processors.TemplateProcessing(single=pieces, special_tokens=special)


def _bpe(file: GgufFile, tokens: list[str], split: str, field: str) -> Tokenizer:
    """Byte-level BPE from the file's tokens, merges and token types."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", [])]
    types: Any = file.get("tokenizer.ggml.token_type", [])
    try:
        model = models.BPE(
            {token: index for index, token in enumerate(tokens)},
            merges,
            ignore_merges=split in IGNORES_MERGES,
        )
    except Exception as error:  # the library raises no narrower class
        raise refuse(
            field, f"'{file.path}' has no intact tokenizer: {error}; get the file again"
        ) from None
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
