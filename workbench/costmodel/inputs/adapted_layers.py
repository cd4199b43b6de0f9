"""Low-rank adapters (LoRA, 2106.09685) of a rank's layers: which linears have them, their sizes on
the rank, and the bytes of weights that are frozen in 4 bits (QLoRA, 2305.14314).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from workbench.costmodel.inputs.config import Array, FixedConfig, Number, stages_that_run
from workbench.costmodel.inputs.rank_shapes import RankShapes
from workbench.plan.model.block_linears import ATTENTION, block_linears
from workbench.plan.model.model_shape import Mla
from workbench.runtime_facts.four_bit_sizes import SCALE_BYTES, FourBitFormat

ONTO_LATENTS = ("q_down", "kv_down")
"""Those that every tensor rank has in full; all others are sharded by outputs."""
Ranks = TypeVar("Ranks", bound=RankShapes)
EXPERTS, SHARED = "mlp.experts.", "mlp.shared."


class AdaptedLayer(NamedTuple):
    """A kind of layer, beside whose frozen weights adapters train."""

    is_moe: bool
    adapted: tuple[str, ...]
    """Names in the block of the linears that have an adapter, in its order."""
    has_input_gradient: bool
    """Whether its input has a gradient: in a first stage only behind the first adapter."""

    @property
    def has_backward(self) -> bool:
        """Whether anything of it has a gradient."""
        return self.has_input_gradient or bool(self.adapted)

    @property
    def has_attention_backward(self) -> bool:
        """Whether attention itself, in front of its output projection, has a backward."""
        return self.has_input_gradient or any(n != "attention.o" for n in self.of(ATTENTION))

    @property
    def has_branch_gradient(self) -> bool:
        """Whether what the feed-forward layer reads has a gradient."""
        return self.has_input_gradient or bool(self.of(ATTENTION))

    def of(self, *starts: str) -> list[str]:
        """Adapted linears whose names start so."""
        return [name for name in self.adapted if name.startswith(starts)]

    def last(self, *names: str) -> list[str]:
        """Adapted linears whose last names are these."""
        return [name for name in self.adapted if name.rpartition(".")[2] in names]


class LinearWidths(NamedTuple):
    """A linear layer on a rank."""

    inputs: Number
    outputs: Number
    experts: Number
    """How many there are: a rank's experts of an MoE layer, else 1."""

    def adapter(self, rank: int) -> Number:
        """Parameters of its adapters."""
        return self.experts * rank * (self.inputs + self.outputs)


def adapted_layer(s: FixedConfig, layer: int) -> AdaptedLayer:
    """The kind of a layer of the model, given its index."""
    moe, first_stage = s.shape.moe, stages_that_run(s.pipeline, s.partition)[0]
    own = s.adapted[layer] if layer < len(s.adapted) else ()
    behind = layer >= first_stage or any(s.adapted[: min(layer, first_stage)])
    return AdaptedLayer(moe is not None and layer >= moe.first_dense, own, behind)


def kinds_of_layers(s: FixedConfig) -> list[AdaptedLayer]:
    """All kinds of a model's layers, whichever pipeline stage they are in; with those of a
    preference's reference, whose adapters are off.
    """
    own = [adapted_layer(s, i) for i in range(s.shape.layers)]
    if s.reference_pass:
        own += [AdaptedLayer(kind.is_moe, (), False) for kind in own]
    return list(dict.fromkeys([*own, *(kind._replace(has_input_gradient=True) for kind in own)]))


def with_adapters_off(w: Ranks) -> Ranks:
    """`w` as a preference's reference runs it: frozen weights alone, in evaluation mode."""
    return replace(w, fixed=replace(w.fixed, adapted=(), dropout=False))


def adapted_layers(w: RankShapes) -> list[tuple[AdaptedLayer, Array]]:
    """The kinds of layers with how many of them each of `w.places` has."""
    by_place = [Counter(adapted_layer(w.fixed, i) for i in own) for own in w.layer_indices]
    kinds = dict.fromkeys(kind for own in by_place for kind in own)
    shape = w.layers.shape
    return [
        (kind, np.array([float(own[kind]) for own in by_place]).reshape(shape)) for kind in kinds
    ]


def last_layers(w: RankShapes) -> list[tuple[AdaptedLayer, Array]]:
    """The kinds of layers with whether the last layer of each of `w.places` is one."""
    last = [adapted_layer(w.fixed, own[-1]) if own else None for own in w.layer_indices]
    shape = w.layers.shape
    return [
        (kind, np.array([each == kind for each in last]).reshape(shape))
        for kind in dict.fromkeys(each for each in last if each is not None)
    ]


