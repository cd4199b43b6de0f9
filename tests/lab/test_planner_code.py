"""A model that is code under the planner: what may not be done without the user's word is said,
with the flag.
"""

from workbench.lab.panel.planner import Planner
from workbench.plan.schema import Plan


def test_the_flag_that_runs_code_is_named_beside_the_model() -> None:
    model = {"python": "tests.parallel.users_model:build", "vocab": 260}
    planner = Planner(Plan.model_validate({"model": model, "cluster": {"gpu": "local", "gpus": 1}}))
    assert (
        "--allow-code (allow_code=True in a notebook)"
        in planner.panel.shown["fields"]["model"]["problem"]
    )
    assert all(button["disabled"] for button in planner.board.banner["buttons"])
