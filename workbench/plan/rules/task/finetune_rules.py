"""Rules of fine-tuning: what is trained, and of which model."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.errors import Problem
from workbench.plan.model.block_linears import LinearSize, adapted_linears, model_linears
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy import recompute_rules
from workbench.plan.schema import Finetune, Lora
from workbench.untrusted_text import shown

DEFAULT_ADAPTER = Finetune.model_fields["adapter"].default


def problems(plan: ResolvedPlan) -> Iterator[Problem]:
    """What is illegal in a plan that fine-tunes; nothing of others."""
    tune = plan.finetune
    if tune is None:
        return
    yield from _method(tune)
    if plan.lora:
        yield from _adapters(plan, plan.lora)


def _method(tune: Finetune) -> Iterator[Problem]:
    if tune.base_sha256 is not None and tune.base is None:
        yield Problem(
            "finetune.base_sha256",
            "is the hash of weights that finetune.base does not name; legal: with finetune.base, "
            "or null",
        )
    if tune.method != "full":
        return
    if tune.adapter != DEFAULT_ADAPTER:
        yield Problem(
            "finetune.adapter",
            f"is {shown(tune.adapter)} with method 'full', which has no adapters; legal: without "
            "it, or method 'lora'",
        )
    for name in ("lora", "quantize"):
        if getattr(tune, name) is not None:
            yield Problem(
                f"finetune.{name}",
                "is set with method 'full', which trains every weight; legal: without it, or "
                "method 'lora'",
            )


def _adapters(plan: ResolvedPlan, lora: Lora) -> Iterator[Problem]:
    if lora.initial_sha256 is not None and lora.initial is None:
        yield Problem(
            "finetune.lora.initial_sha256",
            "is the hash of adapters that finetune.lora.initial does not name; legal: with "
            "finetune.lora.initial, or null",
        )
    shape, linears = plan.shape, adapted_linears(plan.shape, lora)
    asked = [lora.targets] if isinstance(lora.targets, str) else lora.targets
    idle = [each for each in asked if not adapted_linears(shape, _only(lora, each))]
    if idle:
        known = ", ".join(_layer_names(shape))
        yield Problem(
            "finetune.lora.targets",
            f"{shown(idle[0])} matches no linear layer of {shape.name or 'the model'}; legal: "
            f"all, attention, or patterns of {known}",
        )
        return
    yield from _rank(lora, linears)
    if lora.dropout:
        yield from _dropout(plan, linears)


def _only(lora: Lora, target: str) -> Lora:
    targets = target if lora.targets == target else [target]
    return lora.model_copy(update={"targets": targets})


def _layer_names(shape: Shape) -> list[str]:
    """Names of the linear layers within a block, of all kinds of blocks."""
    paths = (path.split(".", 2)[2] for path in model_linears(shape))
    return list(dict.fromkeys(paths))


def _rank(lora: Lora, linears: dict[str, LinearSize]) -> Iterator[Problem]:
    path, size = min(linears.items(), key=lambda item: min(item[1][:2]))
    most = min(size.outputs, size.inputs)
    if lora.rank > most:
        yield Problem(
            "finetune.lora.rank",
            f"is {lora.rank}, more than the rank of {path}, a matrix [{size.outputs}, "
            f"{size.inputs}]; legal: 1 to {most}, or other targets",
        )


def _dropout(plan: ResolvedPlan, linears: dict[str, LinearSize]) -> Iterator[Problem]:
    """Masks are drawn by the ids of a layer's tokens, which experts' rows and modules that are
    recomputed by themselves do not have.
    """
    rate = plan.lora.dropout if plan.lora else 0.0
    expert = next((path for path, size in linears.items() if size.experts), None)
    if expert is not None:
        yield Problem(
            "finetune.lora.dropout",
            f"is {rate}, but {expert} is of experts, whose rows are not dropped; legal: 0, or "
            "other targets",
        )
    wanted = plan.strategy.recompute
    alone = set(recompute_rules.recomputed_modules(wanted, plan.shape))
    alone = {path for path in alone if any(each.startswith(f"{path}.") for each in linears)}
    alone -= {f"blocks.{layer}" for layer in range(plan.shape.layers)}
    if alone:
        yield Problem(
            "finetune.lora.dropout",
            f"is {rate}, but {min(alone)} is recomputed by itself; legal: 0, or strategy.recompute "
            "of full layers, selective or none",
        )
