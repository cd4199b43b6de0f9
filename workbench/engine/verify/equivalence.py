"""Numerical equivalence of a plan to one device: same seed, compared per tensor and per rank."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.engine.data.batch_sampler import Batch
from workbench.engine.exit_codes import exit_status
from workbench.engine.precision import DTYPES
from workbench.engine.preference_pass import needs_reference_table
from workbench.engine.python_model.check_python_model import check_python_model
from workbench.engine.python_model.mixed_sequences import explained
from workbench.engine.session import Session
from workbench.engine.verify.drawn_batches import NUM_STEPS, random_batches
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.engine.verify.single_device import (
    CPU,
    ReferenceRun,
    train_on_one_device,
    trained_tokens,
    verification_weight,
)
from workbench.engine.verify.tensor_difference import (
    NOISE_EPSILONS,
    DifferenceScale,
    TensorDifference,
    check_cover,
    loss_difference,
    summarize,
    tensor_difference,
)
from workbench.engine.verify.verified_attention import attention_of_ranks, attention_of_reference
from workbench.parallel.layout import Slices
from workbench.parallel.mesh import Mesh, build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.float8_rules import verified_precision
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.schedules import Action

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "fp8": 1e-2}
"""Largest relative difference. fp32 compares weights after SGD: AdamW divides by the gradient's own
size. fp8 stands for the plan's fp8 GEMMs with all else in fp64: a value in the midst of two of fp8
that differs by a rounding becomes the other one, 1/16 off, and what follows from it with it. One
such value says nothing of a tensor, so that there root mean squares are compared, not maxima.
"""
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
            self.session.part.store.wait_for_copies()
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
        PlanError: The engine cannot run the plan, or its module mixes sequences.
        RankError: A rank failed.
        ValueError: The ranks' slices do not cover a tensor exactly once.
    """
    written = plan.resolve()
    full = in_precision(written, precision, allow_code, on_plans_device=device_of is not _cpu)
    check_python_model(full, allow_code)
    dtype = verified_dtype(precision, CPU)
    batches = list(random_batches(full))
    reference, scale = reference_and_scale(full, batches, precision, TOLERANCE[precision])
    ranks = partial(_compare, full, batches=batches, reference=reference, scale=scale, dtype=dtype)
    work = partial(ranks, device_of=device_of)
    results = run_ranks(full.world_size, work, seconds, backend)
    check_cover(reference.numel(), [owned for _, owned in results])
    differences = [d for of_rank, _ in results for d in of_rank]
    replaced = replaced_fields(written, full, precision)
    return explained(summarize(differences, precision, TOLERANCE[precision], replaced), full)


def reference_and_scale(
    plan: ResolvedPlan,
    batches: list[Batch],
    precision: str,
    tolerance: float,
    device: torch.device = CPU,
) -> tuple[ReferenceRun, DifferenceScale]:
    """What one device computes, and what differences from it are relative to.

    Args:
        plan: The plan as it is verified (`in_precision`).
        batches: Of each step, [global_batch, sequence_length].
        precision: Of the verification.
        tolerance: Of relative differences.
        device: The one device.
    """
    dtype = verified_dtype(precision, device)
    train = partial(train_on_one_device, plan, device=device)
    kernel = attention_of_reference(plan, dtype, device)
    reference = train(batches, dtype, attention=kernel, float8=precision == "fp8")
    exact = reference
    if precision != "fp64":
        kernel = attention_of_reference(plan, torch.float64, device)
        exact = train(batches[:1], torch.float64, attention=kernel)
    epsilon = torch.finfo(dtype).eps
    scale = DifferenceScale(
        tolerance,
        epsilon,
        reference.largest_gradient,
        exact.rounding_only(),
        plan.training.optimizer,
        NUM_STEPS,
        mean_square=precision == "fp8",
    )
    return reference, scale


def in_precision(
    plan: ResolvedPlan, precision: str, allow_code: bool, on_plans_device: bool = False
) -> ResolvedPlan:
    """The plan as it is verified: in `precision` throughout, with SGD except in fp64.

    No plan can say fp64: the fields say fp32, which has no master weights, and the session's dtype
    overrides them. In bf16, gradients and optimizer state are fp32.

    Args:
        plan: The plan as it is run.
        precision: Of the verification.
        allow_code: Run a model that is given as Python.
        on_plans_device: Whether ranks are on the plan's device, whose attention kernels depend on
            the dtype; else on CPUs.
    """
    require(plan, "run", allow_code)
    if (plan.strategy.precision == "fp8") != (precision == "fp8"):
        verified_precision(plan, precision, "cpu")
    stored = precision if precision in ("bf16", "fp8") else "fp32"
    changes: dict[str, Any] = {"strategy.precision": stored, "strategy.gradient_dtype": "fp32"}
    changes |= {"training.optimizer.moments": "fp32", "training.optimizer.master": "auto"}
    if precision != "fp64":
        changes["training.optimizer.name"] = "sgd"
    if on_plans_device and plan.code is None:
        changes["strategy.attention"] = attention_of_ranks(plan, precision)
    return plan.with_fields(**changes)


