"""Drawing initial weights: `python -m tests.benchmarks.weight_drawing [--numel N] [--rounds N]`.

On one CPU thread, numbers drawn by counter a second beside torch's `normal_` with a generator,
which is what drew them before: in turn, the best of all rounds each. Then what every rank of a few
meshes draws of a model's numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from workbench.engine.session import Session
from workbench.models.counter_normal import CPU_CHUNK_NUMEL, NormalDrawer
from workbench.parallel.mesh import build_mesh
from workbench.plan.schema import Plan
from workbench.rehearsal.fake_process_group import fake_tensors, fake_world, without_cached_results

COLUMNS, DEVIATION = 4096, 0.02
STRATEGIES = (
    (1, "single"),
    (8, "ddp"),
    (8, "zero-1"),
    (8, "zero-3"),
    (8, "megatron-tp"),
    (8, "megatron-3d"),
)


class CountingDrawer(NormalDrawer):
    """Counts numbers instead of drawing them."""

    drawn = 0

    def fill_matrix(
        self, into_RC: Tensor, row: int, column: int, key: int, deviation: float
    ) -> None:
        """Count a matrix."""
        CountingDrawer.drawn += into_RC.numel()


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds that a call takes: other processes disturb them less than those on the clock."""
    began = time.process_time()
    work()
    return time.process_time() - began


def rates(numel: int, rounds: int) -> tuple[float, float]:
    """Numbers a second: (by counter, by torch's generator)."""
    rows = numel // COLUMNS
    into = torch.empty(rows, COLUMNS)
    drawer, generator = NormalDrawer(into.device, CPU_CHUNK_NUMEL), torch.Generator()
    shape = (rows, COLUMNS)

    def by_counter() -> None:
        drawer.fill(into, [(0, rows), (0, COLUMNS)], shape, 1, DEVIATION)

    def by_generator() -> None:
        into.normal_(0.0, DEVIATION, generator=generator)

    pairs = [(seconds(by_counter), seconds(by_generator)) for _ in range(rounds + 1)][1:]
    counter, torchs = (min(times) for times in zip(*pairs))
    return into.numel() / counter, into.numel() / torchs


def drawn_by_rank(model: str) -> Iterator[tuple[str, int, int, int]]:
    """(strategy, ranks, numbers that the busiest rank draws, that all draw together)."""
    for gpus, strategy in STRATEGIES:
        plan = Plan.of(model, gpu="h100-sxm-80gb", gpus=gpus, strategy=strategy).resolve()
        counts = []
        for rank in range(gpus):
            CountingDrawer.drawn = 0
            with fake_world(rank, gpus):
                mesh = build_mesh(plan, rank)
                with fake_tensors() as mode, without_cached_results(mode):
                    Session.build(plan, mesh, torch.device("cpu"), drawer=CountingDrawer)
            counts.append(CountingDrawer.drawn)
        yield strategy, gpus, max(counts), sum(counts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=2**24)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="llama-3-8b")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counter, torchs = rates(arguments.numel, arguments.rounds)
    print(
        f"measured, one thread: {counter / 1e6:.0f} million numbers a second by counter, "
        f"{torchs / 1e6:.0f} by torch's normal_: {counter / torchs:.2f} of it"
    )
    print(f"counted, {arguments.model}: numbers drawn by the busiest rank, and by all")
    for strategy, ranks, most, together in drawn_by_rank(arguments.model):
        print(f"{strategy:>12} on {ranks}: {most / 1e9:7.3f} of {together / 1e9:7.3f} billion")


if __name__ == "__main__":
    main()
