"""Single-device training, the reference that every strategy must equal.

It shares only the model and the initial weights with the parallel path: no mesh, no buckets, no
schedule; optimizer and clipping are torch's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbench.engine.optimizer import learning_rate
from workbench.models import Transformer
from workbench.models.python_model import add_loss, build_python_model
from workbench.models.weight_init import seed_of
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan


@dataclass
class ReferenceRun:
    """Results of one device: losses per step, unclipped gradients of step 0, final weights."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    @property
    def largest_gradient(self) -> float:
        """Largest entry of any gradient."""
        return max(float(g.abs().max()) for g in self.gradients.values())

    def rounding_only(self) -> set[str]:
        """Tensors whose gradient is zero but for rounding; meaningful in fp64 only.

        For example a key bias, which shifts all logits of a softmax alike.
        """
        return {
            name
            for name, g in self.gradients.items()
            if float(g.abs().max()) < 1e-12 * self.largest_gradient
        }


def verification_weight(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """A parameter's value at the start of a verification, drawn by its global name.

    Biases are not zero and norms not one, or a bias added twice would go unnoticed; matrices keep
    the variance of their input, or attention would be uniform and its gradients mere rounding.

    Args:
        name: The global name.
        shape: The global shape.
        seed: The plan's seed.
        dtype: The precision of the verification.
    """
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    noise = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    if len(shape) > 1:
        return noise / math.sqrt(shape[-1])
    return 0.1 * noise + (1 if "norm" in name and name.endswith("weight") else 0)


def train_on_one_device(
    plan: ResolvedPlan, batches: list[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> ReferenceRun:
    """Train on one device, one optimizer step per batch.

    Args:
        plan: The plan, of which model and training count.
        batches: (tokens, targets), each [global_batch, sequence_length].
        dtype: Precision of everything.
    """
    model = _model(plan).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                verification_weight(name, tuple(parameter.shape), plan.training.seed, dtype)
            )
    optimizer = _optimizer(model, plan)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step, (tokens, targets) in enumerate(batches):
        optimizer.zero_grad()
        if isinstance(model, Transformer):
            model.samples.start_step(step * plan.training.global_batch, plan.training.global_batch)
        loss = model(tokens, targets) / targets.numel()
        loss.backward()
        losses.append(loss.item())
        first = first or {name: _gradient(p).clone() for name, p in model.named_parameters()}
        if plan.training.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.training.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan.training.optimizer, plan.training.steps)
        optimizer.step()
    return ReferenceRun(losses, first, {name: p.detach() for name, p in model.named_parameters()})


def _model(plan: ResolvedPlan) -> nn.Module:
    if plan.code:
        return add_loss(build_python_model(plan.code, plan.training.seed))
    return Transformer(plan.shape, plan.training.dropout, plan.training.seed)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    o = plan.training.optimizer
    decayed = {
        name: p.ndim >= 2 and not name.endswith("bias") for name, p in model.named_parameters()
    }
    matrices = [p for name, p in model.named_parameters() if decayed[name]]
    vectors = [p for name, p in model.named_parameters() if not decayed[name]]
    groups = [
        {"params": matrices, "weight_decay": o.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if o.name == "adamw":
        return torch.optim.AdamW(
            groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.epsilon
        )
    return _DecoupledSgd(groups, lr=o.learning_rate, momentum=o.beta1)


class _DecoupledSgd(torch.optim.SGD):
    """SGD whose weight decay is decoupled from the gradient, as in AdamW (1711.05101)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(self.param_groups, decays):
            group["weight_decay"] = decay
