"""Each sequence's reference is computed once, and beside the same others where a run resumes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.engine.reference_file import (
    FILE,
    read_reference,
    reference_identity,
    write_reference,
)
from workbench.engine.reference_table import ReferenceTable
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

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


def test_what_is_known_is_not_computed_again() -> None:
    """Of batch (2, 3, 8, 9) the first two are known, by another mesh's numbers: they stay."""
    known = torch.full((12,), -torch.inf)
    known[[0, 1, 2, 3, 6, 7]] = torch.arange(6.0)
    found = Computed([0, 1, 2, 3])
    found.table.take("train", known)
    found.table.compute("train", BATCHES[:2])
    assert found.batches == []
    found.table.compute("train", BATCHES)
    assert found.batches == [[2, 3, 8, 9]]
    assert found.table.get("train", BATCHES[2]).tolist() == [[0.0, 1.0, 10.75, 11.75]]
    assert found.table.get("train", BATCHES[3]).tolist() == [[2.0, 3.0, 2.0, 3.0]]


def test_a_table_of_another_text_is_not_taken() -> None:
    found = Computed([0, 1, 2, 3])
    found.table.take("train", torch.zeros(11))
    found.table.compute("train", BATCHES)
    assert found.batches == [[6, 7, 0, 1], [2, 3, 8, 9]]


def test_a_file_gives_what_was_written_or_nothing(tmp_path: Path) -> None:
    tables = {"train": torch.tensor([-1.5, -torch.inf]), "holdout": torch.tensor([-2.5])}
    assert read_reference(tmp_path, "a") == {}
    write_reference(tmp_path / "made", "a", tables)
    read = read_reference(tmp_path / "made", "a")
    assert {name: each.tolist() for name, each in read.items()} == {
        "train": [-1.5, -torch.inf],
        "holdout": [-2.5],
    }
    assert read_reference(tmp_path / "made", "b") == {}
    path = tmp_path / "made" / FILE
    content = path.read_bytes()
    for damaged in (content[:-1], content[:-1] + b"\x7f", b"", b"\xff" * 64):
        path.write_bytes(damaged)
        assert read_reference(tmp_path / "made", "a") == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"finetune.seed": 1},
        {"finetune.sequence_length": 64},
        {"strategy.precision": "bf16"},
        {"corpus.holdout": 0.1},
        {"corpus.sha256": "1" * 64},
        {"finetune.base": "/weights", "finetune.base_sha256": "1" * 64},
    ],
)
def test_another_reference_has_another_identity(changes: dict[str, Any]) -> None:
    assert reference_identity(made()) == reference_identity(made({"finetune.steps": 7}))
    assert reference_identity(made(changes)) not in (None, reference_identity(made()))


def test_what_no_hash_names_has_no_identity() -> None:
    assert reference_identity(made({"corpus.sha256": None})) is None
    assert reference_identity(made({"finetune.base": "/weights"})) is None


def made(changes: dict[str, Any] | None = None) -> ResolvedPlan:
    written = {
        "finetune.method": "full",
        "finetune.preference": {"beta": 0.1},
        "corpus.format": "preferences",
        "corpus.sha256": "0" * 64,
        "strategy.precision": "fp32",
    }
    return Plan.of("tiny", gpu="local", set=written).resolve().with_fields(**(changes or {}))


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


def ranks_known(rank: int) -> tuple[list[list[int]], list[list[float]]]:
    """The first of two data ranks has read what a run before computed."""
    found = Computed([0, 1] if rank == 0 else [2, 3])
    known = torch.full((12,), -torch.inf)
    known[[6, 7, 0, 1]] = torch.arange(4.0)
    found.table.take("train", known if rank == 0 else None)
    found.table.compute("train", BATCHES)
    tables = [found.table.get("train", batch).flatten().tolist() for batch in BATCHES[1:]]
    return found.batches, tables


def test_ranks_agree_on_what_one_of_them_knows() -> None:
    first, second = run_ranks(2, ranks_known, seconds=60)
    assert first == ([[2, 3, 8, 9]], [[4.75, 5.75], [2.0, 3.0], [4.75, 5.75]])
    assert second == ([[2, 3, 8, 9]], [[0.0, 1.0], [10.75, 11.75], [4.75, 5.75]])
