"""Operators of a traced graph on local shards: sizes in arguments are local, sums are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.models.counter_dropout import SampleIndices
from workbench.models.seams import IGNORE_INDEX, at_least_fp32
from workbench.parallel.operators.factor_redistribution import FactorGrid
from workbench.parallel.operators.sharded_dropout import ElementIds, attention_with_dropout, dropout
from workbench.parallel.tensor.vocab_parallel import embedding_lookup, vocab_parallel_cross_entropy
from workbench.plan.operators.traced.factors import Factor
from workbench.plan.operators.traced.graph_placement import NodeShards
from workbench.plan.operators.traced.node_factors import NodeFactors, TensorFactors
from workbench.plan.operators.traced.traced_graph import DEVICE, TensorRef, TracedNode


@dataclass(frozen=True)
class LocalCall:
    """One operator, and where it runs.

    Attributes:
        node: The operator.
        shards: How it is sharded.
        own: Its factors.
        read: Factors of each tensor input.
        written: Factors of each result.
        grid: The ranks.
        device: Where it runs.
        samples: Which samples this forward sees.
        seed: Of dropout.
        batch: The factor that counts sequences.
        reduce: Sums its first result over some axes; default: those over which it is partial.
    """

    node: TracedNode
    shards: NodeShards
    own: NodeFactors
    read: Sequence[TensorFactors]
    written: Sequence[TensorFactors]
    grid: FactorGrid
    device: torch.device
    samples: SampleIndices
    seed: int
    batch: Factor | None
    reduce: Callable[..., Tensor]

    def output_shape(self, index: int = 0) -> list[int]:
        """Local shape of a result."""
        return self.grid.local_shape(self.written[index], self.shards.outputs[index])

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        args = self.node.args
        return args[index] if index < len(args) else self.node.kwargs.get(name, default)

    def ids(self, factors: TensorFactors, layout: tuple[int | None, ...]) -> ElementIds:
        """Global indices of the elements of a local tensor."""
        return ElementIds(factors, layout, self.grid, self.batch, self.samples, self.device)


Local = Callable[[LocalCall, list[Tensor]], Tensor]


def run_locally(call: LocalCall, inputs: list[Tensor]) -> list[Tensor]:
    """Results of an operator on local inputs, summed over the ranks where they are partial."""
    if call.node.op in SPLITS:
        return _split(call, inputs)
    special = SPECIAL.get(call.node.op)
    if special is not None:
        return [special(call, inputs)]
    results = _aten(call, inputs)
    if call.shards.partial:
        return [call.reduce(result) for result in results]
    return results


def _aten(call: LocalCall, inputs: list[Tensor]) -> list[Tensor]:
    """The operator of torch itself."""
    rest = iter(inputs)
    args = [_argument(value, rest, call.device) for value in call.node.args]
    named = {
        name: _argument(value, rest, call.device)
        for name, value in call.node.kwargs.items()
        if name != "pin_memory"
    }
    operator = getattr(getattr(torch.ops.aten, call.node.op), call.node.overload)
    results = operator(*args, **named)
    return list(results) if isinstance(results, tuple | list) else [results]


def _argument(value: Any, tensors: Any, device: torch.device) -> Any:
    if isinstance(value, TensorRef):
        return next(tensors)
    if isinstance(value, tuple):
        return [_argument(each, tensors, device) for each in value]
    if value == DEVICE and isinstance(value, str):
        return device
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def _linear(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    if not call.shards.partial or len(inputs) < 3:
        return call.reduce(_aten(call, inputs)[0])
    x, weight, bias = inputs
    return call.reduce(F.linear(x, weight)) + bias


def _addmm(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    bias, x, weight = inputs
    if not call.shards.partial:
        return torch.addmm(bias, x, weight)
    return call.reduce(x @ weight) + bias


def _conv1d(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    """A rank's groups are those of its channels."""
    x, weight = inputs[:2]
    bias = inputs[2] if len(inputs) > 2 else None
    stride, dilation = call.argument(3, "stride", 1), call.argument(5, "dilation", 1)
    groups = x.shape[-2] // weight.shape[1]
    return F.conv1d(x, weight, bias, stride, call.argument(4, "padding", 0), dilation, groups)


