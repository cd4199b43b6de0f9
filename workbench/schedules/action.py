"""The grammar of a schedule: one action is `[stage][kind][microbatch]`, e.g. `0F3`, `1SEND_B0`,
`2REDUCE_GRAD`.

The words are those of torch's pipelining CSV, so that its tools and ours read each other's tables.
"""

from __future__ import annotations

import re
from typing import NamedTuple

COMPUTE = ("F", "I", "W", "B")
"""Forward; input gradient; weight gradient; full backward, B = I + W."""
SENDS = ("SEND_F", "SEND_B")
RECVS = ("RECV_F", "RECV_B")
_OTHER_END = {
    "SEND_F": ("RECV_F", 1),
    "SEND_B": ("RECV_B", -1),
    "RECV_F": ("SEND_F", -1),
    "RECV_B": ("SEND_B", 1),
}
"""Kind of a transfer -> (kind of its other end, stages from here to there)."""
WHOLE_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""Actions on a stage's parameters or gradients, which belong to no microbatch."""
KINDS = COMPUTE + SENDS + RECVS + WHOLE_STAGE

OVERLAP = "OVERLAP_F_B"
"""A cell `(3F1;4B0)OVERLAP_F_B` runs a forward and a backward at once; a table of ours holds one
after the other.
"""

_TEXT = re.compile(
    rf"([0-9]{{1,9}})({'|'.join(sorted(KINDS, key=len, reverse=True))})([0-9]{{0,9}})"
)
MOST_SHOWN = 60
"""Characters of a cell that a message shows."""


class Action(NamedTuple):
    """One thing that a pipeline rank does: `kind` on `stage`, for `microbatch` (None where the kind
    has none). A tuple, for tables of a hundred thousand are made and looked up.
    """

    stage: int
    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """Whether the action runs the model: F, I, W or B."""
        return self.kind in COMPUTE

    @property
    def is_p2p(self) -> bool:
        """Whether the action sends or receives."""
        return self.kind in _OTHER_END


def _shown(text: str) -> str:
    return repr(text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}...")


def parse_action(text: str) -> Action:
    """Read one action. Raises ValueError naming the text and what would be legal."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{_shown(text)} is no action; write [stage][kind][microbatch], e.g. 0F3, with kind "
            f"{'|'.join(KINDS)}"
        )
    stage, kind, microbatch = match.groups()
    if (microbatch == "") != (kind in WHOLE_STAGE):
        need = "takes no microbatch" if microbatch else "needs a microbatch"
        raise ValueError(f"{_shown(text)}: {kind} {need}")
    return Action(int(stage), kind, int(microbatch) if microbatch else None)


def parse_cell(text: str) -> tuple[Action, ...]:
    """Read a cell: one action, none where it is blank, or both of `(3F1;4B0)OVERLAP_F_B` in their
    order.

    Raises ValueError naming the text and what would be legal.
    """
    text = text.strip()
    if not text:
        return ()
    if not text.endswith(OVERLAP):
        return (parse_action(text),)
    inner = text.removesuffix(OVERLAP)
    pair = (
        tuple(parse_action(part) for part in inner[1:-1].split(";"))
        if inner[:1] + inner[-1:] == "()"
        else ()
    )
    if len(pair) != 2 or pair[0].kind != "F" or pair[1].kind not in ("B", "I"):
        raise ValueError(
            f"{_shown(text)}: {OVERLAP} takes a forward and a backward, e.g. (3F1;4B0){OVERLAP}"
        )
    return pair


def matching(action: Action) -> Action:
    """The other end of a transfer: the RECV of a SEND, the SEND of a RECV."""
    kind, stages_on = _OTHER_END[action.kind]
    return Action(action.stage + stages_on, kind, action.microbatch)
