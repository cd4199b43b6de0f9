"""The chosen strategies: how each operator is sharded, what is redistributed, and its estimated
cost.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from workbench.plan.operators.layer_patterns import joined_layers, layer_pattern
from workbench.planner.autoshard.operator_cost import Communication

SOURCE = "estimated"
LEAST_TIME = "least time"
PINNED = "pinned by you"
SHARED = "shares a weight with one pinned by you"
NOTHING = "replicated: nothing reaches it"
"""Reasons why an operator has its strategy; where strategies are propagated there are others."""


@dataclass(frozen=True)
class OperatorRow:
    """One operator on one rank, in one layer."""

    operator: str
    kind: str
    modules: tuple[str, ...]
    strategy: str
    """In MindSpore's form."""
    splits: str
    """The same in words."""
    moves: tuple[Communication, ...]
    compute_seconds: float
    communication_seconds: float
    bytes: float
    """Parameters with their states, and the output kept for backward."""
    times: int
    """Layers that have it."""
    reason: str = LEAST_TIME
    """Why it has this strategy."""

    @property
    def seconds(self) -> float:
        """Compute and communication of one layer."""
        return self.compute_seconds + self.communication_seconds

    @property
    def communicated(self) -> str:
        """What the operator itself communicates, in words."""
        return _moves_text(self.moves)


@dataclass(frozen=True)
class Redistribution:
    """Resharding of a tensor between two operators of unlike layouts, and of its gradient back."""

    source: str
    target: str
    tensor: str
    moves: tuple[Communication, ...]
    times: int

    @property
    def seconds(self) -> float:
        """Of one layer, forward and backward."""
        return sum(move.seconds for move in self.moves)

    @property
    def communicated(self) -> str:
        """What is moved, in words."""
        return _moves_text(self.moves)


@dataclass(frozen=True)
class OperatorPlan:
    """A sharding strategy for each operator; seconds of one microbatch, forward and backward, with
    nothing overlapped.
    """

    rows: tuple[OperatorRow, ...]
    redistributions: tuple[Redistribution, ...]
    ranks: tuple[int, ...]
    """Ranks, or the grid's axes."""
    mode: str
    """How it was searched, by MindSpore's name."""
    solver: str
    seconds: float
    bytes: float
    limit: float | None
    reason: str
    sequences: int = 1
    """Of one microbatch over all ranks."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the plan that have to change so that these strategies fit."""
    peak: float | None = None
    """Peak memory of a rank, bytes, by the estimate of the plan that has them; None: not asked."""
    source: str = SOURCE

    @property
    def fits(self) -> bool:
        """Whether the peak, if it is known, is within the limit."""
        return self.limit is None or self.peak is None or self.peak <= self.limit

    @property
    def forms(self) -> dict[str, str]:
        """Module pattern -> strategy, as a plan's `strategy.operators` holds them."""
        return joined_layers({m: row.strategy for row in self.rows for m in row.modules})

    def joined(self) -> OperatorPlan:
        """The same, with one row for an operator of layers that repeat."""
        rows: dict[Any, list[OperatorRow]] = {}
        for row in self.rows:
            key = replace(row, operator=layer_pattern(row.operator), modules=(), reason="")
            rows.setdefault(key, []).append(row)
        between: dict[Any, list[Redistribution]] = {}
        for each in self.redistributions:
            ends = {"source": layer_pattern(each.source), "target": layer_pattern(each.target)}
            between.setdefault(replace(each, **ends), []).append(each)  # type: ignore[arg-type]
        return replace(
            self,
            rows=tuple(_joined_row(key, found) for key, found in rows.items()),
            redistributions=tuple(
                replace(found[0] if len(found) == 1 else key, times=sum(r.times for r in found))
                for key, found in between.items()
            ),
        )

    def count(self, kind: str, when: str) -> int:
        """Collectives of a kind, forward or backward, of every operator and redistribution in one
        layer each.
        """
        moves = [move for row in self.rows for move in row.moves]
        moves += [move for between in self.redistributions for move in between.moves]
        return sum(move.kind == kind and move.when == when for move in moves)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = asdict(self) | {"operators": self.forms}
        listed: dict[str, tuple[OperatorRow | Redistribution, ...]] = {
            "rows": self.rows,
            "redistributions": self.redistributions,
        }
        for shown, items in listed.items():
            data[shown] = [
                asdict(item) | {"seconds": item.seconds, "communicated": item.communicated}
                for item in items
            ]
        return data


def _joined_row(key: OperatorRow, found: list[OperatorRow]) -> OperatorRow:
    """Rows of one operator of several layers as one."""
    if len(found) == 1:
        return found[0]
    reasons = dict.fromkeys(layer_pattern(row.reason) for row in found)
    return replace(
        key,
        modules=tuple(module for row in found for module in row.modules),
        times=sum(row.times for row in found),
        reason="; ".join(reasons),
    )


def _moves_text(moves: tuple[Communication, ...]) -> str:
    parts = []
    for move in moves:
        what = f"gradient of {move.tensor}" if move.when == "backward" else move.tensor
        parts.append(f"{move.when} {move.kind.replace('_', '-')} of {what}")
    return "; ".join(parts) or "nothing"
