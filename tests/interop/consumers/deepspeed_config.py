"""Ask DeepSpeed for its own reading of ds_config.json: a JSON list of {name, path, world} on stdin,
name -> refusal on stdout.
"""

import contextlib
import importlib
import json
import logging
import sys
from typing import Any

from tests.interop.consumers.refusals import print_refusals


class _Mesh:
    """Sizes of a mesh, which DeepSpeed would ask the process group for."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def get_sequence_parallel_world_size(self) -> int:
        return self.sizes["sequence"]

    def get_data_parallel_world_size(self) -> int:
        return self.sizes["data"]

    def get_model_parallel_world_size(self) -> int:
        return 1


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        comm: Any = importlib.import_module("deepspeed.comm")
        config: Any = importlib.import_module("deepspeed.runtime.config")
    logging.disable(logging.CRITICAL)

    def check(job: dict[str, Any]) -> None:
        comm.get_world_size = lambda *_: job["world"]
        comm.get_rank = lambda *_: 0
        with contextlib.redirect_stdout(sys.stderr):
            read = config.DeepSpeedConfig(job["path"], mpu=_Mesh(job["mesh"]))
        batch = json.load(open(job["path"]))["train_batch_size"]  # noqa: SIM115
        assert read.train_batch_size == batch
        stage, stages = read.zero_optimization_stage, read.pipeline["stages"]
        assert stages in (None, "auto") or stage < 2, "a pipeline with ZeRO-2 or -3"

    print_refusals(check)


if __name__ == "__main__":
    main()
