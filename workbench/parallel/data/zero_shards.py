"""A rank's parameters and gradients as data parallelism keeps them: what the optimizer steps, and
how it is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from workbench.parallel.data.bucket_parameters import Draw, Unit, Whole
from workbench.parallel.data.data_collectives import start_sum
from workbench.parallel.data.flat_buckets import Packing, Sums, by_size, by_unit, packed
from workbench.parallel.data.gradient_reduction import Flight, Kept, Passing
from workbench.parallel.data.zero3_gather import StageGatherer, UnitGatherer
from workbench.parallel.data.zero_offload import Host
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh
from workbench.plan.schema import Data


@dataclass
class Bucket:
    """Some parameters' values and gradients side by side, and how many gradients the microbatch
    under way owes.
    """

    values: Whole | Unit
    gradients: Kept | Passing
    owed: int = 0


class Store:
    """All parameters and gradients of a rank, accumulated over microbatches, reduced and shared as
    ZeRO's stage says.

    `values`, `gradients` and `layouts`, by local name, are what the optimizer steps, what it steps
    by, and where that lies: from ZeRO-1 up this rank's pieces of flat buckets (Rajbhandari et al.
    2020, arXiv 1910.02054). Under offload `values` are on the host, and `stepped` are the
    gradients' copies there. Buckets follow the order of backward, and are reduced in that order on
    every rank; with `hooks` as soon as a bucket is complete.
    """

    def __init__(
        self,
        models: Mapping[int, nn.Module],
        layouts: dict[str, Layout],
        sums: Sums,
        mesh: Mesh,
        plan: Data,
        dtype: torch.dtype,
        draw: Draw,
        hooks: bool,
        alone: str | None,
    ) -> None:
        self.plan, self.hooks = plan, hooks
        self.buckets: dict[int, list[Bucket]] = {}
        made: dict[int, nn.Parameter] = {}
        for stage, model in models.items():
            meta = {name: p for name, p in model.named_parameters() if id(p) not in made}
            own = {name: layouts[name] for name in meta}
            self.buckets[stage] = [
                self._bucket(packed(names, own, sums, mesh, plan.zero), dtype, draw)
                for names in self._grouped(own, sums, dtype, alone)
            ]
            for bucket in self.buckets[stage]:
                made |= {id(meta[name]): p for name, p in bucket.values.parameters.items()}
        for model in models.values():
            _install(model, made)
        self._tell(layouts)
        self._watch()
        self._gather_when_needed(models)
        self._flying: list[Flight] = []
        self._last: set[int] = set()
        self._next = dict.fromkeys(self.buckets, 0)

    def _grouped(
        self, own: dict[str, Layout], sums: Sums, dtype: torch.dtype, alone: str | None
    ) -> Iterator[list[str]]:
        if self.plan.zero == 3:
            return by_unit(own, sums, _unit_of, alone)
        limit = self.plan.bucket_mib * 2**20 / dtype.itemsize
        return by_size(own, sums, limit, alone if self.plan.zero else None)

    def _bucket(self, packing: Packing, dtype: torch.dtype, draw: Draw) -> Bucket:
        values = (
            Unit(packing, draw, self.plan.offload == "parameters")
            if self.plan.zero == 3
            else Whole(packing, draw)
        )
        passing = self.plan.zero >= 2 and self.plan.reduce == "microbatch"
        return Bucket(values, (Passing if passing else Kept)(packing, dtype, values.flat.device))

    def _tell(self, layouts: dict[str, Layout]) -> None:
        """Fill in what the optimizer steps, by which gradients, and where that lies."""
        self.values: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.layouts: dict[str, Layout] = {}
        for bucket in self._all():
            packing = bucket.values.packing
            self.values |= packing.own_views(bucket.values.piece)
            self.gradients |= packing.own_views(bucket.gradients.piece)
            self.layouts |= packing.own_layouts(layouts)
        self.stepped = self.gradients
        self.host: Host | None = None
        if self.plan.offload != "none":
            self.host = Host([(bucket.values, bucket.gradients.piece) for bucket in self._all()])
            self.values, self.stepped = self.host.values, self.host.gradients

    def _watch(self) -> None:
        self._places: dict[int, tuple[int, Bucket, str]] = {}
        for stage, own in self.buckets.items():
            for bucket in own:
                for name, parameter in bucket.values.parameters.items():
                    self._places[id(parameter)] = stage, bucket, name
                    view = bucket.gradients.grad(name)
                    by_autograd = view is not None and view.dtype == parameter.dtype
                    parameter.grad = view if by_autograd else None
                    if self.hooks or not by_autograd:
                        parameter.register_post_accumulate_grad_hook(
                            partial(self._arrived, stage, bucket, name)
                        )

    def _gather_when_needed(self, models: Mapping[int, nn.Module]) -> None:
        self._gatherers: dict[int, StageGatherer | UnitGatherer] = {}
        values = [bucket.values for bucket in self._all()]
        units = {
            id(p): unit
            for unit in values
            if isinstance(unit, Unit)
            for p in unit.parameters.values()
        }
        for stage, model in models.items() if units else ():
            self._gatherers[stage] = (
                UnitGatherer(model, units, self.plan.keep_gathered, self.plan.in_flight - 1)
                if self.hooks
                else StageGatherer(model, units)
            )

    def _all(self) -> Iterator[Bucket]:
        return (bucket for own in self.buckets.values() for bucket in own)

    def start(self) -> None:
        """Start a step with gradients of zero."""
        for bucket in self._all():
            bucket.gradients.start()

    def expect_last(self, stage: int) -> None:
        """The next backward of `stage` is its last of the step."""
        self._last.add(stage)
        self._await_gradients(stage)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a microbatch's gradient that autograd does not accumulate: a deferred weight
        gradient.
        """
        stage, bucket, name = self._places[id(parameter)]
        bucket.gradients.add(name, gradient)
        self._count(stage, bucket)

    def reduce(self, stage: int) -> None:
        """A backward of `stage` is over: reduce what is due and wait for it; after its last one,
        free what is whole.
        """
        self._launch(stage, complete=False)
        while self._flying:
            self._advance(self._flying)
        self._await_gradients(stage)
        if stage in self._last:
            self._last.discard(stage)
            self._sum_partial(stage)
            if stage in self._gatherers:
                self._gatherers[stage].free()

    def fetch(self) -> None:
        """Before the optimizer's step: bring the gradients where it is made."""
        if self.host is not None:
            self.host.fetch()

    def publish(self) -> None:
        """After the optimizer's step: give every rank the values that others have stepped."""
        if self.host is not None:
            self.host.push()
        wholes = [bucket.values for bucket in self._all() if isinstance(bucket.values, Whole)]
        for values in wholes:
            values.start_publish()
        for values in wholes:
            values.publish()

    def lasting(self) -> dict[str, list[Tensor]]:
        """What lives on the device from step to step, by category of the memory vocabulary."""
        values = [bucket.values for bucket in self._all()]
        return {
            "parameters": [v.lasting for v in values if not v.on_host],
            "gathered": [v.flat for v in values if isinstance(v, Unit)],
            "gradients": [bucket.gradients.lasting for bucket in self._all()],
        }

    def _arrived(self, stage: int, bucket: Bucket, name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is None:  # a split backward has left it for later
            return
        if parameter.grad is not bucket.gradients.grad(name):
            bucket.gradients.add(name, parameter.grad)
            parameter.grad = None
        self._count(stage, bucket)

    def _count(self, stage: int, bucket: Bucket) -> None:
        if self.hooks and bucket.gradients.due(stage in self._last):
            bucket.owed -= 1
            self._launch(stage, complete=True)

    def _sum_partial(self, stage: int) -> None:
        for bucket in self.buckets[stage]:
            for axis in bucket.gradients.packing.partial:
                if finish := start_sum(bucket.gradients.piece, axis):
                    finish()

    def _await_gradients(self, stage: int) -> None:
        self._next[stage] = 0
        for bucket in self.buckets[stage]:
            bucket.owed = len(bucket.values.parameters)

    def _launch(self, stage: int, complete: bool) -> None:
        """Begin reducing buckets in their order, as far as they are `complete`; otherwise all that
        are left.
        """
        own, last = self.buckets[stage], stage in self._last
        while self._next[stage] < len(own):
            bucket = own[self._next[stage]]
            if complete and bucket.owed:
                return
            self._next[stage] += 1
            if bucket.gradients.due(last):
                self._keep_newest(
                    self.plan.in_flight - 2
                )  # beside it, and the bucket that backward fills next
                self._flying.append(
                    Flight(bucket.gradients.reduction(last), bucket.gradients.chained)
                )
                if self.plan.in_flight == 1:
                    self._keep_newest(0)

    def _keep_newest(self, number: int) -> None:
        """Go on with all reductions that have more to do than one collective, but the newest
        ones.
        """
        chained = [flight for flight in self._flying if flight.chained]
        self._advance(chained[: max(0, len(chained) - max(0, number))])

    def _advance(self, flights: list[Flight]) -> None:
        for flight in flights:
            flight.advance()
        self._flying = [flight for flight in self._flying if not flight.done]


def _unit_of(name: str) -> str:
    """What ZeRO-3 gathers at once: the embedding, a block, or the final norm with the head."""
    first, second, *_ = (*name.split("."), "")
    return {"blocks": second, "embedding": first}.get(first, "head")


def _install(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Put the parameters that were made in the place of those that only described them, ties
    included.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, made[id(parameter)])
