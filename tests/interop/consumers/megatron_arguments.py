"""Ask Megatron-LM for its own reading of arguments: run with megatron-core on the path, a JSON list
of {name, arguments, world, environment} on stdin, name -> refusal on stdout.
"""

import contextlib
import importlib
import io
import os
import sys
import typing
from typing import Any

import torch
import typing_extensions

from tests.interop.consumers.refusals import print_refusals

HOPPER = 9


def check(job: dict[str, Any], arguments: Any) -> None:
    """Raise where Megatron-LM refuses the arguments, or a configuration of its model from them."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(job["environment"], WORLD_SIZE=str(job["world"]), RANK="0")
    sys.argv = ["pretrain_gpt.py", *job["arguments"]]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    assert args.mock_data or args.data_path, "no data"
    assert args.tokenizer_type, "no tokenizer"
    args.apply_rope_fusion = False  # a kernel of Transformer Engine, which is not installed
    model = arguments.core_transformer_config_from_args(args)
    # Assertions that stand where layers are made, which needs GPUs.
    local = args.transformer_impl == "local"
    assert not (local and (model.context_parallel_size > 1 or args.fp8 or args.fp4)), "local"
    assert not (local and (model.persist_layer_norm or model.sequence_parallel)), "local norm"


def main() -> None:
    # Releases of today are for Python 3.12; what they read of it is in typing_extensions. No GPU is
    # here to be asked for its generation, and no Transformer Engine for its version.
    vars(typing).setdefault("override", typing_extensions.override)
    torch.cuda.get_device_capability = lambda *_: (HOPPER, 0)
    arguments: Any = importlib.import_module("megatron.training.arguments")
    transformer: Any = importlib.import_module("megatron.core.transformer.transformer_config")
    arguments.get_device_arch_version = lambda: HOPPER
    for module in (arguments, transformer):
        module.is_te_min_version = lambda *_: True

    def accepted(job: dict[str, Any]) -> None:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                check(job, arguments)
        except SystemExit as error:
            raise ValueError(f"{error} {said.getvalue()[-300:]}") from None

    print_refusals(accepted)


if __name__ == "__main__":
    main()
