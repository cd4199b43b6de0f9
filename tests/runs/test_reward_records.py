"""Rewards of pairs of answers, from a step's record to the summary of a run."""

from typing import Any

import pytest

from workbench.profile import Profile
from workbench.runs.store.telemetry_frames import RECENT_STEPS, MeasuredFrames

REWARDS = {"chosen_reward": 0.5, "rejected_reward": -0.25, "reward_margin": 0.75, "accuracy": 1.0}


def measured(records: list[dict[str, Any]]) -> Profile:
    empty = dict.fromkeys(("loss", "seconds", "bytes", "data_seconds", "tokens"))
    found = MeasuredFrames("run", 1)
    for record in records:
        found.add([{"rank": 0, **empty, **record}])
    return found.profile()


def test_a_run_says_the_mean_rewards_of_its_last_steps() -> None:
    early = dict.fromkeys(REWARDS, -9.0)
    steps = [early] * 3 + [REWARDS, dict.fromkeys(REWARDS, 0.0)] * (RECENT_STEPS // 2)
    made = measured([{"kind": "step", "step": i, **each} for i, each in enumerate(steps)])
    assert made.notes["rewards"] == pytest.approx({k: v / 2 for k, v in REWARDS.items()})


def test_an_evaluation_says_the_rewards_of_held_out_pairs() -> None:
    text = {"kind": "evaluation", "step": 1, "loss": 2.0, **dict.fromkeys(REWARDS)}
    pairs = {"kind": "evaluation", "step": 2, "loss": 0.5, **REWARDS}
    made = measured([text, pairs])
    assert made.notes["evaluation"] == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 0.5} | REWARDS,
    ]
    assert "rewards" not in made.notes
