"""Cutting a model into stages."""

from __future__ import annotations

from itertools import accumulate

from workbench.models import Transformer


def keep_stage(model: Transformer, stage: int, partition: list[int]) -> None:
    """Drop from `model`, in place, whatever is not of `stage`; `partition` gives the blocks of
    every stage.

    The embedding belongs to the first stage, the final norm and the head to the last.
    """
    start, stop = ([0, *accumulate(partition)][stage + i] for i in (0, 1))
    for index in list(model.blocks):
        if not start <= int(index) < stop:
            del model.blocks[index]
    if stage > 0:
        model.embedding = None
    if stage < len(partition) - 1:
        model.final_norm = model.head = None
