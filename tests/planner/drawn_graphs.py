"""Series-parallel graphs of operators, drawn: chains and branches of GEMMs, norms and activations,
joined by additions.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import numpy as np

from workbench.plan.operators.operator_graph import (
    Operator,
    OperatorDim,
    OperatorGraph,
    OperatorTensor,
    TensorEdge,
)
from workbench.planner.autoshard.strategy_search.choice_problem import StrategyProblem

WIDTHS = (256, 512, 1024, 2048, 4096)


@dataclass
class DrawnGraph:
    """A graph as it grows; every operator has rows and one width."""

    rng: random.Random
    rows: OperatorDim
    operators: list[Operator] = field(default_factory=list)
    edges: list[TensorEdge] = field(default_factory=list)

    def add(self, kind: str, inputs: list[int], width: int, columns: int = 0) -> int:
        """An operator that reads the outputs of others; returns its number."""
        within = "inner" if kind == "MatMul" else "width"
        dims = [self.rows, OperatorDim(within, width, 1 if kind == "Norm" else width)]
        read = [OperatorTensor(f"input {i}", ("rows", within)) for i in range(max(1, len(inputs)))]
        output = OperatorTensor("output", ("rows", within))
        if kind == "MatMul":
            dims.append(OperatorDim("columns", columns, columns))
            read.append(OperatorTensor("weight", ("inner", "columns"), "parameter"))
            output = OperatorTensor("output", ("rows", "columns"))
        number = len(self.operators)
        name = f"op{number}"
        widths = (columns,) if columns else ()
        self.operators.append(
            Operator(
                name, kind, tuple(dims), tuple(read), output, gemm_widths=widths, modules=(name,)
            )
        )
        for place, source in enumerate(inputs):
            tensor = self.operators[source].output
            self.edges.append(TensorEdge(source, tensor, number, read[place]))
        return number

    def width(self, number: int) -> int:
        """Width of an operator's output."""
        operator = self.operators[number]
        return operator.dim(operator.output.dims[1])

    def step(self, source: int) -> int:
        """One operator after another."""
        kind = self.rng.choice(("MatMul", "MatMul", "Norm", "Activation"))
        columns = self.rng.choice(WIDTHS) if kind == "MatMul" else 0
        return self.add(kind, [source], self.width(source), columns)

    def branch(self, source: int, left: int) -> int:
        """Two branches of at most `left - 1` operators, and their sum; one may be the residual."""
        first = source
        for _ in range(self.rng.randint(1, left - 2)):
            first = self.step(first)
        second = source
        if self.width(first) != self.width(source):
            second = self.add("MatMul", [source], self.width(source), self.width(first))
        return self.add("Add", [first, second], self.width(first))


def drawn_graph(seed: int, most: int = 8) -> OperatorGraph:
    """A series-parallel graph of 2 to `most` operators."""
    rng = random.Random(seed)
    sequences = rng.choice((1, 2, 4, 16))
    drawn = DrawnGraph(rng, OperatorDim("rows", sequences * 512, sequences))
    last, count = drawn.add("Activation", [], rng.choice(WIDTHS)), rng.randint(2, most)
    while len(drawn.operators) < count:
        left = count - len(drawn.operators)
        last = drawn.branch(last, left) if left > 2 and rng.random() < 0.5 else drawn.step(last)
    return OperatorGraph(tuple(drawn.operators), tuple(drawn.edges))


def least_by_brute_force(problem: StrategyProblem) -> float:
    """Seconds of the best of all combinations within the limit; inf where there is none."""
    counts = [len(cost) for cost in problem.node_costs]
    picked = np.indices(counts).reshape(len(counts), -1)
    total = sum(cost[own] for cost, own in zip(problem.node_costs, picked))
    for edge in problem.edges:
        total = total + edge.costs[picked[edge.source], picked[edge.target]]
    if problem.memory_limit is not None:
        size = sum(held[own] for held, own in zip(problem.node_bytes, picked))
        total = np.where(size <= problem.memory_limit, total, np.inf)
    return float(np.min(total))


def combinations(problem: StrategyProblem) -> int:
    """Combinations of options."""
    return math.prod(len(cost) for cost in problem.node_costs)


def pairs(count: int) -> list[tuple[int, int]]:
    """All pairs of nodes."""
    return list(itertools.combinations(range(count), 2))
