"""Origin, by rank, of a loss or gradient norm that is not finite.

A step's all-reduce spreads it to every rank. Once all of them have seen it, each says what of its
own part is not finite: parameters, its loss before the all-reduce, its gradients. No step whose
loss and norm are finite makes this all-gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from workbench.engine.process_group.rendezvous import all_gather_json
from workbench.engine.session import Session
from workbench.parallel.tensor.apply_tensor import counts_own_loss


class NotFiniteError(FloatingPointError):
    """A loss or gradient norm is not finite, and training cannot continue.

    Args:
        message: What is not finite, and where.
        blamed: The rank whose part alone is not finite; None where none is alone.
    """

    def __init__(self, message: str, blamed: int | None) -> None:
        super().__init__(message)
        self.blamed = blamed


@dataclass(frozen=True)
class OwnPart:
    """A rank's own part of a step, by what of it is finite."""

    replica: int
    """Index on the data axis: the ranks of one replica compute one loss."""
    parameter: str | None
    """The first that is not finite."""
    loss: bool | None
    """True where its loss is finite; None where it counts none."""
    gradient: str | None
    """The first that is not finite, after its reduction."""


def own_part(session: Session, loss: float) -> OwnPart:
    """This rank's part of a step that has not changed its parameters yet.

    Args:
        session: The rank's.
        loss: Its own, before the all-reduce.
    """
    store = session.part.store
    modules = session.part.stages.values()
    held = {name: p.detach() for model in modules for name, p in model.named_parameters()}
    counts = session.executor.state.loss is not None and counts_own_loss(session.mesh)
    return OwnPart(
        session.mesh["data"].index,
        _first_not_finite({**held, **store.frozen_values, **store.values}),
        bool(torch.isfinite(torch.tensor(loss))) if counts else None,
        _first_not_finite(store.gradients),
    )


def gather_parts(session: Session, loss: float) -> list[OwnPart]:
    """Every rank's `own_part`, in order of rank; called by all together."""
    own = own_part(session, loss)
    if session.mesh.world_size == 1:
        return [own]
    return [OwnPart(**each) for each in all_gather_json(asdict(own), session.device)]


def origin(parts: Sequence[OwnPart]) -> tuple[list[int], str]:
    """The ranks that are not finite alone, none where all are, and what of theirs is, in words."""
    named = {rank: part.parameter for rank, part in enumerate(parts) if part.parameter}
    if 0 < len(named) < len(parts):
        return _alone(named, len(parts), "parameter", "the parameters of the other ranks are")
    counted = {part.replica for part in parts if part.loss is not None}
    lost = {part.replica for part in parts if part.loss is False}
    if lost and lost != counted:
        held = [rank for rank, part in enumerate(parts) if part.replica in lost]
        return held, f"the loss of the sequences of {_ranks(held)} alone is not finite"
    if named:
        return _alone(named, len(parts), "parameter", "")
    if lost:
        return [], "no rank's own loss is finite, and all parameters are"
    named = {rank: part.gradient for rank, part in enumerate(parts) if part.gradient}
    return _alone(named, len(parts), "gradient", "all parameters and losses are")


def _alone(named: Mapping[int, str], world: int, kind: str, rest: str) -> tuple[list[int], str]:
    """Ranks of which a tensor of a `kind` is not finite, unless all are."""
    first = min(named, default=None)
    if first is None:
        return [], "every rank's own part is finite"
    if len(named) < world:
        return list(
            named
        ), f"{kind} {named[first]} of {_ranks(list(named))} alone is not finite; {rest}"
    everywhere = "" if world == 1 else " on every rank"
    return [], f"{kind} {named[first]} is not finite{everywhere}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with a NaN or an infinity; freed storage (ZeRO-3) has neither."""
    for name, x in tensors.items():
        held = x.is_floating_point() and x.untyped_storage().nbytes()
        if held and not torch.isfinite(x.float() if x.element_size() == 1 else x).all():
            return name
    return None