def _embedding(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    table, tokens = inputs
    if not call.shards.partial:
        return _aten(call, inputs)[0]
    start = call.grid.first(call.shards.inputs[0], 0, len(table))
    return call.reduce(embedding_lookup(tokens, table, (start, start + len(table))))


def _reshape(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    return inputs[0].reshape(call.output_shape())


def _expand(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    return inputs[0].expand(call.output_shape())


def _slice(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    """Where the part that is taken is itself sharded, it starts at a fraction of its start."""
    (x,), shape = inputs, call.node.outputs[0].shape
    dim = call.argument(1, "dim", 0) % x.ndim
    local, whole = call.output_shape()[dim], shape[dim]
    if local == whole:
        return _aten(call, inputs)[0]
    return x.narrow(dim, (call.argument(2, "start", 0) or 0) // whole * local, local)


def _split(call: LocalCall, inputs: list[Tensor]) -> list[Tensor]:
    (x,), count = inputs, len(call.node.outputs)
    dim = call.argument(2, "dim", 0) % x.ndim
    return list(x.split([call.output_shape(i)[dim] for i in range(count)], dim))


def _loss(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    """Summed cross entropy, of logits sharded by rows or vocabulary."""
    logits_NV, targets_N = inputs[0].flatten(0, -2), inputs[1].flatten()
    sharded = [axis for axis, local in enumerate(call.shards.placement) if local == VOCABULARY]
    if not sharded:
        total = F.cross_entropy(
            at_least_fp32(logits_NV), targets_N, reduction="sum", ignore_index=IGNORE_INDEX
        )
        return call.reduce(total)
    axis = call.grid.joint(sharded)
    rows = axis.index * logits_NV.shape[1], (axis.index + 1) * logits_NV.shape[1]
    # The loss overwrites its input, which an operator before it may have saved for backward.
    total = vocab_parallel_cross_entropy(logits_NV.clone(), targets_N, rows, axis)
    return call.reduce(total, call.shards.partial - set(sharded))


def _dropout(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    rate, train = call.node.args[1], call.argument(2, "train", True)
    if not rate or not train:
        return inputs[0]
    ids = call.ids(call.written[0], call.shards.outputs[0])
    return dropout(inputs[0], ids, rate, call.node.name, call.seed)


def _leading(names: Sequence[Any], last: int) -> Sequence[Any]:
    return names[: len(names) - last]


def _keys(names: Sequence[Any], last: int) -> Sequence[Any]:
    return [name for name in _leading(names, last) if name[0] == "key"]


def _attention(call: LocalCall, inputs: list[Tensor]) -> Tensor:
    rate = call.argument(4, "dropout_p", 0.0)
    if not rate:
        return _aten(call, inputs)[0]
    query, key = call.read[0].dims, call.read[1].dims
    depth, key_depth = len(query[3]), len(key[3])
    names = [*_leading(call.own.inputs[0], depth), *_keys(call.own.inputs[1], key_depth)]
    graph = tuple(call.own.factors[name] for name in names)
    layout = tuple(
        names.index(local) if local in names else None for local in call.shards.placement
    )
    ids = call.ids(TensorFactors((*query[:3], key[2]), graph), layout)
    return attention_with_dropout(
        inputs,
        ids,
        rate,
        call.argument(5, "is_causal", False),
        call.argument(6, "scale"),
        call.node.name,
        call.seed,
    )


VOCABULARY = ("vocabulary", 0)
SPLITS = ("split", "split_with_sizes", "chunk")
SPECIAL: dict[str, Local] = {
    "linear": _linear,
    "addmm": _addmm,
    "conv1d": _conv1d,
    "embedding": _embedding,
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"),
        _reshape,
    ),
    "expand": _expand,
    "slice": _slice,
    "head_loss": _loss,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
}
"""Operators that shards change: sizes in their arguments, sums within them, random numbers."""
