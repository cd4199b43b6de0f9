"""The largest number that each kind of field takes, and why: ten times what anyone has published,
or more.

A bound is no legality of a model: it keeps a slip of the keyboard (a layer count of 1e7) from
costing minutes or the memory of the machine, and every product of bounded numbers within what a
float holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)

from workbench.errors import refuse


@dataclass(frozen=True)
class Most:
    """Upper bound of a number, with its reason; JSON schema holds them as `maximum` and
    `$comment`.
    """

    most: int
    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "le": self.most}

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        return {**handler(schema), "$comment": f"at most {self.most:,}: {self.why}"}


def bounds(annotation: Any, metadata: list[Any] | None = None) -> Iterator[Most]:
    """Every bound in a field's annotation, unions and lists included."""
    yield from (one for one in metadata or () if isinstance(one, Most))
    for part in get_args(annotation):
        if isinstance(part, Most):
            yield part
        else:
            yield from bounds(part)


def hold(field: str, value: float, least: float, bound: Most, unit: str = "") -> None:
    """Raise `PlanError` naming `field`, what is no field of a plan, unless `value` is from `least`
    to its bound.
    """
    if not least <= value <= bound.most:  # NaN is neither
        said = value if isinstance(value, int) else f"{value:g}"
        raise refuse(field, f"is {said}; legal: {unit}{least:g} to {bound.most:,} ({bound.why})")


LAYERS = Most(2_000, "twice the deepest transformer published, DeepNet, 2203.00555")
WIDTH = Most(
    2**20, "ten times the widest layer published; a square matrix of it is 2 TiB in 16 bits"
)
EXPERTS = Most(20_480, "ten times the most experts published, Switch-C's, 2101.03961")
VOCABULARY = Most(2**24, "ten times the largest vocabulary published, XLM-V, 2301.10472")
TOKENS = Most(2**30, "ten times the longest context published")
RANKS = Most(2**20, "a million, which no published training run comes near")
SEQUENCES = Most(2**24, "ten times the largest batch published")
STEPS = Most(10**9, "training on this many steps takes decades at 1 s each")
SEED = Most(2**63 - 1, "what a 64-bit generator takes")
SECONDS = Most(10**7, "115 days")
KEPT = Most(10**6, "more than the steps between two checkpoints of any run")

Layers = Annotated[PositiveInt, LAYERS]
LayerIndex = Annotated[NonNegativeInt, LAYERS]
Width = Annotated[PositiveInt, WIDTH]
Experts = Annotated[PositiveInt, EXPERTS]
Vocabulary = Annotated[PositiveInt, VOCABULARY]
Tokens = Annotated[PositiveInt, TOKENS]
Ranks = Annotated[PositiveInt, RANKS]
Sequences = Annotated[PositiveInt, SEQUENCES]
Steps = Annotated[PositiveInt, STEPS]
StepsOrNever = Annotated[NonNegativeInt, STEPS]
Seed = Annotated[NonNegativeInt, SEED]

COUNT = Most(10**6, "more than any machine or benchmark has of it")
ELEMENTS = Most(2**40, "a tensor beyond it fits no memory that is measured")
Count = Annotated[PositiveInt, COUNT]
InFlight = Annotated[
    PositiveInt, Most(10**4, "more than any published run has stages, or units to gather")
]
Tiles = Annotated[PositiveInt, Most(2**10, "sixty times the most that was published, 2104.07857")]
Elements = Annotated[PositiveInt, ELEMENTS]
"""Rows, columns or bytes of what a calibration measured."""

PositiveFloat = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, ge=1e-12), SECONDS]
LossFactor = Annotated[
    float, Field(gt=0, ge=1e-6), Most(10**6, "a prediction off by more says nothing of the machine")
]
Gibibytes = Annotated[float, Field(gt=0, ge=2**-20), Most(2**20, "1 PiB")]
Mebibytes = Annotated[float, Field(gt=0, ge=2**-20), Most(2**20, "1 TiB")]
RATE = Field(gt=0, ge=1e-6)
"""Of a machine: at a slower one the seconds of a step leave a float's range. 1 kB/s, and 1 MFLOP/s.
"""
GigabytesPerSecond = Annotated[
    float, RATE, Most(10**9, "ten times the fastest on-chip memory published")
]
Teraflops = Annotated[float, RATE, Most(10**7, "ten times the fastest wafer published")]
Microseconds = Annotated[NonNegativeFloat, Most(10**9, "1,000 s")]
Milliseconds = Annotated[NonNegativeFloat, Most(10**6, "1,000 s")]
PositiveMicroseconds = Annotated[PositiveFloat, Most(10**9, "1,000 s")]
UnitShare = Annotated[float, Field(gt=0, ge=1e-6), Most(1, "it is part of a whole")]
Share = Annotated[NonNegativeFloat, Most(10**6, "an error beyond it says nothing of the machine")]
Watts = Annotated[NonNegativeFloat, Most(10**6, "1 MW, ten times the hungriest wafer published")]
PRICE = Most(10**6, "a million USD an hour")
Price = Annotated[NonNegativeFloat, PRICE]
TRAINED = Most(10**18, "ten thousand times the most tokens that any published model was trained on")
SourceWeight = Annotated[NonNegativeFloat, TRAINED]
LearningRate = Annotated[PositiveFloat, Most(10**3, "SGD's largest published rates are below 100")]
Coefficient = Annotated[
    NonNegativeFloat, Most(10**3, "it weighs a term of the loss or of the update")
]
Epsilon = Annotated[PositiveFloat, Most(1, "it is added to keep a division finite")]
Factor = Annotated[
    PositiveFloat, Most(10**6, "it multiplies adapters or log-probabilities, and beyond overflows")
]
Norm = Annotated[PositiveFloat, Most(10**9, "gradients beyond it are no longer finite in 16 bits")]
Frequency = Annotated[PositiveFloat, Most(10**12, "ten times the largest rotary base published")]
ScoreBound = Annotated[PositiveFloat, Most(10**6, "a softmax of larger logits picks one")]
Load = Annotated[NonNegativeFloat, Most(10**6, "more processes than a kernel runs")]
FreeGibibytes = Annotated[NonNegativeFloat, Most(2**20, "1 PiB")]
EvenShares = Annotated[PositiveFloat, RANKS]
