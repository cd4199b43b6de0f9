"""Bytes a parameter of the model states, term by term, each way of keeping them with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from workbench.plan.optimizer_state import num_moments, state_bytes
from workbench.plan.resolved_plan import ResolvedPlan

GB = 1e9
"""Bytes of a GB, as sizes of GPU memory are printed; 1 GB of HBM is often 2**30 bytes, so that the
count of GPUs is rounded up by what is printed.
"""


@dataclass(frozen=True)
class StateTerm:
    """One state of a parameter."""

    name: str
    dtype: str
    size: float
    """Bytes a parameter."""


@dataclass(frozen=True)
class StateRecipe:
    """One way of keeping model states."""

    name: str
    terms: tuple[StateTerm, ...]
    source: str

    @property
    def sizes(self) -> frozenset[tuple[str, float]]:
        """Bytes a parameter by term."""
        return frozenset((term.name, term.size) for term in self.terms)

    @property
    def bytes_per_parameter(self) -> float:
        """Sum of the terms."""
        return sum(term.size for term in self.terms)

    @property
    def sum_of_terms(self) -> str:
        """The sum as it is written: 'parameters 4 + momentum 4 + variance 4'."""
        return " + ".join(f"{term.name} {term.size:g}" for term in self.terms)

    def total(self, parameters: float) -> float:
        """Bytes of all states of so many parameters."""
        return parameters * self.bytes_per_parameter

    def gpus(self, parameters: float, memory: float) -> int:
        """GPUs of `memory` bytes that hold the states of so many parameters, and nothing else."""
        return math.ceil(self.total(parameters) / memory)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        terms = [{"name": t.name, "dtype": t.dtype, "bytes": t.size} for t in self.terms]
        return {
            "states": self.name,
            "terms": terms,
            "bytes_per_parameter": self.bytes_per_parameter,
            "source": self.source,
        }


ADAM = (StateTerm("momentum", "fp32", 4), StateTerm("variance", "fp32", 4))
MIXED = (StateTerm("master", "fp32", 4), *ADAM)
NARROW = StateTerm("parameters", "16 bits", 2)
RECIPES = (
    StateRecipe(
        "Adam in fp32, without gradients",
        (StateTerm("parameters", "fp32", 4), *ADAM),
        "two moments a parameter: 1412.6980",
    ),
    StateRecipe(
        "Adam in fp32",
        (StateTerm("parameters", "fp32", 4), StateTerm("gradients", "fp32", 4), *ADAM),
        "1412.6980",
    ),
    StateRecipe(
        "mixed precision",
        (NARROW, StateTerm("gradients", "16 bits", 2), *MIXED),
        "ZeRO, 1910.02054, section 3.1",
    ),
    StateRecipe(
        "mixed precision, gradients in fp32",
        (NARROW, StateTerm("gradients", "fp32", 4), *MIXED),
        "Megatron-LM, docs of its distributed optimizer: bf16 parameters, fp32 gradients",
    ),
    StateRecipe(
        "mixed precision, gradients in 16 bits and fp32",
        (
            NARROW,
            StateTerm("gradients", "16 bits", 2),
            StateTerm("fp32 gradients", "fp32", 4),
            *MIXED,
        ),
        "ZeRO-Infinity, 2104.07857, section 3",
    ),
)
"""How model states of Adam are published, fewest bytes first."""


def recipe_of_plan(full: ResolvedPlan) -> StateRecipe:
    """What this engine keeps of a plan's parameters, unsharded."""
    each, optimizer, s = state_bytes(full), full.training.optimizer, full.strategy
    moments = num_moments(optimizer)
    terms = [
        StateTerm("parameters", s.precision, each.parameter),
        StateTerm("gradients", s.gradient_dtype, each.gradient),
        StateTerm("master", "fp32", each.master),
        *(
            StateTerm(name, optimizer.moments, each.moments / moments)
            for name in ("momentum", "variance")[:moments]
        ),
    ]
    kept = tuple(term for term in terms if term.size)
    return StateRecipe(f"as planned: {optimizer.name}, {s.precision}", kept, "fields of the plan")
