"""A model's own tokenizer, wherever its weights are."""

from __future__ import annotations

from pathlib import Path

from workbench.corpora.tokenizers.folder_tokenizer import read_folder_tokenizer
from workbench.corpora.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from workbench.corpora.tokenizers.model_tokenizer import ModelTokenizer
from workbench.errors import refuse


def read_tokenizer(model: str | Path) -> ModelTokenizer:
    """The tokenizer of a GGUF file, or of a folder of Hugging Face weights.

    Raises:
        PlanError: There is none, or it is damaged or of a kind not known here.
    """
    path = Path(model)
    if not path.exists():
        raise refuse(
            "model",
            f"'{path}' does not exist; legal: a GGUF file, or a folder of Hugging Face weights",
        )
    return read_folder_tokenizer(path) if path.is_dir() else read_gguf_tokenizer(path)
