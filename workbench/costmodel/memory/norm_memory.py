"""Memory that norms keep from forward to backward."""

from __future__ import annotations

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload


def norm_saved(w: Workload, own_input: bool = True) -> Number:
    """Bytes that one norm saves, its output included.

    This engine's RMSNorm saves its input and one statistic per token on every device; torch's
    LayerNorm saves its input and two, which the eager one on a CPU keeps in the input's dtype.

    Args:
        w: Per-rank problem sizes.
        own_input: Whether the input is a tensor that nothing else saves.
    """
    stream = w.residual_bytes
    statistics = w.upcast_bytes * w.tokens / w.sequence_parallel
    if w.shape.norm == "layernorm":
        narrow = w.fixed.gpu.device == "cpu" and w.fixed.kernels != "compiled"
        return (1 + own_input) * stream + 2 * statistics * (
            w.element_bytes / w.upcast_bytes if narrow else 1
        )
    return (1 + own_input) * stream + statistics


def last_norm_saved(w: Workload) -> Number:
    """Bytes that the norm before the feed-forward layer saves, where the branches do not share one;
    parallel branches share its input.
    """
    if w.shape.parallel_residual == "one_norm":
        return 0.0
    return norm_saved(w, own_input=w.shape.parallel_residual is None)


def residual_norms_saved(w: Workload) -> Number:
    """Bytes that a layer's norms of the residual stream save; those at the output of branches save
    their inputs, and their outputs are only added.
    """
    both = 2 * norm_saved(w, own_input=False) if w.shape.branch_norms == "both" else 0.0
    return norm_saved(w) + last_norm_saved(w) + both


def head_norms_saved(w: Workload) -> Number:
    """Bytes that norms of queries and keys save: their inputs, and a statistic a head, or one each
    of all heads.
    """
    if not w.shape.qk_norm:
        return 0.0
    if w.shape.qk_norm == "width":
        return ((w.q_width + w.k_width) * w.element_bytes + 2 * w.upcast_bytes) * w.tokens
    statistics = w.upcast_bytes / int(w.shape.head_dim or 1)
    return (w.q_width + w.k_width) * w.tokens * (w.element_bytes + statistics)
