"""How many kernels a layer launches, and what the host takes to launch them."""

from __future__ import annotations

import numpy as np

from workbench.costmodel.compute.engine_traffic.engine_kernels import (
    adapter_gemm_kernels,
    frozen_layer_kernels,
    layer_kernels,
)
from workbench.costmodel.compute.engine_traffic.engine_operators import counts_operators
from workbench.costmodel.compute.frozen_gemms import frozen_gemms
from workbench.costmodel.compute.frozen_layers import adapter_bytes
from workbench.costmodel.compute.kernel_rates import DeviceRates
from workbench.costmodel.inputs.adapted_layers import AdaptedLayer
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import keeps_small_seams_eager, runs_fused_seam
from workbench.runtime_facts.fused_thresholds import ATEN_SEAMS

KERNELS_PER_LAYER = {"eager": (36, 70), "compiled": (14, 26), "fused": (20, 40), "liger": (20, 40)}
"""Kernels of one layer (forward, backward) by the plan's `kernels`: of this engine's eager
modules, and textbook counts.
"""
FUSED_KERNELS_PER_LAYER = 12, 22
"""The same with fused or compiled seams: GEMMs, attention and one kernel per seam."""
LATENT_KERNELS = 23, 34
"""Kernels (forward, backward) that MLA adds to a layer, counted over Megatron-core's
transformer/multi_latent_attention.py with rotary positions of its own operators: the keys' and
values' down- and up-projection and the norm between, queries' and keys' positions apart (nine
operators each, rope_utils.py), and three copies that join the parts of a head.
"""
HEAD_NORM_KERNELS = 2, 4
"""Kernels (forward, backward) of the norms of queries' and of keys' heads, each one kernel, in
backward one more for its weight.
"""
ROUTING_KERNELS = 24, 30
"""Kernels (forward, backward) of a router, of dispatch and combine, beside those of experts."""
HOST_DISPATCH_KERNELS = 130, 180
"""The same of Megatron-core's all-to-all dispatcher, which sorts tokens by operators of its own and
copies counts to the host (recalled).
"""
EXPERT_BIAS_KERNELS = 2, 4
"""Kernels (forward, backward) that add an expert's bias to its output by operators of their own, as
counted in `memory_bound.EXPERT_BIAS_BYTES`.
"""
GRAPHED_SHARES = {"attn": 6 / 11, "mlp": 5 / 11}
"""Part of a dense layer -> share of its kernels: norm, projection in, positions, attention,
projection out and residual; norm, gate and up, activation, down and residual.
"""
GRAPHED_ROUTING = {"moe_router": (8, 12), "moe_preprocess": (6, 6)}
"""Part of routing -> its kernels (forward, backward) among `ROUTING_KERNELS`: scores, choice and
auxiliary loss; counts and the order of tokens.
"""
CPP_CALL_SHARE = 0.25
"""Host time of a kernel that a loop in C++ launches, over one launched from Python."""


def kernel_launches(
    w: Workload, is_moe: bool, frozen: AdaptedLayer | None = None
) -> tuple[Number, Number]:
    """Kernels of one layer (forward, backward), counting seams that run fused and those left
    eager.

    Args:
        w: Per-rank problem sizes.
        is_moe: Whether the feed-forward is an MoE.
        frozen: Its kind where its weights are frozen beside adapters.
    """
    if counts_operators(w):
        return layer_kernels(w, is_moe) if frozen is None else frozen_layer_kernels(w, frozen)
    textbook = _textbook_launches(w, is_moe)
    if frozen is None:
        return textbook
    gemms = frozen_gemms(w, frozen)
    beside, thin = adapter_bytes(w, frozen, 0.0), adapter_gemm_kernels(gemms)
    own = textbook[1] - sum(2 - gemm.has_input_gradient for gemm in gemms)
    return (
        textbook[0] + beside.forward_kernels + thin[0],
        frozen.has_backward * own + beside.backward_kernels + thin[1],
    )


def _textbook_launches(w: Workload, is_moe: bool) -> tuple[Number, Number]:
    """The same of a layer without adapters, of a framework whose operators are not counted."""
    routed = routing_launches(w) if is_moe and w.shape.moe else (0.0, 0.0)
    further = (routed, _latent_launches(w), HEAD_NORM_KERNELS if w.shape.qk_norm else (0, 0))
    more = sum(each[0] for each in further), sum(each[1] for each in further)
    if not w.uses_fused_kernels:
        plain = KERNELS_PER_LAYER[w.fixed.kernels]
        return plain[0] + more[0], plain[1] + more[1]
    norm, rope, activation = fused_seam_shares(w, is_moe)
    seams = [norm, activation, *([rope] if w.shape.positions == "rope" else [])]
    share = sum(seams) / len(seams)
    each = [
        eager + (fused - eager) * share + added
        for fused, eager, added in zip(FUSED_KERNELS_PER_LAYER, KERNELS_PER_LAYER["eager"], more)
    ]
    return each[0], each[1]


