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

from workbench.plan.catalog.families.family import Family
from workbench.plan.catalog.huggingface_keys import Reading
from workbench.untrusted_text import shown

_ENDS = "(?:Config|Model|PreTrainedModel|ForCausalLM|LMHeadModel)"


def note_other_classes(reading: Reading, family: Family) -> None:
    """Note the classes of `reading` that are not what transformers has for a `family`'s language
    models.
    """
    own = re.compile(family.classes + _ENDS, re.IGNORECASE)
    for name in _words(reading.config.get("architectures")):
        if not own.fullmatch(name):
            reading.lacks(
                "architectures",
                f"architectures {shown(name)}, which is no {family.classes} language model "
                "of transformers",
            )
    files = reading.config.get("auto_map")
    for key, value in files.items() if isinstance(files, dict) else ():
        name = next(_words(value), "")
        published = family.published and own.fullmatch(name.rpartition(".")[2])
        if str(key).startswith("AutoModel") and not published:
            reading.lacks(
                "auto_map", f"auto_map: the model's own code {shown(name)}, none of which is run"
            )


def _words(value: Any) -> Iterator[str]:
    return (
        str(word) for word in (value if isinstance(value, list) else [value]) if word is not None
    )
