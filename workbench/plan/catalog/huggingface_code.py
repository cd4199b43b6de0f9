"""Whose code computes a Hugging Face configuration: transformers' own for its family, or code of
the model's authors.

`architectures` names the class that was saved, `auto_map` classes in files beside the weights. None
of them is run: a shape is what transformers' own class of the family computes, so any other class
is noted as not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from workbench.plan.catalog.huggingface_keys import Reading
from workbench.untrusted_text import shown

CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "gpt2": "GPT2",
    "opt": "OPT",
    "bloom": "Bloom",
    "mixtral": "Mixtral",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
}
"""model_type -> how transformers' classes of the family begin."""
PUBLISHED = ("deepseek_v2", "deepseek_v3")
"""Families whose authors' own files are what transformers' classes were made from."""
_ENDS = "(?:Config|Model|PreTrainedModel|ForCausalLM|LMHeadModel)"


def note_other_classes(reading: Reading, family: str) -> None:
    """Note the classes of `reading` that are not what transformers has for a `family`'s language
    models.
    """
    own = re.compile(CLASSES[family] + _ENDS, re.IGNORECASE)
    for name in _words(reading.config.get("architectures")):
        if not own.fullmatch(name):
            reading.lacks(
                "architectures",
                f"architectures {shown(name)}, which is no {CLASSES[family]} language model "
                "of transformers",
            )
    files = reading.config.get("auto_map")
    for key, value in files.items() if isinstance(files, dict) else ():
        name = next(_words(value), "")
        published = family in PUBLISHED and own.fullmatch(name.rpartition(".")[2])
        if str(key).startswith("AutoModel") and not published:
            reading.lacks(
                "auto_map", f"auto_map: the model's own code {shown(name)}, none of which is run"
            )


def _words(value: Any) -> Iterator[str]:
    return (
        str(word) for word in (value if isinstance(value, list) else [value]) if word is not None
    )
