"""Colours and words of every chart, in one place, so that a category looks the same wherever it is
drawn.

Built on Okabe and Ito's colour-blind-safe set; what neighbours in a stack differs in lightness too
(a test simulates protanopia, deuteranopia and tritanopia). Blues are what a rank holds between
steps, warm colours come and go with the batch, greens are copies made to communicate, greys are the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.vocabulary import SHOWN_NAMES

GUESS = "your guess"
"""Source of a number that a reader wrote down before looking."""

MEMORY_COLOURS: dict[str, str] = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#5B4BB5",
    "master": "#B9ADE8",
    "activations": "#D55E00",
    "logits": "#F2C45A",
    "gathered": "#00765A",
    "communication": "#66C9A9",
    "temporary": "#585858",
    "overhead": "#9C9C9C",
    "unattributed": "#D9D2C5",
    "fragmentation": "#8C6D8C",
    "outside_allocator": "#3B3B3B",
    GUESS: "#A7B0BA",
}
"""Memory category -> colour, in the order of a stack; what each is stands in `vocabulary.MEANINGS`.
A guess has no categories.
"""

ACTION_STYLES: dict[str, tuple[str, str]] = {
    "F": ("forward", "#0072B2"),
    "B": ("backward", "#E69F00"),
    "I": ("input gradient", "#F2C45A"),
    "W": ("weight gradient", "#B5651D"),
    "REFERENCE": ("reference forward", "#86A9D9"),
    "P2P": ("send / receive", "#66C9A9"),
    "SEND_F": ("send / receive", "#66C9A9"),
    "RECV_F": ("send / receive", "#66C9A9"),
    "SEND_B": ("send / receive", "#66C9A9"),
    "RECV_B": ("send / receive", "#66C9A9"),
    "UNSHARD": ("all-gather parameters", "#00765A"),
    "RESHARD": ("all-gather parameters", "#00765A"),
    "REDUCE_GRAD": ("reduce gradients", "#CC79A7"),
    "CLIP": ("clip gradients", "#B8336A"),
    "OPTIMIZER": ("optimizer", "#5B4BB5"),
    "WAIT_RECV": ("wait for a stage", "#E4DDD0"),
    "WAIT_SEND": ("wait for a stage", "#E4DDD0"),
    "WAIT": ("wait for a collective", "#7A4A10"),
}
"""Action of a schedule, or a wait (`WAIT` with the kind of collective behind it) -> what it is
called in a chart, and its colour.
"""
OTHER_ACTION_STYLE = ("other", "#9E9E9E")

COLLECTIVE_COLOURS: dict[str, str] = {
    "all-reduce": "#0072B2",
    "reduce-scatter": "#56B4E9",
    "all-gather": "#E69F00",
    "all-to-all": "#CC79A7",
    "broadcast": "#5B4BB5",
    "send": "#009E73",
    "recv": "#B8DFC9",
    "other": "#9E9E9E",
}
"""Kind of collective -> colour."""

STEP_PART_COLOURS: dict[str, str] = {
    "compute": "#56B4E9",
    "reference": "#2C7FB8",
    "communication": "#E69F00",
    "tensor_comm": "#D55E00",
    "context_comm": "#8C510A",
    "expert_comm": "#F7A8B8",
    "data_comm": "#A6D96A",
    "stall": "#3B3B3B",
    "pipeline": "#CFC6B4",
    "pipeline_comm": "#1B7837",
    "bubble": "#D9D2C5",
    "optimizer": "#5B4BB5",
    "offload": "#B9ADE8",
    "overhead": "#9C9C9C",
    "other": "#A8A8A8",
    "step time": "#7A8FA6",
}
"""Part of a step's time -> colour, in the order of a stack: an estimate's, and `COMMON_PARTS`."""
COMMON_PARTS = {
    **dict.fromkeys(
        ("tensor_comm", "context_comm", "expert_comm", "data_comm", "stall"), "communication"
    ),
    **dict.fromkeys(("pipeline_comm", "bubble"), "pipeline"),
    "overhead": "other",
}
"""Part of an estimate -> the part that a measured step has too, where it has another name: a
timeline does not tell whose collective a rank waits for.
"""
PARTS_OF_ACTIONS = {
    **dict.fromkeys(("F", "B", "I", "W"), "compute"),
    "REFERENCE": "reference",
    **dict.fromkeys(("CLIP", "OPTIMIZER"), "optimizer"),
    **dict.fromkeys(("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT"), "communication"),
    **dict.fromkeys(
        ("P2P", "SEND_F", "SEND_B", "RECV_F", "RECV_B", "WAIT_SEND", "WAIT_RECV", "idle"),
        "pipeline",
    ),
}
"""Action of a timeline, or a wait -> its part; all else is `other`."""
OTHER_PART_COLOUR = "#787878"

SERIES_COLOURS: tuple[str, ...] = (
    "#1F83C6",
    "#E69F00",
    "#0B6E4F",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#7666D0",
    "#8A8A8A",
)
"""Ranks by their number, runs of one chart by order of appearance; beyond eight they repeat with
another dash.
"""

SOURCE_COLOURS: dict[str, str] = {
    "estimated": "#56B4E9",
    "rehearsed": "#E69F00",
    "measured": "#0072B2",
}
"""Source of a number -> colour, in the order in which the three are listed."""

ANSWER_COLOURS: dict[str, str] = {
    GUESS: MEMORY_COLOURS[GUESS],
    **SOURCE_COLOURS,
    "published": "#CC79A7",
}
"""Source of an answer to a question -> colour: the reader first, the literature last."""

LIMIT_COLOUR = "#C4314B"
"""The GPU's memory, and what is beyond it."""
NEUTRAL_COLOUR = "#777777"
"""What stands for all ranks: about 4.5:1 on white, and on JupyterLab's dark background."""
TEXT_COLOUR = "#333333"
"""Words of a picture on a white page."""