def replaced_fields(
    plan: ResolvedPlan, verified: ResolvedPlan, precision: str, on_gpu: bool = False
) -> dict[str, dict[str, str]]:
    """Dotted plan field -> its value in the plan and in the verification, where they differ.

    Args:
        plan: The plan as it is run.
        verified: The plan as it is verified (`in_precision`).
        precision: Of the verification.
        on_gpu: Whether it is on GPUs, which accumulate in fp32.
    """
    optimizer = plan.training.optimizer
    accumulated = "fp64" if precision in ("fp64", "fp8") and not on_gpu else "fp32"
    name = optimizer.name if precision == "fp64" else "sgd"
    pairs = {
        "strategy.precision": (plan.strategy.precision, precision),
        "strategy.gradient_dtype": (plan.strategy.gradient_dtype, accumulated),
        "training.optimizer.moments": (optimizer.moments, accumulated),
        "training.optimizer.name": (optimizer.name, name),
        "strategy.attention": (plan.strategy.attention, verified.strategy.attention),
    }
    return {
        field: {"plan": written, "verified": used}
        for field, (written, used) in pairs.items()
        if written != used
    }


def _compare(
    plan: ResolvedPlan,
    rank: int,
    batches: list[Batch],
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
    batches: list[Batch],
    reference: ReferenceRun,
    scale: DifferenceScale,
    dtype: torch.dtype | None,
) -> tuple[list[TensorDifference], dict[str, int]]:
    """Train this rank's part of the plan, and compare it with one device. Called by all ranks.

    Args:
        plan: The plan as it is verified.
        mesh: This rank's place.
        device: This rank's.
        batches: Of each step, [global_batch, sequence_length].
        reference: What one device computed, on CPU.
        scale: What differences are relative to.
        dtype: Of parameters, activations and gradients; None: the plan's own.

    Returns:
        The differences of this rank, and how many entries of each tensor it owns.
    """
    rank = mesh.rank
    session = _verification_session(plan, mesh, device, dtype)
    recorder = _Recorder(session)
    shares = [_share(session, batch, device) for batch in batches]
    references = (
        [session.reference_log_probs(tokens, targets) for tokens, targets, _ in shares]
        if needs_reference_table(plan)
        else []
    )
    losses: list[Tensor] = []
    for i, (tokens, targets, starts) in enumerate(shares):
        if references:
            session.set_reference(references[i])
        trained = trained_tokens(batches[i].targets)
        step = session.step(i, tokens, targets, recorder, trained_tokens=trained, starts_MBT=starts)
        losses.append(step.loss)
    weights, layouts = session.part.store.values, session.part.store.layouts

    def differences() -> Iterator[TensorDifference]:
        for i, (mine, theirs) in enumerate(zip(losses, reference.losses)):
            yield loss_difference(i, rank, mine.item(), theirs)
        for name, layout in layouts.items():
            yield tensor_difference(
                "gradients", layout, rank, recorder.gradients[name], reference.gradients, scale
            )
            yield tensor_difference(
                "weights", layout, rank, weights[name], reference.weights, scale
            )

    owned: Counter[str] = Counter()
    for layout in layouts.values():  # a tensor's tiles are several
        owned[layout.name] += layout.num_elements() * layout.is_owner(mesh)
    return list(differences()), owned


def _verification_session(
    plan: ResolvedPlan, mesh: Mesh, device: torch.device, dtype: torch.dtype | None
) -> Session:
    session = Session.build(plan, mesh, device, dtype, drawer=None)
    with torch.no_grad():
        store, state = session.part.store, session.optimizer.state()
        values, layouts = store.values | store.frozen_values, store.layouts | store.frozen_layouts
        for name, layout in layouts.items():
            value = values[name]
            if name in session.part.stored_parts:
                continue
            weight = verification_weight(layout.name, layout.shape, plan.training.seed, value.dtype)
            value.copy_(layout.take(weight))
            if name in state and (master := state[name].get("master")) is not None:
                master.copy_(value)
        session.part.fill_stored(partial(_verification_slices, plan.training.seed))
        store.gather_params()
    return session


def _verification_slices(
    seed: int, into: Tensor, name: str, shape: tuple[int, ...], slices: Slices
) -> None:
    weight = verification_weight(name, shape, seed, into.dtype)
    into.copy_(weight[tuple(slice(*bounds) for bounds in slices)])


def _share(session: Session, batch: Batch, device: torch.device) -> Batch:
    """This rank's sequences of a batch, [num_microbatches, B, T]."""
    share = torch.tensor(session.share.samples())
    tokens, targets = (x[share].to(device) for x in batch[:2])
    return Batch(tokens, targets, None if batch.starts is None else batch.starts[share].to(device))


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

    def verified() -> None:
        plan = Plan.load(arguments.plan).resolve()
        # The first backward starts a thread for every GPU that it sees, and a process with those
        # must not fork ranks.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        print(json.dumps(verify(plan, arguments.precision, allow_code=arguments.allow_code)))

    return exit_status(verified)


if __name__ == "__main__":
    sys.exit(main())
