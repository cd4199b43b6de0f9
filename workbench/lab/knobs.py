"""The fields of a plan that people turn: what each is called, what it may be, and what it is in a given plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from workbench.plan import catalog
from workbench.plan.schema import Plan

Choice = tuple[str, Any]
"""What a choice is called, and its value."""


@dataclass(frozen=True)
class Knob:
    """One control: the field it sets, what it is called, and its form (a share is a divisor of the number of ranks)."""

    name: str
    path: str
    label: str
    hint: str
    form: Literal["choice", "number", "share"] = "number"
    choices: tuple[Choice, ...] = ()


def knobs() -> list[Knob]:
    """All controls, in order; choices come from the catalog."""
    presets = [(f"{name} · {preset.title}", name) for name, preset in catalog.strategies().items()]
    zero = [("0 · nothing sharded", 0), ("1 · optimizer", 1), ("2 · + gradients", 2), ("3 · + parameters", 3)]
    recompute, precision = _same("none", "selective", "full"), _same("fp32", "tf32", "bf16", "fp16", "fp8")
    return [
        _choice("model", "model", "Model", "A name from the catalog", _same(*catalog.models())),
        _choice("gpu", "cluster.gpu", "GPU", "local: what is attached here", _same("local", *catalog.gpus())),
        Knob("gpus", "cluster.gpus", "Number of GPUs", "Ranks of the whole job"),
        _choice("strategy", "strategy.preset", "Strategy", "A preset; the controls below change it", presets),
        Knob("tensor", "strategy.tensor.size", "Tensor parallel", "Ranks that share every layer", "share"),
        Knob("pipeline", "strategy.pipeline.size", "Pipeline stages", "Ranks that the layers are cut over", "share"),
        _choice("zero", "strategy.data.zero", "ZeRO stage", "What data-parallel ranks share out", zero),
        _choice("recompute", "strategy.recompute", "Recompute", "Activations computed again in backward", recompute),
        Knob("sequence_length", "training.sequence_length", "Sequence length", "Tokens"),
        Knob("micro_batch", "training.micro_batch", "Micro batch", "Sequences a rank takes at once"),
        Knob("global_batch", "training.global_batch", "Global batch", "Sequences a step, over all ranks"),
        _choice("precision", "strategy.precision", "Precision", "Of parameters, activations, gradients", precision),
    ]


def values(plan: Plan, written: Plan) -> dict[str, Any]:
    """What each control shows for a complete `plan`; names come from the plan as `written`."""
    strategy, training = plan.strategy, plan.training
    return {
        "model": written.model if isinstance(written.model, str) else plan.model_name,
        "gpu": written.cluster.gpu if isinstance(written.cluster.gpu, str) else plan.card.name,
        "gpus": plan.world_size,
        "strategy": strategy.preset,
        "tensor": strategy.tensor.ranks,
        "pipeline": strategy.pipeline.size,
        "zero": strategy.data.zero,
        "recompute": strategy.recompute if isinstance(strategy.recompute, str) else "some layers",
        "sequence_length": training.sequence_length,
        "micro_batch": training.micro_batch,
        "global_batch": training.global_batch,
        "precision": strategy.precision,
    }


def shares(ranks: int) -> list[int]:
    """Sizes that an axis may have among so many ranks: their divisors."""
    return [size for size in range(1, ranks + 1) if ranks % size == 0]


def _choice(name: str, path: str, label: str, hint: str, choices: list[Choice]) -> Knob:
    return Knob(name, path, label, hint, "choice", tuple(choices))


def _same(*names: str) -> list[Choice]:
    return [(name, name) for name in dict.fromkeys(names)]
