"""What is compiled before the first step is what the first step runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.sweep import MOE, UNEVEN
from workbench.engine.kernel_warm_up import compile_kernels
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.kernels import cross_entropy, fused_seams
from workbench.parallel.mesh import CPU, build_mesh
from workbench.plan.resolved_plan import ResolvedPlan

SEAMS = {
    "add_norm": [fused_seams],
    "rope": [fused_seams],
    "activate": [fused_seams],
    "dropout_add": [fused_seams],
    "linear_cross_entropy": [fused_seams],
    "cross_entropy": [fused_seams, cross_entropy],
}
"""Function that a fused seam calls -> the modules that call it."""
Launch = tuple[Any, ...]
KERNELS = "compiled"
"""Of which CPU ranks replace every seam, as GPUs do; fused ones leave dropout plain there."""


class Launches:
    """Notes what seams are called with: all that kernels are specialised on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: set[Launch] = set()
        for name, modules in SEAMS.items():
            for module in modules:
                monkeypatch.setattr(module, name, self._noting(name, getattr(module, name)))

    def _noting(self, name: str, run: Any) -> Any:
        def noting(*args: Any, **more: Any) -> Any:
            tensors = [
                (tuple(x.shape[-2:] if name == "rope" else x.shape[-1:]), x.dtype)
                for x in args
                if isinstance(x, torch.Tensor) and x.is_floating_point()
            ]
            absent = [i for i, x in enumerate(args) if x is None]
            self.found.add((name, str(tensors), str(absent)))
            # What is called counts, not how: compiling for CPU would take minutes.
            given = ["eager" if isinstance(x, str) and x == KERNELS else x for x in args]
            return run(*given, **{k: "eager" if k == "kernels" else v for k, v in more.items()})

        return noting


def launches(made: ResolvedPlan, rank: int) -> tuple[set[Launch], set[Launch], bool]:
    """(of the warm-up, of a first step, whether the former left everything as it was)."""
    with pytest.MonkeyPatch.context() as patch:
        noted = Launches(patch)
        session = Session.build(made, build_mesh(made, rank), CPU)
        values = {name: value.clone() for name, value in session.part.store.values.items()}
        drawn = torch.get_rng_state()
        list(compile_kernels(made, list(session.part.stages.values()), CPU))
        same = all(torch.equal(values[n], v) for n, v in session.part.store.values.items())
        same = same and torch.equal(drawn, torch.get_rng_state())
        early, noted.found = noted.found, set()
        shape = (made.num_microbatches, made.training.micro_batch, made.training.sequence_length)
        tokens = torch.zeros(shape, dtype=torch.long)
        session.step(0, tokens, tokens)
        return early, noted.found, same


MESHES = [  # tensor x pipeline x data
    ((1, 1, 1), LLAMA, {}),
    ((2, 1, 1), LLAMA, {"training.dropout": 0.1}),
    ((2, 1, 1), UNEVEN, {"strategy.tensor.sequence": True}),
    ((1, 2, 1), {**GPT, "tied": True}, {"training.dropout": 0.1}),
    ((1, 1, 2), MOE, {"strategy.data.zero": 3}),
    ((2, 2, 1), GPT, {"strategy.recompute": "full"}),
]


@pytest.mark.parametrize(
    ("mesh", "shape", "changes"),
    [MESHES[0], *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in MESHES[1:])],
    ids=str,
)
def test_a_first_step_runs_nothing_that_was_not_compiled(
    mesh: tuple[int, int, int], shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    made = plan(*mesh, shape=shape, changes={"strategy.kernels": KERNELS, **changes}).resolve()
    for rank, (early, first, same) in enumerate(run_ranks(made.world_size, Work(made), 180)):
        assert same
        assert first and first <= early, (rank, first - early)


class Work:
    def __init__(self, made: ResolvedPlan) -> None:
        self.made = made

    def __call__(self, rank: int) -> tuple[set[Launch], set[Launch], bool]:
        return launches(self.made, rank)


def test_too_little_memory_leaves_it_to_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(shape=LLAMA, changes={"strategy.kernels": KERNELS}).resolve()
    session = Session.build(made, build_mesh(made, 0), CPU)

    def full(*args: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    stages = list(session.part.stages.values())
    assert list(compile_kernels(made, stages, CPU)) == ["a layer", "the loss"]
    assert "the first step does" in capsys.readouterr().out
