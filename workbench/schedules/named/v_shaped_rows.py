"""Rows of V-shaped schedules: two chunks a rank, one on the way down the ranks, one on the way
up.
"""

from __future__ import annotations

from collections import Counter

from workbench.schedules.action import Action

Steps = list[tuple[int, str]]
"""(repetitions, words). A word is a kind and which of the rank's chunks, such as `F0`; a bare `W`
takes the oldest weight gradient of either.
"""


def v_stages(rank: int, ranks: int) -> tuple[int, int]:
    """The two stages of a rank: one on the way down the V, one on the way up."""
    return rank, 2 * ranks - 1 - rank


def numbered_actions(stages: tuple[int, int], steps: Steps) -> list[Action]:
    """The actions of `steps`, where each kind of each chunk takes its microbatches in order."""
    row: list[Action] = []
    count: Counter[tuple[str, int]] = Counter()
    waiting: list[Action] = []
    for word in (word for times, words in steps for word in words.split() * times):
        if word[0] == "W":
            action = next(w for w in waiting if word == "W" or w.stage == stages[int(word[1])])
            waiting.remove(action)
        else:
            # B and I are both the microbatch's backward: they share their count.
            stage, key = stages[int(word[1])], ("F" if word[0] == "F" else "I", int(word[1]))
            action = Action(stage, word[0], count[key])
            count[key] += 1
            waiting += [Action(stage, "W", action.microbatch)] if word[0] == "I" else []
        row.append(action)
    return row
