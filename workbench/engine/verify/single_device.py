"""Single-device training, the reference that every strategy must equal.

It shares only the model and the initial weights with the parallel path: no mesh, no buckets, no
schedule; optimizer and clipping are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from workbench.adapters.lora_linear import LORA_B, adapters_disabled, add_adapters
from workbench.engine.data.batch_sampler import Batch
from workbench.engine.preference_pass import needs_reference_table
from workbench.engine.verify.paired_answers import EagerPairs
from workbench.errors import PlanError, refuse
from workbench.kernels.four_bit_weight import round_to_four_bits
from workbench.models import Transformer
from workbench.models.attention.packed_documents import document_starts
from workbench.models.counter_dropout import SampleIndices
from workbench.models.python_model import add_loss, build_python_model
from workbench.models.seams import IGNORE_INDEX, Attend
from workbench.models.traced.value_dependence import place_and_error
from workbench.models.weight_init import seed_of
from workbench.parallel.operators.apply_traced import traced_forward
from workbench.parallel.operators.factor_redistribution import FactorGrid
from workbench.parallel.operators.traced_module import trace_for_plan
from workbench.plan.learning_rate import learning_rate
from workbench.plan.model.block_linears import model_linears
from workbench.plan.model.four_bit_base import four_bit_format
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

CPU = torch.device("cpu")


@dataclass
class ReferenceRun:
    """Results of one device: losses per step, unclipped gradients of step 0, final weights."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    def numel(self) -> dict[str, int]:
        """Entries of each tensor."""
        return {name: weight.numel() for name, weight in self.weights.items()}

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
        # Scaled adapters on top of their weights must not take activations out of proportion.
        return noise / math.sqrt(shape[-1]) * (0.1 if name.endswith(LORA_B) else 1)
    return 0.1 * noise + (1 if "norm" in name and name.endswith("weight") else 0)


def train_on_one_device(
    plan: ResolvedPlan,
    batches: list[Batch],
    dtype: torch.dtype,
    device: torch.device = CPU,
    float8: bool = False,
    attention: str = "flash",
) -> ReferenceRun:
    """Train on one device, one optimizer step per batch.

    Args:
        plan: The plan, of which model and training count.
        batches: Each [global_batch, sequence_length].
        dtype: Of parameters, activations and gradients; the optimizer steps fp32 copies of 16-bit
            parameters.
        device: The device; default: the CPU.
        float8: Whether the blocks' linear layers are torchao's `Float8Linear`. The plan's
            microbatches then are this device's too: scales are of the largest entry of one.
        attention: Attention kernel.

    Returns:
        Its results, on CPU.
    """
    t, samples = plan.training, SampleIndices()
    rows = t.micro_batch if float8 else t.global_batch
    model = _drawn_model(plan, attention, samples, dtype, rows, device)
    if float8:
        _convert_to_float8(model, device)
    pairs = _pairs(model, plan)
    evaluate = partial(_evaluate, model, rows=rows, device=device)
    if pairs is not None and needs_reference_table(plan):
        pairs.record(lambda: [evaluate(batch.tokens, batch.targets) for batch in batches])
    stepped = _SteppedParameters(model)
    optimizer = _optimizer(stepped.targets, plan)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    held: dict[str, Tensor | None] = {}
    """Gradients of the last step, where the plan delays their update."""
    for step, batch in enumerate(batches):
        model.zero_grad()
        samples.start_step(step * t.global_batch, rows)
        if plan.corpus.separate_documents:
            starts = document_starts(batch.targets) if batch.starts is None else batch.starts
            samples.starts_of_step = starts.to(device).unflatten(0, (-1, rows))
        if pairs is not None:
            pairs.factor = 2 * trained_tokens(batch.targets) / t.global_batch
            if not needs_reference_table(plan):
                pairs.record(partial(evaluate, batch.tokens, batch.targets))
        losses.append(_backward(model, plan, batch, samples, rows, device))
        stepped.take_gradients()
        first = first or {n: _gradient(p).cpu().clone() for n, p in stepped.targets.items()}
        if plan.training.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(stepped.targets.values(), plan.training.optimizer.clip)
        applied = step
        if t.optimizer.delayed_update:
            applied = step - 1
            held = stepped.exchange_gradients(held)
        if applied < 0:
            continue
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(applied, plan.training.optimizer, plan.training.steps)
        optimizer.step()
        stepped.store()
    return ReferenceRun(losses, first, {n: p.detach().cpu() for n, p in _trained(model).items()})


def _drawn_model(
    plan: ResolvedPlan,
    attention: str,
    samples: SampleIndices,
    dtype: torch.dtype,
    rows: int,
    device: torch.device,
) -> nn.Module:
    """The plan's model with the weights that a verification starts from."""
    model = _model(plan, attention, samples, dtype, rows)
    # `Module.to` casts complex buffers too, to real numbers.
    model._apply(lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype))
    seed = plan.training.seed
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(verification_weight(name, tuple(parameter.shape), seed, dtype))
    if (form := four_bit_format(plan)) is not None:
        _round_to_four_bits(model, plan.shape, form)
    return model


