"""An MoE layer on shapes (`models/moe.py`, `parallel/operators/moe_operator.py`): router, dispatch,
experts, combine and shared experts, on as many rows for every expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from workbench.costmodel.operators.layers.symbolic_routing import Routed, Routing, routed
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_checkpoint import checkpointed
from workbench.costmodel.operators.symbolic_functions import activate, add, linear
from workbench.costmodel.operators.symbolic_modules import SymbolicStrategies
from workbench.costmodel.operators.symbolic_rank import AxisCall, SymbolicRank

Parameters = Mapping[str, SymbolicTensor]
"""Local name within the layer -> parameter."""


@dataclass(frozen=True)
class SymbolicMoe:
    """An MoE layer of a stage."""

    s: SymbolicStrategies
    path: str
    parameters: Parameters
    is_recomputed: bool

    @property
    def last_saving(self) -> str:
        """Its last operator that saves a tensor."""
        last = "shared.down" if "shared.down.weight" in self.parameters else "combine"
        return f"{self.path}.{last}"

    def forward(self, x: SymbolicTensor) -> tuple[SymbolicTensor, SymbolicTensor | None]:
        """(branch, aux loss of all sequences); what is recomputed of it communicates over the
        experts' ranks alone.
        """
        sharding = self.s.of(self.path) or self.s.replicate(self.path)
        local = sharding.to_local(x, rows=0)
        if self.is_recomputed:
            made = checkpointed(self.s.r, self._on_shard, self.last_saving, local)
        else:
            made = self._on_shard(local)
        branch, *aux_loss = made
        branch = sharding.to_global(sharding.reduce_partial(branch, rows=0), rows=0)
        if not aux_loss:
            return branch, None
        return branch, sharding.only("rows").reduce_partial(aux_loss[0])

    def _on_shard(self, x: SymbolicTensor) -> tuple[SymbolicTensor, ...]:
        r = self.s.r
        routing = routed(r, x, self.parameters["route.weight"])
        width = self.parameters["experts.up.weight"].shape[1]
        r.compute("routing", x.shape[0] * x.shape[1], width)
        dispatched = _dispatch(r, x, routing.rows)
        y = _combine(r, self._on_expert_ranks(dispatched, routing), routing, x)
        r.saved_by(f"{self.path}.combine")
        if "shared.down.weight" in self.parameters:
            y = add(r, y, self._shared(x))
        return (y,) if routing.aux_loss is None else (y, routing.aux_loss)

    def _on_expert_ranks(self, x: SymbolicTensor, routing: Routing) -> SymbolicTensor:
        """The experts on rows of all ranks that they are spread over."""
        r = self.s.r
        if int(r.w.searched.expert) == 1:
            return self._experts(x)
        received = _exchanged(r, x)
        received = self._sorted(received)
        y = self._experts(received)
        y = self._sorted(y)
        return _exchanged(r, y)

    def _sorted(self, x: SymbolicTensor) -> SymbolicTensor:
        """Rows by source rank in the order of experts, or back; of one expert they are."""
        r = self.s.r
        if self.parameters["experts.up.weight"].shape[0] == 1:
            return x

        def backward(gradient: SymbolicTensor) -> Gradients:
            return (r.like(gradient),)

        return r.made(r.like(x), backward, x)

    def _experts(self, x: SymbolicTensor) -> SymbolicTensor:
        up, r = self._grouped("up", x), self.s.r
        is_gated = "experts.gate.weight" in self.parameters
        activated = activate(r, self._grouped("gate", x), up) if is_gated else activate(r, up)
        del up
        return self._grouped("down", activated)

    def _grouped(self, name: str, x: SymbolicTensor) -> SymbolicTensor:
        """One GEMM for each expert."""
        r, weight = self.s.r, self.parameters[f"experts.{name}.weight"]
        bias = self.parameters.get(f"experts.{name}.bias")
        local, columns, inner = weight.shape
        r.compute("experts", x.shape[0] / local, columns, inner, local)
        y = r.empty((x.shape[0], columns))

        def backward(gradient: SymbolicTensor) -> Gradients:
            made = r.like(x), r.like(weight)
            return *made, None if bias is None else r.like(bias)

        return r.made(y, backward, x, weight, bias)

    def _shared(self, x: SymbolicTensor) -> SymbolicTensor:
        """The shared experts, whose partial sums are the routed ones'."""
        r = self.s.r
        project = partial(self._project, x)
        up = project("up")
        is_gated = "shared.gate.weight" in self.parameters
        activated = activate(r, project("gate"), up) if is_gated else activate(r, up)
        del up
        return self._project(activated, "down")

    def _project(self, x: SymbolicTensor, name: str) -> SymbolicTensor:
        weight = self.parameters[f"shared.{name}.weight"]
        bias = self.parameters.get(f"shared.{name}.bias")
        return linear(self.s.r, f"{self.path}.shared.{name}", x, weight, bias)


def _dispatch(r: SymbolicRank, x: SymbolicTensor, rows: Routed) -> SymbolicTensor:
    """Copies of tokens in the order of experts."""
    y = r.empty((rows.count, x.shape[-1]))
    of_choices, kept, top_k = rows.of_choices, rows.kept, r.w.shape.moe.top_k  # type: ignore[union-attr]

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert of_choices is not None and (kept is None or kept.storage)
        total = r.like(x)
        own = r.like(x) if top_k > 1 else None
        del own
        return (total,)

    return r.made(y, backward, x)


def _combine(
    r: SymbolicRank, y: SymbolicTensor, routing: Routing, x: SymbolicTensor
) -> SymbolicTensor:
    """The experts' outputs of each token, weighted by its gates."""
    gates, of_choices = routing.gates, routing.rows.of_choices
    total = replace(r.like(x), node=None, layout=None)
    own = r.like(x) if gates.shape[-1] > 1 else None
    del own
    shape = x

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert of_choices is not None
        to_rows, to_gates = r.like(y), r.like(gates)
        picked, product = r.like(shape), r.like(shape)
        del picked, product
        return to_rows, to_gates

    return r.made(total, backward, y, gates)


def _exchanged(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """Rows to the ranks of their experts, or back."""

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (_all_to_all(r, gradient),)

    return r.made(_all_to_all(r, x), backward, x)


def _all_to_all(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    ranks = float(r.w.searched.expert)
    r.call_axis(AxisCall("expert", "", "all_to_all", ranks, r.w.dtype, x.bytes, r.action))
    return r.like(x)
