"""Activation checkpointing: activations recomputed in backward (Chen et al. 2016, arXiv
1604.06174).

No state of a random generator is saved: nothing here draws from one, and dropout's masks are a
function of the position, so that recomputation repeats forward exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.models import Transformer
from workbench.models.host_counts import recomputation_contexts
from workbench.models.seams import Positions
from workbench.models.transformer import Attention
from workbench.parallel.context.ulysses_attention import UlyssesAttend
from workbench.parallel.pipeline.zero_bubble import checkpoint_contexts


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a checkpointed forward and its recomputation run in: a split backward is entered again,
    and counts of rows are repeated.
    """
    split, counts = checkpoint_contexts(), recomputation_contexts()
    return _both(split[0], counts[0]), _both(split[1], counts[1])


@contextmanager
def _both(
    first: AbstractContextManager[Any], second: AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


_checkpoint = partial(
    checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
)


def apply_activation_checkpointing(
    model: Transformer, what: Literal["none", "selective", "full"] | Sequence[int]
) -> None:
    """Apply activation checkpointing to a stage, in place.

    Args:
        what: "full" saves the inputs of all blocks only, a list those of the listed blocks.
            "selective" recomputes attention's core (softmax of QK^T times V) and saves everything
            else (Korthikanti et al. 2022, arXiv 2205.05198). "none" recomputes nothing.
    """
    if what == "selective":
        for module in list(model.modules()):
            # Within Ulysses only the single-device attention is recomputed: recomputing the
            # all-to-alls around it would communicate again in backward.
            is_core = isinstance(module, Attention) and not isinstance(module.attend, UlyssesAttend)
            if is_core or isinstance(module, UlyssesAttend):
                checkpointed = CheckpointedAttend(module.get_submodule("attend"))
                setattr(module, "attend", checkpointed)  # noqa: B010 (a seam takes any module of its signature)
        return
    for index, block in model.blocks.items():
        if what == "full" or (what != "none" and int(index) in what):
            block.forward = partial(_checkpointed_block, block.forward)


class CheckpointedAttend(nn.Module):
    """The attend seam, recomputed in backward."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *qkv_and_positions: Any) -> Tensor:
        """As the seam it wraps."""
        out: Tensor = _checkpoint(self.attend, *qkv_and_positions)
        return out


def _checkpointed_block(
    forward: Callable[..., tuple[Tensor, Tensor]],
    x_BTD: Tensor,
    residual_BTD: Tensor | None,
    positions: Positions,
) -> tuple[Tensor, Tensor]:
    """A checkpointed block that saves one tensor: branch and residual are added before it."""
    total = x_BTD if residual_BTD is None else x_BTD + residual_BTD
    out: tuple[Tensor, Tensor] = _checkpoint(forward, total, None, positions)
    return out
