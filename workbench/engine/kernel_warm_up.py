"""Compiling a GPU's fused kernels before the first step, where ranks would wait for each other.

Triton's kernels, and code of torch.compile, are specialised on widths and dtypes. One layer with
the widths that this rank has, and its loss, run once on zeros, without any process group.

The first step still compiles the optimizer's kernel, and everything of tensor grids, operator
strategies and models in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from workbench.engine.precision import plan_dtypes
from workbench.kernels.fused_seams import VocabParallelLoss, replace_seams
from workbench.models import Transformer
from workbench.models.seams import Attend, HeadLoss
from workbench.parallel.tensor.vocab_parallel import VocabParallelHeadLoss
from workbench.plan.model.head_split import padded_heads_per_rank
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan


def compile_kernels(
    plan: ResolvedPlan, stages: list[nn.Module], device: torch.device
) -> Iterator[str]:
    """Compile what the stages of this rank will run; yields each name beforehand.

    Where the GPU's memory is too short for it, the first step compiles.

    Args:
        plan: The plan.
        stages: This rank's; their parameters are neither read nor changed.
        device: Where the kernels will run.
    """
    s = plan.strategy
    models = [model for model in stages if isinstance(model, Transformer)]
    is_grid = s.tensor.algorithm != "1d" and s.tensor.ranks > 1
    if s.kernels == "eager" or s.operators or is_grid or not models:
        return
    parts: list[tuple[str, Callable[[], None]]] = []
    if any(model.blocks for model in models):
        parts.append(("a layer", partial(_run_layer, plan, device)))
    heads = [model.head for model in models if model.head is not None]
    parts += [("the loss", partial(_run_loss, plan, head, device)) for head in heads]
    for name, run in parts:
        yield name
        try:
            run()
        except torch.OutOfMemoryError:
            print(
                f"too little memory to compile {name} beforehand: the first step does", flush=True
            )
    if device.type == "cuda":
        torch.cuda.empty_cache()


def local_shape(plan: ResolvedPlan) -> Shape:
    """A layer of each kind, with the heads and widths that a tensor rank has, and few experts."""
    shape, ranks = plan.shape, plan.strategy.tensor.ranks
    heads, kv_heads = padded_heads_per_rank(shape, ranks)
    changes = {"heads": heads, "kv_heads": kv_heads, "ffn": -(-shape.ffn // ranks)}
    layers, moe = 1, shape.moe
    if moe is not None:
        dense = min(moe.first_dense, 1)
        layers = 1 + dense
        moe = moe.model_copy(
            update={"experts": moe.top_k + 1, "ffn": -(-moe.ffn // ranks), "first_dense": dense}
        )
    return shape.model_copy(update={**changes, "layers": layers, "moe": moe, "vocab": 64})


def _run_layer(plan: ResolvedPlan, device: torch.device) -> None:
    with torch.device("meta"):
        model = Transformer(local_shape(plan), plan.training.dropout)
    model.embedding = model.final_norm = model.head = None
    model.attach_aux_loss = lambda x, aux_loss: x + aux_loss
    for module in model.modules():
        if isinstance(module, Attend):
            module.kernel = plan.strategy.attention
    x = _activations(plan, device)
    _forward_and_backward(_zeros(model, plan, x), x)


def _run_loss(plan: ResolvedPlan, of_stage: HeadLoss, device: torch.device) -> None:
    rows, width = of_stage.weight.shape
    x = _activations(plan, device)
    targets = torch.zeros(x.shape[:2], dtype=torch.long, device=device)
    if isinstance(of_stage, VocabParallelHeadLoss):  # which takes a HeadLoss's place
        loss = VocabParallelLoss(of_stage.kernels)
        logits = torch.zeros(x.shape[:2].numel(), rows, dtype=x.dtype, device=device)
        _forward_and_backward(
            # A product, since the loss overwrites its input, which must then not be a leaf.
            lambda inputs: loss(inputs * 1, targets.flatten(), 0),
            logits.requires_grad_(),
        )
        return
    with torch.device("meta"):
        head = HeadLoss(width, rows)
    _forward_and_backward(partial(_zeros(head, plan, x), targets_BT=targets), x)


def _zeros(module: nn.Module, plan: ResolvedPlan, like: Tensor) -> nn.Module:
    """The module of the meta device with the plan's kernels, on the device of `like`."""
    module.to(like.dtype).to_empty(device=like.device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    replace_seams(module, plan.strategy.kernels, plan.gpu.device)
    return module


def _activations(plan: ResolvedPlan, device: torch.device) -> Tensor:
    """Zeros of what a rank's layers see, [B, T, D]."""
    t = plan.training
    tokens = t.sequence_length // plan.strategy.context.size
    shape = (t.micro_batch, tokens, plan.shape.hidden)
    return torch.zeros(shape, dtype=plan_dtypes(plan)[0], device=device, requires_grad=True)


def _forward_and_backward(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.enable_grad():
        made = run(x)
        torch.autograd.backward(made, torch.zeros_like(made))
