"""Numerical equivalence of a plan to one device: same seed, compared per tensor and per rank."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.engine.check_python_model import check_python_model
from workbench.engine.exit_codes import exit_status
from workbench.engine.precision import DTYPES
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.engine.verify.single_device import (
    CPU,
    ReferenceRun,
    train_on_one_device,
    verification_weight,
)
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.float8_rules import verified_precision
from workbench.plan.rules.supported import require
from workbench.plan.schema import Optimizer, Plan
from workbench.schedules import Action

NUM_STEPS = 3
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "fp8": 1e-2}
"""Largest relative difference. fp32 compares weights after SGD: AdamW divides by the gradient's own
size. fp8 stands for the plan's fp8 GEMMs with all else in fp64: a value in the midst of two of fp8
that differs by a rounding becomes the other one, 1/16 off, and what follows from it with it. One
such value says nothing of a tensor, so that there root mean squares are compared, not maxima.
"""
NOISE_EPSILONS = 16
"""Rounding allowed to a gradient that is zero in exact arithmetic (a key bias), in epsilons."""
GPU_FACTOR = 10
"""GPUs sum a GEMM of another shape in another order, by another kernel: fp32 there may differ by
ten times what it may on CPU.
"""
GPU_TOLERANCE = {
    "fp32": GPU_FACTOR * TOLERANCE["fp32"],
    "bf16": NOISE_EPSILONS * torch.finfo(torch.bfloat16).eps,
    "fp8": 2 * torch.finfo(torch.float8_e4m3fn).eps,
}
"""The same on GPUs, against one GPU in the same precision. In bf16 two ranks of tensor parallelism
differ by 5 epsilons from one (measured on CPU), and a missing all-reduce by 60 or more. In fp8 a
GPU's GEMMs have no fp64 results, so that all else is fp32, and values are rounded the other way on
another mesh: two context ranks then differ by one epsilon of e4m3 from one (measured on CPU).
"""


def verified_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Dtype of parameters and activations in a verification; in fp8, of all but the GEMMs."""
    if precision == "fp8":
        return torch.float32 if device.type == "cuda" else torch.float64
    return DTYPES[precision]


Kind = Literal["loss", "gradients", "weights"]


@dataclass(frozen=True)
class TensorDifference:
    """Difference of a tensor on one rank from the single device."""

    kind: Kind
    tensor: str
    rank: int
    absolute: float
    relative: float


def _cpu(rank: int) -> torch.device:
    return CPU


