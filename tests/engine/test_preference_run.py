"""Runs on preference pairs: records, evaluation, and a reference that a resumed run has too."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_loop import Records, refusal, trained
from workbench.engine.reference_file import FILE

PAIRS: dict[str, Any] = {
    "corpus__format": "preferences",
    "corpus__tokenizer": "bytes",
    "finetune__preference": {"beta": 0.5},
    "finetune__sequence_length": 128,
    "finetune__global_batch": 4,
    "finetune__steps": 4,
    "finetune__optimizer": {"learning_rate": 1e-2, "decay": "constant"},
    "finetune__evaluation": {"every": 2, "batches": 1},
    "checkpoint__every": 2,
}
FULL = PAIRS | {"finetune__method": "full"}
LORA = PAIRS | {"finetune__lora": {"rank": 4}}
REWARDS = ("chosen_reward", "rejected_reward", "reward_margin", "accuracy")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = (
        f'{{"prompt": "What is {i}?", "chosen": "It is {i}.", "rejected": "I say {i * i} or not."}}'
        for i in range(300)
    )
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    return tmp_path / "pairs.jsonl"


def found(records: Records, kind: str) -> list[tuple[float, ...]]:
    """(loss, rewards) of every step, or evaluation."""
    return [tuple(r[k] for k in ("loss", *REWARDS)) for r in records if r["kind"] == kind]


def referred(records: Records) -> bool:
    """Whether a run computed log-probabilities of the reference beforehand."""
    return any("of the reference" in (r.get("detail") or "") for r in records)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_resumed_run_has_the_same_reference(tmp_path: Path, pairs: Path, method: str) -> None:
    changes = FULL if method == "full" else LORA
    code, uninterrupted = trained(tmp_path / "all", pairs, **changes)
    assert code == 0, refusal(tmp_path / "all")
    steps, held_out = found(uninterrupted, "step"), found(uninterrupted, "evaluation")
    # The policy is the reference before the first update: log 2, no reward, and nobody wins.
    assert steps[0] == pytest.approx((0.693147, 0, 0, 0, 0), abs=1e-4)
    assert steps[3] != pytest.approx(steps[0], abs=1e-3)
    assert len(held_out) == 2 and held_out[1][3] == pytest.approx(held_out[1][1] - held_out[1][2])
    halfway = str(tmp_path / "all" / "checkpoints" / "step-00000002")
    code, resumed = trained(tmp_path / "resumed", pairs, **changes, checkpoint__load=halfway)
    assert code == 0, refusal(tmp_path / "resumed")
    assert found(resumed, "step") == steps[2:]
    assert found(resumed, "evaluation") == held_out[1:]
    assert not referred(resumed) and referred(uninterrupted) == (method == "full")


def test_a_reference_that_is_gone_is_computed_again(tmp_path: Path, pairs: Path) -> None:
    code, uninterrupted = trained(tmp_path / "all", pairs, **FULL)
    assert code == 0, refusal(tmp_path / "all")
    checkpoints = tmp_path / "all" / "checkpoints"
    (checkpoints / FILE).unlink()
    halfway = str(checkpoints / "step-00000002")
    code, resumed = trained(tmp_path / "resumed", pairs, **FULL, checkpoint__load=halfway)
    assert code == 0, refusal(tmp_path / "resumed")
    assert referred(resumed) and found(resumed, "step") == found(uninterrupted, "step")[2:]