def _backward(
    model: nn.Module,
    plan: ResolvedPlan,
    batch: Batch,
    samples: SampleIndices,
    rows: int,
    device: torch.device,
) -> float:
    """Add a batch's gradients, `rows` sequences at a time; returns its loss a token."""
    total, divisor = 0.0, trained_tokens(batch.targets)
    for index, pair in enumerate(zip(batch.tokens.split(rows), batch.targets.split(rows))):
        samples.start_microbatch(index)
        loss = _forward(model, plan, *(each.to(device) for each in pair)) / divisor
        loss.backward()
        total += loss.item()
    return total


def _pairs(model: nn.Module, plan: ResolvedPlan) -> EagerPairs | None:
    if plan.finetune is None or plan.finetune.preference is None:
        return None
    assert isinstance(model, Transformer) and model.head is not None
    return EagerPairs(model.head, plan.finetune.preference.beta)


def _evaluate(
    model: nn.Module, tokens: Tensor, targets: Tensor, rows: int, device: torch.device
) -> None:
    """Run a batch through the model without its adapters, `rows` sequences at a time."""
    model.eval()
    with adapters_disabled():
        for pair in zip(tokens.split(rows), targets.split(rows)):
            model(*(each.to(device) for each in pair))
    model.train()


def trained_tokens(targets: Tensor) -> int:
    """Tokens of a batch that the loss does not ignore, at least 1."""
    return max(1, int((targets != IGNORE_INDEX).sum()))


def _forward(model: nn.Module, plan: ResolvedPlan, tokens: Tensor, targets: Tensor) -> Tensor:
    """The summed loss; a user's forward that fails is named by its line."""
    try:
        loss: Tensor = model(tokens, targets)
    except Exception as error:  # a user's forward may raise any
        if not plan.code or isinstance(error, PlanError):
            raise
        what = f"its forward fails on one device: {place_and_error(error)}"
        shape = list(tokens.shape)
        raise refuse("model.python", f"{what}; legal: one that takes {shape} tokens") from error
    return loss


@torch.no_grad()
def _round_to_four_bits(model: nn.Module, shape: Shape, form: FourBitFormat) -> None:
    """Replace weights of the blocks' linear layers by what 4 bits leave of them."""
    for path in model_linears(shape):
        weight = model.get_parameter(f"{path}.weight")
        round_to_four_bits(weight, form)


def _convert_to_float8(model: nn.Module, device: torch.device) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=device.type == "cpu", round_scales_to_power_of_2=True)
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, path: ".attention." in path or ".mlp." in path,
        config=config,
    )


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class _SteppedParameters:
    """What the optimizer steps: a model's parameters, or fp32 copies where they have 16 bits."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = _trained(model)
        self.targets = {
            name: p if p.element_size() > 2 else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }

    def take_gradients(self) -> None:
        """Give the copies the parameters' gradients."""
        for name, target in self.targets.items():
            gradient = _gradient(self.parameters[name])
            if target is not self.parameters[name]:
                target.grad = gradient.float()

    def exchange_gradients(self, held: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Put the gradients `held` in place of this step's, which are returned."""
        own = {name: target.grad for name, target in self.targets.items()}
        for name, target in self.targets.items():
            target.grad = held.get(name)
        return own

    @torch.no_grad()
    def store(self) -> None:
        """Round the copies into the parameters."""
        for name, target in self.targets.items():
            if target is not self.parameters[name]:
                self.parameters[name].copy_(target)


def _model(
    plan: ResolvedPlan, attention: str, samples: SampleIndices, dtype: torch.dtype, rows: int
) -> nn.Module:
    """The plan's model; a module that drops elements as its graph, whose masks are drawn alike on
    every mesh.
    """
    if plan.code:
        return _python_model(plan, samples, dtype, rows)
    model = Transformer(plan.shape, plan.training.dropout, plan.training.seed)
    model.samples = samples
    if plan.lora:
        add_adapters(model, plan.lora, plan.training.seed)
    for seam in (module for module in model.modules() if isinstance(module, Attend)):
        seam.kernel = attention
    return model


def _python_model(
    plan: ResolvedPlan, samples: SampleIndices, dtype: torch.dtype, rows: int
) -> nn.Module:
    assert plan.code is not None
    model = build_python_model(plan.code, plan.training.seed)
    traced = trace_for_plan(model, plan, dtype, rows, sharded=False)
    if traced is None:
        return add_loss(model, plan.vocab)
    model.forward = traced_forward(model, traced, FactorGrid(), samples, plan.training.seed)
    return model


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Its gradient; zero where nothing used it, as an expert that no token chose."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _optimizer(parameters: dict[str, nn.Parameter], plan: Plan) -> torch.optim.Optimizer:
    o = plan.training.optimizer
    decayed = {name: p.ndim >= 2 and not name.endswith("bias") for name, p in parameters.items()}
    matrices = [p for name, p in parameters.items() if decayed[name]]
    vectors = [p for name, p in parameters.items() if not decayed[name]]
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
