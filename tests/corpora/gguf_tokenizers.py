"""A GGUF file of a tokenizer alone, any of whose metadata may be of another type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "</s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 4,
}


def write_gguf_tokenizer(path: Path, changes: dict[str, Any] | None = None, **named: Any) -> None:
    """Write the file.

    Args:
        path: Where.
        changes: Metadata in place of, or beside `TOKENIZER`'s; None leaves one out.
        named: The same of keys that begin with `tokenizer.ggml.`.
    """
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    named = {f"tokenizer.ggml.{name}": value for name, value in named.items()}
    writer, kinds = gguf.GGUFWriter(path, "llama"), gguf.GGUFValueType
    for key, value in (TOKENIZER | named | (changes or {})).items():
        if value is not None:
            inner = kinds.get_type(value[0]) if isinstance(value, list) and value else None
            writer.add_key_value(key, value, kinds.get_type(value), inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
