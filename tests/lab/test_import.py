"""A slider must not wait for an import: what is heavy is loaded when a chart is drawn or a rank
trains.
"""

import subprocess
import sys

LIGHT = "import workbench.plan, workbench.profile, workbench.planner, workbench.lab"
HEAVY = {
    "torch",
    "accelerate",
    "safetensors",
    "tokenizers",
    "scipy",
    "pandas",
    "altair",
    "vl_convert",
    "anywidget",
    "ipywidgets",
}


def test_planning_and_its_controls_load_nothing_heavy() -> None:
    loaded = f"import sys; {LIGHT}; print(sorted(set(sys.modules) & {HEAVY}))"
    assert subprocess.check_output([sys.executable, "-c", loaded], timeout=60).strip() == b"[]"
