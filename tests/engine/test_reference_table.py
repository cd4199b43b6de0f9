"""Each sequence's reference is computed once, and beside the same others where a run resumes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.engine.reference_table import ReferenceTable
from workbench.engine.verify.forked_ranks import run_ranks

CPU = torch.device("cpu")
BATCHES = [np.array(batch) for batch in ([6, 7, 0, 1], [2, 3, 6, 7], [0, 1, 8, 9], [2, 3, 2, 3])]


class Computed:
    """What a table computes: a number of each sequence and of where in which batch it was."""

    def __init__(self, samples: list[int], has_head: bool = True) -> None:
        self.samples, self.has_head = np.array([samples]), has_head
        self.batches: list[list[int]] = []
        self.progress: list[tuple[int, int]] = []
        text: Any = SimpleNamespace(
            global_batch=4, samples=self.samples, num_sequences=lambda part: 12
        )
        self.table = ReferenceTable(text, self.compute, CPU, lambda *at: self.progress.append(at))

    def compute(self, part: str, numbers: np.ndarray) -> Tensor | None:
        self.batches.append(numbers.tolist())
        beside = 0.125 * numbers.sum()
        return torch.tensor(numbers[self.samples] + beside) if self.has_head else None


def test_repeated_sequences_are_computed_once() -> None:
    found = Computed([0, 1, 2, 3])
    found.table.compute("train", iter(BATCHES))
    assert found.batches == [[6, 7, 0, 1], [2, 3, 8, 9]]
    assert found.progress == [(1, 2), (2, 2)]
    assert found.table.get("train", BATCHES[1]).tolist() == [[4.75, 5.75, 7.75, 8.75]]


def test_a_resumed_run_computes_what_is_left_beside_the_same_others() -> None:
    full, resumed = Computed([0, 1, 2, 3]), Computed([0, 1, 2, 3])
    full.table.compute("train", BATCHES)
    resumed.table.compute("train", BATCHES, first=3)
    assert resumed.batches == [[2, 3, 8, 9]]
    assert torch.equal(*(each.table.get("train", BATCHES[3]) for each in (full, resumed)))


def test_what_fills_the_last_batch_changes_nothing() -> None:
    alone, filled = Computed([0, 1, 2, 3]), Computed([0, 1, 2, 3])
    alone.table.compute("holdout", BATCHES[:1])
    filled.table.compute("holdout", BATCHES[:2])
    assert filled.batches == [[6, 7, 0, 1], [2, 3, 6, 7]]
    assert torch.equal(*(each.table.get("holdout", BATCHES[0]) for each in (alone, filled)))


def ranks_reference(rank: int) -> list[list[float]]:
    """Two data ranks of each of two stages, of which the last has the head."""
    found = Computed([0, 1] if rank % 2 == 0 else [2, 3], has_head=rank >= 2)
    found.table.compute("train", BATCHES)
    return [found.table.get("train", batch).flatten().tolist() for batch in BATCHES[1:]]


def test_ranks_share_what_they_computed() -> None:
    """In a later batch a sequence is another rank's; a stage without the head has it too."""
    for rank, found in enumerate(run_ranks(4, ranks_reference, seconds=60)):
        right = [[4.75, 5.75], [1.75, 2.75], [4.75, 5.75]]
        if rank % 2:
            right = [[7.75, 8.75], [10.75, 11.75], [4.75, 5.75]]
        assert found == right
