"""The tokenizer and chat template of a folder of Hugging Face weights: tokenizer.json, and what
stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.corpora.tokenizers.model_tokenizer import ModelTokenizer
from workbench.corpora.tokenizers.text_tokenizer import load_tokenizer
from workbench.errors import refuse
from workbench.safe_io.json_files import parse

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_folder_tokenizer(folder: Path) -> ModelTokenizer:
    """The tokenizer of a folder.

    What the library adds to a text, such as its first token, tokenizer.json says. Answers end at
    the tokens that generation_config.json names, else at tokenizer_config.json's `eos_token`.

    Args:
        folder: Folder with a tokenizer.json.

    Raises:
        PlanError: It has none, or one of its files is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise refuse(
            "model",
            f"'{folder}' has no tokenizer.json; legal: a folder of Hugging Face weights with its "
            f"tokenizer, or a GGUF file",
        )
    tokenizer = load_tokenizer(path, "model")
    config = _section(folder / "tokenizer_config.json")
    special = {name: text for name in SPECIAL if (text := _text(config.get(name))) is not None}
    ends = set(_ids(_section(folder / "generation_config.json").get("eos_token_id")))
    if not ends and "eos_token" in special:
        ends = set(_ids(tokenizer.token_to_id(special["eos_token"])))
    return ModelTokenizer(
        tokenizer, folder, ends=frozenset(ends), template=_template(folder, config), special=special
    )


def _section(path: Path) -> dict[str, Any]:
    """A file's mapping; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise refuse("model", f"'{path}' cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise refuse("model", f"'{path}' is no JSON mapping")
    return found


def _text(token: Any) -> str | None:
    """A token's text, which stands alone or in a mapping of its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids(written: Any) -> Iterator[int]:
    """Token ids, of which one may stand alone."""
    for one in written if isinstance(written, list) else [written]:
        if isinstance(one, int) and not isinstance(one, bool):
            yield one


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, or in the configuration; of several the default one."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        try:
            return alone.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise refuse("model", f"'{alone}' cannot be read: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
