"""Sizes below which a CPU runs plain operators although the plan asks for compiled or fused
ones.
"""

MIN_FUSED_SEAM_NUMEL = 2**19
"""Elements of a seam's input below which starting compiled code costs a CPU more than it saves."""

MIN_FUSED_LOSS_NUMEL = 2**22
"""The same for the logits of a vocabulary-parallel head, all of whose loss is one seam."""

ATEN_SEAMS = ("layernorm", "relu")
"""Kinds of seams for which torch has a fused operator on a CPU: they stay torch's own."""