class _Recorder:
    """Records the gradients of the first step before clipping."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.gradients: dict[str, Tensor] = {}

    def action(self, label: str, action: Action | None) -> AbstractContextManager[None]:
        return nullcontext()

    def moment(self, name: str) -> None:
        if name == "before_optimizer" and not self.gradients:
            self.gradients = {n: g.clone() for n, g in self.session.part.store.gradients.items()}


def verify(
    plan: Plan,
    precision: Literal["fp64", "fp32", "fp8"] = "fp64",
    seconds: float = 300.0,
    allow_code: bool = False,
    backend: str = "gloo",
    device_of: Callable[[int], torch.device] = _cpu,
) -> dict[str, Any]:
    """Train `NUM_STEPS` steps on one device and under the plan, on forked ranks, and compare.

    The plan's own precision is not verified: `precision` replaces it, for parameters, activations,
    gradients and moments alike, because in 16 bits two correct programs differ by more than most
    faults do. What was replaced is in the answer.

    Per tensor, the relative difference is max|d| / max(max|reference|, 1e-6 x the model's largest
    gradient). A gradient that is zero but for rounding has no scale of its own: its noise must stay
    within `NOISE_EPSILONS` epsilons of the largest gradient, and its weight within what the
    optimizer makes of that noise. Every rank compares each slice it holds, replicas too; slices
    must cover every tensor exactly once.

    Args:
        plan: A plan of a model small enough for CPU ranks, one process per rank.
        precision: The precision of the comparison; fp32 replaces AdamW by SGD too, see `TOLERANCE`.
        seconds: Time limit of the ranks.
        allow_code: Run a model that is given as Python.
        backend: Of the ranks' process group.
        device_of: The device of a rank; the reference is on CPU always.

    Returns:
        `precision` and `tolerance`; `replaced`, which names each plan field that does not count
        here with its value in the plan and in the verification; the largest absolute and relative
        differences of loss, gradients and weights; the `worst` tensor; `passed`.

    Raises:
        PlanError: The engine cannot run the plan.
        RankError: A rank failed.
        ValueError: The ranks' slices do not cover a tensor exactly once.
    """
    written = plan.resolve()
    full = in_precision(written, precision, allow_code)
    check_python_model(full, allow_code)
    dtype = verified_dtype(precision, CPU)
    batches = list(random_batches(full))
    reference, scale = reference_and_scale(full, batches, precision, TOLERANCE[precision])
    ranks = partial(_compare, full, batches=batches, reference=reference, scale=scale, dtype=dtype)
    work = partial(ranks, device_of=device_of)
    results = run_ranks(full.world_size, work, seconds, backend)
    check_cover(reference.numel(), [owned for _, owned in results])
    differences = [d for of_rank, _ in results for d in of_rank]
    replaced = replaced_fields(written, precision)
    return summarize(differences, precision, TOLERANCE[precision], replaced)


def reference_and_scale(
    plan: ResolvedPlan,
    batches: list[tuple[Tensor, Tensor]],
    precision: str,
    tolerance: float,
    device: torch.device = CPU,
) -> tuple[ReferenceRun, DifferenceScale]:
    """What one device computes, and what differences from it are relative to.

    Args:
        plan: The plan as it is verified (`in_precision`).
        batches: (tokens, targets) of each step, [global_batch, sequence_length].
        precision: Of the verification.
        tolerance: Of relative differences.
        device: The one device.
    """
    reference = train_on_one_device(
        plan, batches, verified_dtype(precision, device), device, float8=precision == "fp8"
    )
    exact = reference
    if precision != "fp64":
        exact = train_on_one_device(plan, batches[:1], torch.float64, device)
    epsilon = torch.finfo(verified_dtype(precision, device)).eps
    scale = DifferenceScale(
        tolerance,
        epsilon,
        reference.largest_gradient,
        exact.rounding_only(),
        plan.training.optimizer,
        mean_square=precision == "fp8",
    )
    return reference, scale


def in_precision(plan: ResolvedPlan, precision: str, allow_code: bool) -> ResolvedPlan:
    """The plan as it is verified: in `precision` throughout, with SGD except in fp64.

    No plan can say fp64: the fields say fp32, which has no master weights, and the session's dtype
    overrides them. In bf16, gradients and optimizer state are fp32.
    """
    require(plan, "run", allow_code)
    if (plan.strategy.precision == "fp8") != (precision == "fp8"):
        verified_precision(plan, precision, "cpu")
    stored = precision if precision in ("bf16", "fp8") else "fp32"
    changes: dict[str, Any] = {"strategy.precision": stored, "strategy.gradient_dtype": "fp32"}
    changes |= {"training.optimizer.moments": "fp32", "training.optimizer.master": "auto"}
    if precision != "fp64":
        changes["training.optimizer.name"] = "sgd"
    return plan.with_fields(**changes)


def replaced_fields(
    plan: ResolvedPlan, precision: str, on_gpu: bool = False
) -> dict[str, dict[str, str]]:
    """Dotted plan field -> its value in the plan and in the verification, where they differ."""
    optimizer = plan.training.optimizer
    accumulated = "fp64" if precision in ("fp64", "fp8") and not on_gpu else "fp32"
    name = optimizer.name if precision == "fp64" else "sgd"
    pairs = {
        "strategy.precision": (plan.strategy.precision, precision),
        "strategy.gradient_dtype": (plan.strategy.gradient_dtype, accumulated),
        "training.optimizer.moments": (optimizer.moments, accumulated),
        "training.optimizer.name": (optimizer.name, name),
    }
    return {
        field: {"plan": written, "verified": used}
        for field, (written, used) in pairs.items()
        if written != used
    }


def random_batches(plan: ResolvedPlan) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens over the whole vocabulary, [global_batch, sequence_length] each."""
    t = plan.training
    generator = torch.Generator().manual_seed(t.seed)
    for _ in range(NUM_STEPS):
        text = torch.randint(
            plan.vocab, (t.global_batch, t.sequence_length + 1), generator=generator
        )
        yield text[:, :-1], text[:, 1:]


