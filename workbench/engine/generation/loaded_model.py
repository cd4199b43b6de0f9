"""A model's weights on a mesh of CPU ranks, for what needs no training: perplexity, generation."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.adapters.weight_updates import WeightUpdates
from workbench.checkpoint.read_tensors import Progress
from workbench.engine.session import Session, initial_drawer
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.models import Transformer
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan


def weights_plan(
    model: str | Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    length: int = 256,
    sequences: int = 1,
) -> ResolvedPlan:
    """A plan that loads a model's weights in fp32.

    Args:
        model: A GGUF file, or a folder of Hugging Face weights.
        tensor: Tensor-parallel ranks.
        pipeline: Pipeline ranks.
        data: Data-parallel ranks.
        length: Tokens of a sequence.
        sequences: Sequences of a data-parallel rank, each a microbatch.

    Raises:
        PlanError: The model cannot be read, or is illegal on this mesh.
    """
    written = {
        "model": str(model),
        "cluster": {"gpu": "local", "gpus": tensor * pipeline * data},
        "strategy": {
            # Sequence parallelism cannot divide a single token.
            "tensor": {"size": tensor, "sequence": False},
            "pipeline": {"size": pipeline},
            "precision": "fp32",
            "kernels": "eager",
        },
        # SGD has no state beside the weights.
        "training": {
            "sequence_length": length,
            "global_batch": data * sequences,
            "micro_batch": 1,
            "optimizer": {"name": "sgd"},
        },
        "checkpoint": {"load": str(model)},
    }
    return Plan.model_validate(written).resolve()


def load_session(
    plan: ResolvedPlan,
    rank: int,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda done, of: None,
    updates: WeightUpdates | None = None,
) -> Session:
    """A rank's part of the model, on CPU, in evaluation mode, with the weights it loads.

    Args:
        plan: The plan.
        rank: This rank.
        dtype: Overrides the plan's precision.
        progress: Called with the bytes done and in all of this rank.
        updates: Adapters that are merged into the weights.

    Raises:
        PlanError: On every rank, naming what is wrong with the weights.
    """
    torch.set_num_threads(1)
    mesh = build_mesh(plan, rank)
    cpu = torch.device("cpu")
    session = Session.build(plan, mesh, cpu, dtype, drawer=initial_drawer(plan))
    SessionCheckpointer(session, Path("unused")).load(progress)
    if updates is not None:
        _merge(session, updates)
    for stage in session.part.stages.values():
        stage.eval()
    return session


def _merge(session: Session, updates: WeightUpdates) -> None:
    """Merge adapters into what this rank holds of the weights, in its dtype."""
    store = session.part.store
    for name, layout in store.layouts.items():
        for part, slices in layout.parts(store.values[name]):
            updates.apply(layout.name, slices, part.detach())
    store.gather_params()


def only_stage(session: Session) -> Transformer:
    """The model of a rank without pipeline parallelism."""
    (model,) = session.part.stages.values()
    assert isinstance(model, Transformer)
    return model