def adapter_counts(w: RankShapes) -> tuple[Array, Array]:
    """Parameters of adapters on each of `w.places`: (all but experts', experts')."""
    rank, totals = w.fixed.adapter_rank, [w.zeros, w.zeros]
    for kind, count in adapted_layers(w) if rank else ():
        for name in kind.adapted:
            experts = name.startswith(EXPERTS)
            totals[experts] = totals[experts] + count * linear_widths(w, name).adapter(rank)
    return totals[0], totals[1]


def layer_adapter_counts(w: RankShapes) -> Number:
    """Parameters of the adapters of the layer of a rank that has most."""
    most: Number = w.zeros
    for kind, count in adapted_layers(w) if w.fixed.adapter_rank else ():
        own = sum(linear_widths(w, n).adapter(w.fixed.adapter_rank) for n in kind.adapted)
        most = np.maximum(most, own * (count > 0))
    return most


def linear_widths(w: RankShapes, name: str) -> LinearWidths:
    """Widths on a rank of the linear `name` of a block, one that 1-D tensor parallelism shards."""
    part, _, last = name.rpartition(".")
    h = w.hidden_per_rank
    if part == "attention":
        inputs, outputs = _attention_widths(w, last)
        return LinearWidths(inputs, outputs, 1.0)
    wide: Number = w.ffn
    experts: Number = 1.0
    if name.startswith(EXPERTS):
        assert w.shape.moe is not None
        wide, experts = w.expert_ffn, w.shape.moe.experts / w.searched.expert
    elif name.startswith(SHARED):
        wide = w.shared_ffn
    return LinearWidths(wide, h, experts) if last == "down" else LinearWidths(h, wide, experts)


def _attention_widths(w: RankShapes, name: str) -> tuple[Number, Number]:
    h, mla = w.hidden_per_rank, w.shape.mla
    if name == "o":
        return w.o_width, h
    if mla is None:
        return h, {"q": w.q_width, "k": w.k_width, "v": w.v_width}[name]
    return _latent_widths(w, mla)[name]


def _latent_widths(w: RankShapes, mla: Mla) -> dict[str, tuple[Number, Number]]:
    h, q_rank = w.hidden_per_rank, mla.q_rank or 0
    return {
        "q_down": (h, q_rank),
        "q": (q_rank or h, w.q_width),
        "kv_down": (h, mla.kv_rank + mla.rope_dim),
        "kv_up": (mla.kv_rank, w.heads * (mla.nope_dim + mla.value_dim)),
    }


def linear_names(w: RankShapes, is_moe: bool) -> list[str]:
    """Names in a block of the linears of a layer, dense or MoE."""
    return list(block_linears(w.shape, w.shape.layers - 1 if is_moe else 0))


def part_bytes(w: RankShapes, form: FourBitFormat, name: str) -> Iterator[Number]:
    """Bytes on a rank of each part of a linear's weight: numbers, scales, and factors of rows."""
    columns, rows, experts = linear_widths(w, name)
    yield experts * rows * columns / 2
    yield experts * rows * columns / form.group * (1 if form.double else SCALE_BYTES)
    if form.double:
        yield experts * rows * form.row_factor_bytes


def packed_difference(w: RankShapes, is_moe: bool) -> tuple[Number, Number]:
    """Elements of the parameters' dtype that a layer takes more than if its weights were not in 4
    bits, which is less than 0: of (all but experts, experts).
    """
    found: list[Number] = [0.0, 0.0]
    form = w.fixed.four_bit
    for name in linear_names(w, is_moe) if form else ():
        assert form is not None
        columns, rows, experts = linear_widths(w, name)
        stored: Number = sum(part_bytes(w, form, name), start=0.0)
        place = name.startswith(EXPERTS)
        found[place] = found[place] + stored / w.element_bytes - experts * rows * columns
    return found[0], found[1]


def dequantized_bytes(w: RankShapes, is_moe: bool) -> Number:
    """Bytes of the largest weight of a layer while it is dequantized for a GEMM, all local experts'
    at once; 0 where none is in 4 bits.
    """
    most: Number = 0.0
    for name in linear_names(w, is_moe) if w.fixed.four_bit else ():
        columns, rows, experts = linear_widths(w, name)
        most = np.maximum(most, experts * rows * columns * w.element_bytes)
    return most