@dataclass(frozen=True)
class DifferenceScale:
    """Denominators of relative differences."""

    tolerance: float
    epsilon: float
    largest_gradient: float
    rounding_only: set[str]
    optimizer: Optimizer
    mean_square: bool = False
    """Whether tensors are compared by their root mean squares."""

    def size(self, parts: Iterable[Tensor], numel: int) -> float:
        """Largest entry of a tensor of `numel` entries, or root mean square, from its parts."""
        if not self.mean_square:
            return max((_finite(float(p.abs().max())) for p in parts if p.numel()), default=0.0)
        return math.sqrt(sum(float(p.double().square().sum()) for p in parts) / numel)

    def of(self, kind: Kind, name: str, whole: Tensor) -> float:
        scale = max(self.size([whole], whole.numel()), 1e-6 * self.largest_gradient)
        if name not in self.rounding_only:
            return scale
        noise = self.largest_gradient * NOISE_EPSILONS * self.epsilon
        if kind == "gradients":
            return noise / self.tolerance
        return max(scale, self._drift(noise) / self.tolerance)

    def _drift(self, noise: float) -> float:
        """How far a weight may move on gradients of `noise`: AdamW normalises them by their own
        size plus epsilon.
        """
        o = self.optimizer
        return (
            NUM_STEPS
            * o.learning_rate
            * (min(1.0, noise / o.epsilon) if o.name == "adamw" else noise)
        )


def _compare(
    plan: ResolvedPlan,
    rank: int,
    batches: list[tuple[Tensor, Tensor]],
    reference: ReferenceRun,
    scale: DifferenceScale,
    dtype: torch.dtype,
    device_of: Callable[[int], torch.device],
) -> tuple[list[TensorDifference], dict[str, int]]:
    device = device_of(rank)
    return compare_with_reference(
        plan, build_mesh(plan, rank, device), device, batches, reference, scale, dtype
    )


def compare_with_reference(
    plan: ResolvedPlan,
    mesh: Mesh,
    device: torch.device,
    batches: list[tuple[Tensor, Tensor]],
    reference: ReferenceRun,
    scale: DifferenceScale,
    dtype: torch.dtype | None,
) -> tuple[list[TensorDifference], dict[str, int]]:
    """Train this rank's part of the plan, and compare it with one device. Called by all ranks.

    Args:
        plan: The plan as it is verified.
        mesh: This rank's place.
        device: This rank's.
        batches: (tokens, targets) of each step, [global_batch, sequence_length].
        reference: What one device computed, on CPU.
        scale: What differences are relative to.
        dtype: Of parameters, activations and gradients; None: the plan's own.

    Returns:
        The differences of this rank, and how many entries of each tensor it owns.
    """
    rank = mesh.rank
    session = _verification_session(plan, mesh, device, dtype)
    recorder = _Recorder(session)
    losses = [
        session.step(i, *_share(plan, session, batch, device), recorder).loss
        for i, batch in enumerate(batches)
    ]
    weights, layouts = session.part.store.values, session.part.store.layouts

    def differences() -> Iterator[TensorDifference]:
        for i, (mine, theirs) in enumerate(zip(losses, reference.losses)):
            gap = _finite(abs(mine.item() - theirs))
            yield TensorDifference("loss", f"loss of step {i}", rank, gap, gap / abs(theirs))
        for name, layout in layouts.items():
            yield _difference(
                "gradients", layout, rank, recorder.gradients[name], reference.gradients, scale
            )
            yield _difference("weights", layout, rank, weights[name], reference.weights, scale)

    owned = {
        layout.name: layout.num_elements() for layout in layouts.values() if layout.is_owner(mesh)
    }
    return list(differences()), owned