def _latent_launches(w: Workload) -> tuple[int, int]:
    """Kernels (forward, backward) that MLA adds to a layer."""
    return LATENT_KERNELS if w.shape.mla else (0, 0)


def routing_launches(w: Workload) -> tuple[Number, Number]:
    """Kernels (forward, backward) that an MoE adds to a layer: router, dispatch and combine, and
    the GEMMs of each local expert where they are calls of their own, in a loop of C++.
    """
    moe, b = w.shape.moe, w.fixed.framework.experts
    if moe is None:
        return 0.0, 0.0
    counts = b.dispatches_from_host and moe.capacity is None
    router = HOST_DISPATCH_KERNELS if counts else ROUTING_KERNELS
    local = moe.experts / w.searched.expert
    calls, biased = (1 - b.grouped_gemm) * local * CPP_CALL_SHARE, adds_expert_biases(w, True)
    forward, backward = (kernels * local * biased for kernels in EXPERT_BIAS_KERNELS)
    return router[0] + 2 * calls + forward, router[1] + 4 * calls + backward


def adds_expert_biases(w: Workload, is_moe: bool) -> bool:
    """Whether operators of their own add biases to the outputs of a layer's experts."""
    biased = is_moe and w.shape.moe is not None and w.shape.biases == "all"
    return biased and w.fixed.framework.experts.adds_biases


def fused_seam_shares(w: Workload, is_moe: bool) -> tuple[Number, Number, Number]:
    """1 or 0 for norms, rotary positions and the activation: whether each runs fused
    (`kernels/fused_seams.py`).
    """
    wide = (
        w.routed_rows_per_token * w.expert_ffn + w.shared_ffn if is_moe and w.shape.moe else w.ffn
    )
    sizes = w.hidden_per_rank / w.sequence_parallel, w.q_width, wide
    kinds = w.shape.norm, "rope", w.shape.mlp
    allowed = [1.0 - (keeps_small_seams_eager(w) and kind in ATEN_SEAMS) for kind in kinds]
    norm, rope, activation = (
        fused * runs_fused_seam(w, w.tokens * size) for fused, size in zip(allowed, sizes)
    )
    return norm, rope, activation


def replayed_kernels(
    w: Workload, is_moe: bool, launches: tuple[Number, Number]
) -> tuple[Number, Number]:
    """Kernels of one layer (forward, backward) that a replayed CUDA graph launches, of all that
    `kernel_launches` counts.
    """
    graphs = w.fixed.framework.kernels.graphs.split()
    if graphs == ["none"]:
        return 0.0, 0.0
    if "full_iteration" in graphs:
        return launches
    sparse = is_moe and w.shape.moe is not None
    routed, latent = routing_launches(w) if sparse else (0.0, 0.0), _latent_launches(w)
    attention = float("attn" in graphs)
    # A graph's shapes are fixed, and experts' rows are not: their part of a layer stays outside.
    parts = [name for name in graphs if name in GRAPHED_SHARES and not (sparse and name == "mlp")]
    share = sum(GRAPHED_SHARES[name] for name in parts)
    router = [GRAPHED_ROUTING[name] for name in graphs if name in GRAPHED_ROUTING] if sparse else []
    forward, backward = (
        share * (launched - apart - own) + attention * own + sum(kernels[at] for kernels in router)
        for at, (launched, apart, own) in enumerate(zip(launches, routed, latent))
    )
    return forward, backward


def with_launch_floor(
    m: DeviceRates, seconds: Number, kernels: Number, replayed: Number = 0.0
) -> Number:
    """Seconds with launches: the slower of host and GPU if the host runs ahead, else their sum.

    Args:
        m: The GPU and its host.
        seconds: Of the kernels.
        kernels: How many they are.
        replayed: Those of them that the host does not launch; the GPU takes each up by itself.
    """
    host = 1e-6 * m.constants.launch_us * (kernels - replayed)
    if not m.host_runs_ahead:
        return seconds + host
    gpu = 1e-6 * m.constants.graph_kernel_us * replayed
    slower: Number = np.maximum(np.maximum(seconds, host), gpu)
    return slower
