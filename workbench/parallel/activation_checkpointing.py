"""Activation checkpointing: activations recomputed in backward (Chen et al. 2016, arXiv
1604.06174).

No state of a random generator is saved: nothing here draws from one, and dropout's masks are a
function of the position, so that recomputation repeats forward exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.models import Transformer
from workbench.models.block import Block
from workbench.models.host_counts import recomputation_contexts
from workbench.models.seams import Positions
from workbench.parallel.activation_offload import ActivationOffload
from workbench.parallel.context.ulysses_attention import UlyssesAttend
from workbench.parallel.operators import gathered_again, implicit_replicate
from workbench.parallel.operators.moe_operator import MoEOperator
from workbench.parallel.operators.operator_forward import FollowInput, LocalOperator
from workbench.parallel.pipeline import zero_bubble


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a checkpointed forward and its recomputation run in: a split backward and implicit
    replication are entered again, counts of rows are repeated, and gathered tokens are kept.
    """
    pairs = zero_bubble.checkpoint_contexts(), implicit_replicate.checkpoint_contexts()
    more = gathered_again.checkpoint_contexts(), recomputation_contexts()
    forward, recomputation = zip(*pairs, *more)
    return _within(forward), _within(recomputation)


@contextmanager
def _within(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


_checkpoint = partial(
    checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
)


def apply_activation_checkpointing(
    model: Transformer, paths: Iterable[str], offload: ActivationOffload | None = None
) -> None:
    """Apply activation checkpointing to a stage, in place.

    A block saves its input alone (Chen et al. 2016), another module its inputs: attention's core
    (softmax of QK^T times V; Korthikanti et al. 2022, arXiv 2205.05198), or any that a plan names.

    Args:
        paths: Of the modules; those that another stage has are passed over.
        offload: Keeps what blocks save in host memory.
    """
    if offload is not None:
        model.register_forward_pre_hook(offload.start_forward)
        model.register_forward_hook(offload.end_forward)
    own = dict(model.named_modules())
    for module in (own[path] for path in paths if path in own):
        # Within Ulysses only the single-device attention is recomputed: recomputing the
        # all-to-alls around it would communicate again in backward.
        core = module.attend if isinstance(module, UlyssesAttend) else module
        core.forward = _checkpointed(core, core.forward, offload)


def _checkpointed(
    module: nn.Module, forward: Callable[..., Any], offload: ActivationOffload | None
) -> Callable[..., Any]:
    """Of an operator only what a rank computes on its shards is recomputed, for the same reason."""
    if isinstance(module, Block):
        return partial(_checkpointed_block, forward, offload)
    if isinstance(forward, LocalOperator | FollowInput | MoEOperator):
        return replace(forward, forward=partial(_checkpoint, forward.forward))
    return partial(_checkpoint, forward)


def _checkpointed_block(
    forward: Callable[..., tuple[Tensor, Tensor, Tensor | None]],
    offload: ActivationOffload | None,
    x_BTD: Tensor,
    residual_BTD: Tensor | None,
    positions: Positions,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A checkpointed block that saves one tensor: branch and residual are added before it."""
    total = x_BTD if residual_BTD is None else x_BTD + residual_BTD
    with nullcontext() if offload is None else offload.saving():
        out: tuple[Tensor, Tensor, Tensor | None] = _checkpoint(forward, total, None, positions)
    return out
