"""A model's own tokenizer, wherever its weights are."""

from __future__ import annotations

from pathlib import Path

from workbench.corpora.tokenizers.folder_tokenizer import read_folder_tokenizer
from workbench.corpora.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from workbench.corpora.tokenizers.model_tokenizer import ModelTokenizer
from workbench.errors import refuse
from workbench.safe_io.gguf_files import SUFFIX


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


def own_template(path: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template of a GGUF file, or beside a tokenizer.json, if it has one, and the special
    tokens that templates name.

    Raises:
        PlanError: A file is damaged.
    """
    if path.suffix == SUFFIX or path.name == "tokenizer.json":
        found = read_tokenizer(path if path.suffix == SUFFIX else path.parent)
        return found.template, dict(found.special)
    return None, {}
