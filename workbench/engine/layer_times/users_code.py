"""What a model given as Python does wrong while it is measured, as problems of `model.python`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.engine.layer_times.model_blocks import Block
from workbench.errors import PlanError, refuse
from workbench.models.traced.users_frame import users_frame
from workbench.untrusted_text import brief

MOST_SAID = 500
"""Characters of an error of the user's code."""


@contextmanager
def blamed(what: str, user: bool) -> Iterator[None]:
    """Refuse, naming `what` and the line, where the user's code raises or ends the process.

    Args:
        what: What the code does, e.g. its forward.
        user: Whether it is the user's; errors of our own models pass.
    """
    try:
        yield
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
        if not user:
            raise
        kind, said = type(error).__name__, brief(str(error), MOST_SAID)
        raise refuse(
            "model.python", f"{what} raised {kind}: {said}{_where(error)}; legal: code that runs"
        ) from error


def _where(error: BaseException) -> str:
    """The last line of the user's own that was running."""
    frame = users_frame(error)
    return f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""


def refuse_untrained(blocks: list[Block], loss: Tensor) -> None:
    """Refuse blocks none of whose parameters the loss depends on: they have no backward to time."""
    reached, nodes, seen = set[int](), [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))
            nodes += [before for before, _ in node.next_functions]
    for block in blocks:
        own = [p for module in block.modules for p in module.parameters()]
        if own and not any(id(parameter) in reached for parameter in own):
            raise refuse(
                "model.python",
                f"has the submodule '{block.name}', whose parameters get no gradient of the loss "
                "(its output is detached or not used), so that it has no backward to time; legal: "
                "a model that trains every submodule",
            )
