"""Activations made again in backward instead of kept (Chen et al. 2016, arXiv 1604.06174).

Nothing here draws random numbers, and dropout draws by position: what is made again is what was
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.models import Transformer
from workbench.models.seams import Positions
from workbench.models.transformer import Attention
from workbench.parallel.context.ulysses_attention import UlyssesAttend
from workbench.parallel.pipeline.zero_bubble import checkpoint_contexts

_checkpoint = partial(
    checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=checkpoint_contexts
)


def apply_activation_checkpointing(
    model: Transformer, what: Literal["none", "selective", "full"] | Sequence[int]
) -> None:
    """Make `model` keep less, in place: only the inputs of all blocks (full) or of those listed, or
    all but what attention keeps for itself (selective, Korthikanti et al. 2022, arXiv 2205.05198).
    """
    if what == "selective":
        for module in list(model.modules()):
            # Ulysses exchanges around the plain attention; what it exchanged stays.
            plain = isinstance(module, Attention) and not isinstance(module.attend, UlyssesAttend)
            if plain or isinstance(module, UlyssesAttend):
                again = CheckpointedAttend(module.get_submodule("attend"))
                setattr(module, "attend", again)  # noqa: B010 (a seam takes any module of its signature)
        return
    for index, block in model.blocks.items():
        if what == "full" or (what != "none" and int(index) in what):
            block.forward = partial(_checkpointed_block, block.forward)


class CheckpointedAttend(nn.Module):
    """The attend seam, run again in backward."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *qkv_and_positions: Any) -> Tensor:
        """As the seam that it wraps."""
        out: Tensor = _checkpoint(self.attend, *qkv_and_positions)
        return out


def _checkpointed_block(
    forward: Callable[..., tuple[Tensor, Tensor]],
    x_BTD: Tensor,
    residual_BTD: Tensor | None,
    positions: Positions,
) -> tuple[Tensor, Tensor]:
    """A block that keeps one tensor: branch and residual are added before it, not within."""
    total = x_BTD if residual_BTD is None else x_BTD + residual_BTD
    out: tuple[Tensor, Tensor] = _checkpoint(forward, total, None, positions)
    return out
