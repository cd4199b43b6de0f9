"""Colours must differ for eyes without one kind of cone, and be words of the same vocabulary."""

import itertools

import numpy as np
import pytest

from workbench.lab import palette
from workbench.profile import CATEGORIES

# Full dichromacy in linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.0.
EYES = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, eye: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(EYES[eye]) @ linear, 0, 1)
    x, y, z = np.cbrt(np.maximum(XYZ @ seen / np.array([0.9505, 1.0, 1.089]), 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", EYES)
def test_neighbours_in_a_stack_differ(eye: str) -> None:
    for first, second in itertools.pairwise(palette.MEMORY_COLOURS.values()):
        assert np.linalg.norm(lab(first, eye) - lab(second, eye)) > 20, (first, second)


@pytest.mark.parametrize("eye", EYES)
def test_forward_and_backward_and_the_first_runs_differ(eye: str) -> None:
    colours = [palette.ACTION_STYLES["F"][1], palette.ACTION_STYLES["B"][1]]
    for first, second in [colours, *itertools.combinations(palette.SERIES_COLOURS[:4], 2)]:
        assert np.linalg.norm(lab(first, eye) - lab(second, eye)) > 15, (first, second)


def test_every_category_has_a_colour() -> None:
    assert set(CATEGORIES) <= set(palette.MEMORY_COLOURS)


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("all_reduce", "all-reduce"),
        ("reduce_scatter_tensor", "reduce-scatter"),
        ("isend", "send"),
        ("?", "other"),
    ],
)
def test_collectives_have_one_name(written: str, kind: str) -> None:
    assert palette.collective_kind(written) == kind


def test_a_part_of_a_step_has_a_colour_of_its_own() -> None:
    assert len(set(palette.STEP_PART_COLOURS.values())) == len(palette.STEP_PART_COLOURS)


def test_a_rank_has_its_colour_whichever_ranks_are_shown() -> None:
    first, again = palette.line_styles([0, 1]), palette.line_styles([1, 0])
    assert [one[::-1] for one in first] == list(again)
    assert len(set(zip(*map(map, (str, str), palette.line_styles(range(32)))))) == 32
