"""Which files of a Hugging Face folder hold its weights."""

from __future__ import annotations

import json
from pathlib import Path

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files of a folder, in order.

    Raises:
        ValueError: There are none, or not those that the index lists.
    """
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    path = folder / INDEX_FILE
    try:
        files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model as safetensors"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(
            f"{path} is no index of a model (a JSON mapping with `weight_map`); get the file again"
        ) from None
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{path} lists {file!r}, which is not there; get the complete model")
    return files
