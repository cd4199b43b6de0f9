"""Verbs on a model's weights: what they predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def generate(
    model: str | Path,
    prompt: str,
    *,
    tokens: int = 64,
    tensor: int = 1,
    chat: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Generate text greedily from a GGUF file.

    In fp32 on CPU through a key-value cache, in a child process of each tensor-parallel rank.

    Args:
        model: A GGUF file of weights with its tokenizer.
        prompt: What the text follows.
        tokens: Most tokens to generate; the model's end-of-text token ends it earlier.
        tensor: Tensor-parallel ranks.
        chat: Render the prompt by the file's chat template, as a user's message.
        progress: Called with each piece of text.

    Returns:
        The text, its token ids, the number of tokens of the prompt, and the seconds it took.

    Raises:
        PlanError: The file is damaged, its tokenizer is not known, or the model is illegal on so
            many ranks.
    """
    from workbench.runs.launch import subprocess_verbs

    return subprocess_verbs.generate(model, prompt, tokens, tensor, chat, progress)


def perplexity(
    model: str | Path,
    texts: Sequence[str | Path] | str | Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    length: int = 256,
) -> dict[str, Any]:
    """Measure the perplexity of a GGUF file on texts, on any mesh.

    In fp32 on CPU, in child processes. Texts are tokenized by the file's own tokenizer and cut into
    windows, each read by itself: of its `length` + 1 tokens the first is predicted by none.

    Args:
        model: A GGUF file of weights with its tokenizer.
        texts: UTF-8 files, read one after the other.
        tensor: Tensor-parallel ranks.
        pipeline: Pipeline ranks.
        data: Data-parallel ranks.
        length: Tokens of a window that are read.

    Returns:
        The perplexity, and the number of predicted tokens.

    Raises:
        PlanError: A file is damaged, or the model is illegal on this mesh.
    """
    from workbench.runs.launch import subprocess_verbs

    files = [texts] if isinstance(texts, str | Path) else texts
    return subprocess_verbs.perplexity(model, files, tensor, pipeline, data, length)
