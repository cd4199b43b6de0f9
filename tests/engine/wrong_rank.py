"""A launched rank with a planted fault: rank 1 doubles its share of one gradient."""

import os
import sys
from typing import Any

from workbench.engine.verify import launched_rank

WRONG = "blocks.1.mlp.down.weight"


def double_one_gradient() -> None:
    from workbench.engine.verify import equivalence

    recorded = equivalence._Recorder.moment

    def moment(self: Any, name: str) -> None:
        if name == "before_optimizer":
            self.session.part.store.gradients[WRONG].mul_(2)
        recorded(self, name)

    equivalence._Recorder.moment = moment  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        if "fail" in os.environ.get("WRONG_RANK", ""):
            os._exit(3)
        double_one_gradient()
    status = launched_rank.main()
    sys.stderr.flush()
    os._exit(status)
