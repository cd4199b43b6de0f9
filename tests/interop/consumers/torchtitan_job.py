"""Ask a torchtitan for its own reading of jobs: run with that torchtitan on the path, a JSON list
of {name, path, world} on stdin, a JSON object of name -> refusal ("" where it accepts) on stdout.
"""

import contextlib
import importlib
import inspect
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

from tests.interop.consumers.refusals import print_refusals


class _Absent(types.ModuleType):
    """A package of data and logging that no configuration needs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load(path: str) -> Any:
    """The configuration that torchtitan makes of the file `path`."""
    try:
        manager = importlib.import_module("torchtitan.config.manager")
    except ModuleNotFoundError:
        manager = importlib.import_module("torchtitan.config_manager")
    file = Path(path)
    arguments = [f"--job.config_file={path}"]
    if file.suffix == ".py":
        sys.path.insert(0, str(file.parent))
        arguments = [f"--module={file.stem}", "--config=job"]
    return manager.ConfigManager().parse_args(arguments)


def check(path: str, world: int) -> None:
    """Raise where torchtitan refuses the job, its degrees on `world` ranks, or lacks its model."""
    config = load(path)
    dims_class = importlib.import_module("torchtitan.distributed.parallel_dims").ParallelDims
    names = {
        "dp_replicate": "data_parallel_replicate_degree",
        "dp_shard": "data_parallel_shard_degree",
        "cp": "context_parallel_degree",
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "ep": "expert_parallel_degree",
        "etp": "expert_tensor_parallel_degree",
    }
    p, known = config.parallelism, inspect.signature(dims_class).parameters
    sizes = {short: getattr(p, long, 1) for short, long in names.items() if short in known}
    more = {"enable_loss_parallel": True} if "enable_loss_parallel" in known else {}
    dims = dims_class(**sizes, **more, world_size=world)
    # Meshes of later versions are sized as this, and no rank is here to build them.
    owners, experts = dims.dp_shard * dims.cp * dims.tp, getattr(dims, "ep", 1)
    wide = getattr(dims, "etp", 1)
    assert owners % (experts * wide) == 0, f"experts {experts} x {wide} over {owners} ranks"
    local, shares = config.training.local_batch_size, dims.dp_replicate * dims.dp_shard
    assert config.training.global_batch_size % (local * shares) == 0, "global_batch_size"
    divisor = 2 * dims.cp * dims.tp
    assert config.training.seq_len % divisor == 0, f"seq_len, of {divisor} parts"
    if hasattr(config, "model"):
        alone = dims.cp * dims.tp * dims.pp == 1
        assert dims.dp_replicate == 1 or dims.dp_shard > 1 or alone, "DDP beside another axis"
        module = importlib.import_module(f"torchtitan.models.{config.model.name}")
        flavors = next(v for k, v in vars(module).items() if k.endswith(("_configs", "_args")))
        assert config.model.flavor in flavors, f"no flavor {config.model.flavor}"
        model = flavors[config.model.flavor]
        flex = getattr(model, "attn_type", "sdpa") != "sdpa" or getattr(model, "use_flex_attn", 0)
        assert dims.cp == 1 or not flex, "context of FlexAttention"
        for table, rows in tomllib.loads(Path(path).read_text()).items():
            absent = [key for key in rows if not hasattr(getattr(config, table), key)]
            assert not absent, f"{table} has no {absent}"
        for name in ("float8", "mx"):
            importlib.import_module(f"torchtitan.components.quantization.{name}")
        converters = importlib.import_module("torchtitan.protocols.model_converter")
        known = converters._registry_model_converter_cls
        assert set(config.model.converters) <= set(known), config.model.converters


def main() -> None:
    for name in (
        "datasets",
        "datasets.distributed",
        "wandb",
        "tiktoken",
        "tiktoken.load",
        "blobfile",
    ):
        sys.modules[name] = _Absent(name)
    with contextlib.suppress(ImportError):  # no GPU is here to be asked for its generation
        for name in ("float8", "mx"):
            module: Any = importlib.import_module(f"torchtitan.components.quantization.{name}")
            module.has_cuda_capability = lambda *_: True
    print_refusals(lambda job: check(job["path"], job["world"]))


if __name__ == "__main__":
    main()