def action_style(name: str) -> tuple[str, str]:
    """Title and colour of a schedule's action, or of a wait; unknown ones share one grey."""
    kind = "WAIT" if name.startswith("WAIT_") else name
    return ACTION_STYLES.get(name) or ACTION_STYLES.get(kind, OTHER_ACTION_STYLE)


def part_of_action(name: str, staged: bool) -> str:
    """Part of the step that an action of a timeline, a wait or idle time is; `staged`: among
    pipeline stages, without which transfers are between the ranks of another axis.
    """
    kind = "WAIT" if name.startswith("WAIT_") else name
    part = PARTS_OF_ACTIONS.get(name) or PARTS_OF_ACTIONS.get(kind, "other")
    if part != "pipeline" or staged:
        return part
    return "other" if name == "idle" else "communication"


def step_part_order(name: str) -> int:
    """Place of a part in a stack; parts without a colour of their own are last."""
    order = list(STEP_PART_COLOURS)
    return order.index(name) if name in order else len(order)


def line_styles(numbers: Sequence[int]) -> tuple[list[str], list[list[int]]]:
    """Colour and dash of each line by its number, the same whichever other lines a chart shows."""
    dashes = [[1, 0], [5, 2], [2, 2], [8, 2, 2, 2]]
    colours = [SERIES_COLOURS[number % len(SERIES_COLOURS)] for number in numbers]
    return colours, [dashes[number // len(SERIES_COLOURS) % len(dashes)] for number in numbers]


def collective_kind(name: str) -> str:
    """The collective's kind in the palette's words: `all_reduce` and `allreduce` are all-reduce."""
    plain = (
        name.lower()
        .replace("_", "")
        .replace("-", "")
        .replace("tensor", "")
        .replace("single", "")
        .replace("base", "")
    )
    known = {k.replace("-", ""): k for k in COLLECTIVE_COLOURS}
    return known.get(
        {"isend": "send", "irecv": "recv", "receive": "recv"}.get(plain, plain), "other"
    )


PART_LABELS = {"stall": "straggler", "overhead": "fixed overhead"}
"""Part of the step time whose key says too little -> its label."""
STEP_PART_LABELS = {"communication": "exposed communication", "pipeline": "bubble, send / receive"}
"""The same of parts that are no key."""


def category_label(name: str) -> str:
    """A category of memory in words: 'overhead' is not that of a step."""
    return SHOWN_NAMES.get(name, name)


def step_part_label(name: str) -> str:
    """A part of a step in words."""
    return STEP_PART_LABELS.get(name) or key_label(name)


def key_label(name: str) -> str:
    """A key in words: tensor_comm is exposed tensor communication."""
    if name.endswith("_comm"):
        return f"exposed {name.removesuffix('_comm')} communication"
    labels = PART_LABELS | SHOWN_NAMES
    return labels.get(name, name.replace("_", " ").replace("flops", "FLOPs"))
