"""A slider must not wait for an import."""

import subprocess
import sys

ROOMS = "import workbench.plan, workbench.planner, workbench.lab"
TIMED = f"import time; start = time.perf_counter(); {ROOMS}; print(time.perf_counter() - start)"


def test_the_light_rooms_are_imported_quickly_and_load_neither_torch_nor_altair() -> None:
    times = [float(subprocess.check_output([sys.executable, "-c", TIMED], timeout=60)) for _ in range(3)]
    assert min(times) < 1.5
    loaded = f"import sys; {ROOMS}; print(sorted(set(sys.modules) & {{'torch', 'altair', 'anywidget', 'scipy'}}))"
    assert subprocess.check_output([sys.executable, "-c", loaded], timeout=60).strip() == b"[]"
