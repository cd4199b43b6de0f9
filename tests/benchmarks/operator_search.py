"""Searches of operator strategies: their gap to the optimum on drawn graphs, and their CPU seconds
on 100 layers of 16 operators. `python -m tests.benchmarks.operator_search`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from tests.planner.drawn_graphs import drawn_graph
from workbench.plan.model.model_shape import Shape
from workbench.planner.autoshard import TensorBytes, ideal_machine
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.graph_pricing import GraphPricing
from workbench.planner.autoshard.layer_operators import model_graph
from workbench.planner.autoshard.strategy_choice import SearchMode, choose

GRAPHS = range(10_000, 10_200)
MESHES = ((2, 2, 2, 2), (4, 8, 8, 2))
SHAPE = Shape(layers=200, hidden=8192, heads=64, ffn=28672, vocab=128256, tied=True)
"""200 blocks of 8 operators are 100 layers of 16."""


def main() -> None:
    """Print both tables."""
    gaps: dict[str, list[float]] = {"recursive_programming": [], "sharding_propagation": []}
    for seed in GRAPHS:
        for mode, gap in _gaps(seed):
            gaps[mode].append(gap)
    print(f"Gap to the optimum on {len(GRAPHS)} drawn graphs, 8 ranks (estimated)")
    for mode, found in gaps.items():
        optimal = sum(gap < 1e-9 for gap in found)
        print(
            f"  {mode}: optimal on {optimal}, median {statistics.median(found):.2%}, mean "
            f"{statistics.mean(found):.2%}, 90 % within {sorted(found)[len(found) * 9 // 10]:.1%}, "
            f"worst {max(found):.1%}"
        )
    print(f"CPU seconds, {SHAPE.layers // 2} layers of 16 operators, each with its own choice")
    for mesh in MESHES:
        for mode, seconds, total in _speeds(mesh):
            print(f"  {'x'.join(map(str, mesh))} {mode}: {seconds:.2f} s; finds {total:.4g} s")


def _gaps(seed: int) -> Iterator[tuple[str, float]]:
    """Relative differences from the least time; propagation starts from one operator's optimum."""
    machine = ideal_machine(1e14, 10 ** (8 + seed % 4), 1e-6, 1e12)
    graph, pricing = (
        drawn_graph(seed),
        GraphPricing(logical_mesh(8, machine), machine, TensorBytes()),
    )
    exact = choose(graph, pricing, {}, "dynamic_programming")
    best = exact.priced.problem.total_cost(exact.picked)
    gemms = [i for i, operator in enumerate(graph.operators) if operator.kind == "MatMul"]
    first = gemms[0] if gemms else 0
    pin = {f"op{first}": exact.priced.options[first][exact.picked[first]].form}
    modes: tuple[tuple[SearchMode, dict[str, object]], ...]
    modes = (("recursive_programming", {}), ("sharding_propagation", dict(pin)))
    for mode, fixed in modes:
        found = choose(graph, pricing, fixed, mode)
        yield mode, found.priced.problem.total_cost(found.picked) / best - 1


def _speeds(mesh: tuple[int, ...]) -> Iterator[tuple[str, float, float]]:
    links = (25e9, 50e9, 100e9, 400e9), (1e-5, 1e-5, 6e-6, 6e-6)
    machine = ideal_machine(4e14, *links, 2e12)
    modes: tuple[SearchMode, ...] = ("dynamic_programming", "recursive_programming")
    for mode in modes:
        start = time.process_time()
        graph = model_graph(SHAPE, 1024, 2048, fused=True, runs=(1,) * SHAPE.layers)
        pricing = GraphPricing(logical_mesh(mesh, machine), machine, TensorBytes())
        found = choose(graph, pricing, {}, mode)
        spent = time.process_time() - start
        yield mode, spent, found.priced.problem.total_cost(found.picked)


if __name__ == "__main__":
    main()