def _verification_session(
    plan: ResolvedPlan, mesh: Mesh, device: torch.device, dtype: torch.dtype | None
) -> Session:
    session = Session.build(plan, mesh, device, dtype, drawer=None)
    with torch.no_grad():
        store, state = session.part.store, session.optimizer.state()
        for name, layout in store.layouts.items():
            value = store.values[name]
            weight = verification_weight(layout.name, layout.shape, plan.training.seed, value.dtype)
            value.copy_(layout.take(weight))
            if (master := state[name].get("master")) is not None:
                master.copy_(value)
        store.gather_updated_params()
    return session


def _share(
    plan: ResolvedPlan, session: Session, batch: tuple[Tensor, Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """This data coordinate's microbatches of a batch, [num_microbatches, micro_batch, T]."""
    data = session.mesh["data"]
    tokens, targets = (
        x.chunk(data.size)[data.index]
        .unflatten(0, (plan.num_microbatches, plan.training.micro_batch))
        .to(device)
        for x in batch
    )
    return tokens, targets


def _difference(
    kind: Kind,
    layout: Layout,
    rank: int,
    mine: Tensor,
    wholes: dict[str, Tensor],
    scale: DifferenceScale,
) -> TensorDifference:
    whole = wholes[layout.name]
    expected = [part for part, _ in layout.parts(layout.take(whole))]
    gaps = [part.cpu() - other for (part, _), other in zip(layout.parts(mine), expected)]
    gap = _finite(scale.size(gaps, whole.numel()))
    return TensorDifference(kind, layout.name, rank, gap, gap / scale.of(kind, layout.name, whole))


def _finite(value: float) -> float:
    """`value`, with NaN as infinity."""
    return value if math.isfinite(value) else math.inf


def check_cover(numel: dict[str, int], owned: list[dict[str, int]]) -> None:
    """Check that the ranks own each entry of every tensor once; `numel` are the tensors' sizes.

    Raises:
        ValueError: They do not; names the tensor.
    """
    for name, expected in numel.items():
        num_owned = sum(part.get(name, 0) for part in owned)
        if num_owned != expected:
            raise ValueError(
                f"{name}: the ranks own {num_owned} of {expected} entries; each must be owned once"
            )


def summarize(
    differences: list[TensorDifference],
    precision: str,
    tolerance: float,
    replaced: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """The answer of `verify`, from every rank's differences."""
    worst = max(differences, key=lambda d: d.relative)
    kinds: tuple[Kind, ...] = ("loss", "gradients", "weights")
    return {
        "precision": precision,
        "tolerance": tolerance,
        "replaced": replaced,
        "max_abs_diff": {k: max(d.absolute for d in differences if d.kind == k) for k in kinds},
        "max_relative_diff": {
            k: max(d.relative for d in differences if d.kind == k) for k in kinds
        },
        "worst": asdict(worst),
        "passed": worst.relative <= tolerance,
    }


def main() -> int:
    """`python -m workbench.engine.verify.equivalence PLAN [--precision fp64]` prints one JSON
    document; 1: failed, 2: refused.
    """
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.verify.equivalence")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--precision", choices=sorted(TOLERANCE), default="fp64")
    parser.add_argument("--allow-code", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    return exit_status(
        lambda: print(
            json.dumps(
                verify(
                    Plan.load(arguments.plan), arguments.precision, allow_code=arguments.allow_code
                )
            )
        )
    )


if __name__ == "__main__":
    sys.exit(main())
