"""All families, by `model_type`, and the one that a shape is written as."""

from __future__ import annotations

from workbench.plan.catalog.families.bloom import BLOOM
from workbench.plan.catalog.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from workbench.plan.catalog.families.falcon import FALCON
from workbench.plan.catalog.families.family import Family
from workbench.plan.catalog.families.gemma import GEMMA2, GEMMA3
from workbench.plan.catalog.families.gpt2 import GPT2, OPT
from workbench.plan.catalog.families.gpt_neox import GPT_NEOX
from workbench.plan.catalog.families.llama import LLAMA, MISTRAL, PHI3
from workbench.plan.catalog.families.mixtral import MIXTRAL
from workbench.plan.catalog.families.olmo2 import OLMO2
from workbench.plan.catalog.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from workbench.plan.model.model_shape import Shape

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        GPT2,
        OPT,
        BLOOM,
        GPT_NEOX,
        FALCON,
        MIXTRAL,
        GEMMA2,
        GEMMA3,
        OLMO2,
        PHI3,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}
"""model_type -> its family."""


def family_of(shape: Shape) -> Family:
    """The family as which a shape is written: the one that misses the fewest of its fields."""
    written = [family for family in FAMILIES.values() if family.names is not None]
    return min(written, key=lambda family: len(family.unmet(shape)))
