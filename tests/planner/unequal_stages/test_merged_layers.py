"""Long layer profiles with runs of layers as one: sums before every cut stay exact."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.planner.unequal_stages import drawn
from workbench.planner.unequal_stages.memory import backward_bytes
from workbench.planner.unequal_stages.merged_layers import (
    MergedLayers,
    layers_before,
    merged_layers,
)
from workbench.planner.unequal_stages.parameter_bytes import stage_parameter_bytes
from workbench.planner.unequal_stages.stage_times import Batch, Stage

SUMS = ("forward", "backward", "parameters", "activations", "kept", "kept_input", "crossing")


def test_sums_before_every_cut_are_exact() -> None:
    profile = drawn.profile(random.Random(3), 1000)
    merged = merged_layers(profile, 50)
    assert isinstance(merged, MergedLayers) and 40 <= len(merged.layers) <= 51
    for name in SUMS:
        ours, theirs = getattr(merged, name), getattr(profile, name)
        assert len(ours) == len(merged.layers) + 1
        assert [theirs[layers_before(merged, n)] for n in range(len(ours))] == list(ours)
    assert sum(layer.forward_s for layer in merged.layers) == pytest.approx(profile.forward[-1])
    assert layers_before(merged, len(merged.layers)) == 1000


def test_copies_of_tied_parameters_are_those_of_the_layers() -> None:
    draw = random.Random(6)
    profile = drawn.profile(draw, 200)
    layers = list(profile.layers)
    for i in draw.sample(range(1, 200), 20):
        tied = ((f"n{draw.randrange(i)}", draw.uniform(1, 9)),)
        layers[i] = replace(layers[i], tied=tied)
    profile = replace(profile, layers=tuple(layers))
    merged = merged_layers(profile, 20)
    ends = np.arange(len(merged.layers) + 1)
    cuts = np.array([layers_before(merged, end) for end in ends])
    own, every = (
        np.triu(stage_parameter_bytes(one, at[:, None], at))
        for one, at in ((merged, ends), (profile, cuts))
    )
    assert 0 < len(merged.ties) < 20 and own == pytest.approx(every)


def test_a_run_needs_what_its_neediest_layer_does() -> None:
    draw = random.Random(7)
    plain = drawn.profile(draw, 200)
    layers = [replace(layer, backward_bytes=draw.uniform(1e6, 3e7)) for layer in plain.layers]
    profile = replace(plain, layers=tuple(layers))
    merged = merged_layers(profile, 20)
    for first, end in [(0, 3), (4, 9), (10, len(merged.layers))]:
        cuts = [layers_before(merged, n) for n in (first, end)]
        own, every = (
            backward_bytes(one, Stage(*at, (1,)), Batch(1, 1))
            for one, at in ((merged, (first, end)), (profile, cuts))
        )
        assert own == pytest.approx(every) and every > 0


def test_no_run_takes_much_more_than_its_share() -> None:
    """A run goes from one share to at most the end of the next, and has a layer of each size."""
    profile = drawn.profile(random.Random(4), 1000)
    merged = merged_layers(profile, 50)
    seconds = [a + b for a, b in zip(merged.forward, merged.backward)]
    assert max(b - a for a, b in pairwise(seconds)) < 4 * seconds[-1] / 50


def test_a_short_profile_stays_as_it_is() -> None:
    profile = drawn.profile(random.Random(5), 30)
    assert merged_layers(profile) is profile and layers_before(profile, 7) == 7
