"""Which arguments Megatron-LM has, why a plan leaves some of them out, and which fields of a plan
they cannot say.
"""

from __future__ import annotations

import re
from collections.abc import Set

from workbench.interop.foreign_keys import key_names

_NAMES = key_names("megatron")
WORDS = _NAMES["words"]
"""Every argument, without its dashes."""
LAUNCHER = _NAMES["launcher"]
"""Arguments of torchrun, which stand before the script's."""
DISTINCT = frozenset(_NAMES["distinct"])
"""Arguments that show a text to be Megatron's."""
LEARNING = frozenset(_NAMES["learning"])
"""Arguments on which neither the memory nor the time of a step depends: where a file leaves one
open, its default is taken; the value of any other that a plan uses is asked for.
"""
KNOWN = frozenset((*WORDS, *LAUNCHER, *_NAMES["older"], *_NAMES["core"]))
SWITCHES = frozenset(_NAMES["switches"])
"""Arguments that take no value."""


def shows_megatron(words: Set[str]) -> bool:
    """True where arguments (without dashes) are Megatron's: several that only it has, or one among
    others of its own; torchrun's say nothing.
    """
    distinct = words & DISTINCT
    alone = any(word.endswith("model-parallel-size") for word in distinct)
    return alone or len(distinct) >= 2 or (bool(distinct) and len((words & KNOWN) - _SHARED) >= 2)


_SHARED = frozenset((*LAUNCHER, "num-layers", "hidden-size", "bf16", "fp16", "seed", "save"))
"""Known arguments that scripts of any framework have."""

FIELDS = {
    "tensor-model-parallel-size": "strategy.tensor.size",
    "pipeline-model-parallel-size": "strategy.pipeline.size",
    "context-parallel-size": "strategy.context.size",
    "expert-model-parallel-size": "strategy.expert.size",
    "zero-stage": "strategy.data.zero",
    "micro-batch-size": "training.micro_batch",
    "global-batch-size": "training.global_batch",
    "seq-length": "training.sequence_length",
    "train-iters": "training.steps",
    "lr": "training.optimizer.learning_rate",
    "seed": "training.seed",
    "vocab-size": "model.vocab",
    "num-layers": "model.layers",
    "hidden-size": "model.hidden",
    "num-attention-heads": "model.heads",
    "ffn-hidden-size": "model.ffn",
}
"""Argument -> the field of a plan that is the same number."""

_DATA = "a plan names its text in `corpus`"
_WATCHED = "how a run is watched or started again; a run does it in its own way"
_GROUPS = {
    **dict.fromkeys(("rl-", "grpo-", "langrl-"), "of --perform-rl-step, which is not given"),
    "inference-": "of inference, which no step of training needs",
    **dict.fromkeys(("inprocess-", "fault-injector-", "flight-recorder-", "ft-"), _WATCHED),
    "dsa-": "of sparse attention, which --experimental-attention-variant turns on",
    "linear-": "of linear attention, which --experimental-attention-variant turns on",
    "mamba-": "of Mamba layers, which a pattern of layers has",
    **dict.fromkeys(("mup-", "use-mup"), "a plan scales no learning rate or output by the width"),
    "eval-global-batch-size": "a plan evaluates with the batch that it trains with",
    "eval-micro-batch-size": "a plan evaluates with the batch that it trains with",
}
"""Beginning of arguments -> why they are left out."""
_LOG = "logging; a run keeps its own telemetry"
_LAUNCH = "how it is launched; a plan's launcher decides"
WHYS = {
    **{
        word: why
        for start, why in _GROUPS.items()
        for word in KNOWN
        if word.startswith(start) or word.startswith(f"no-{start}")
    },
    **dict.fromkeys(LAUNCHER[2:], _LAUNCH),
    **{
        word: _LOG
        for word in KNOWN
        if word.startswith(
            ("log-", "timing-", "profile", "tensorboard-", "wandb-", "one-logger", "straggler")
        )
    },
    **{word: _DATA for word in KNOWN if word.endswith("data-path") or word.startswith("tokenizer")},
    **dict.fromkeys(
        (
            "split",
            "mock-data",
            "vocab-file",
            "merge-file",
            "num-workers",
            "data-cache-path",
            "dataloader-type",
        ),
        _DATA,
    ),
    "lr-decay-tokens": "a plan counts steps, and of how many tokens the file does not say",
    **dict.fromkeys(
        ("train-weighted-split-paths", "valid-weighted-split-paths", "data-impl"), _DATA
    ),
    "deepspeed-config": "another file: import it by itself",
    "save": "a run keeps its checkpoints in its own directory",
    "attention-dropout": "a plan drops what goes into the residual stream, never attention's "
    "probabilities",
    "make-vocab-size-divisible-by": "a plan pads the vocabulary by its own rule",
    "encoder-pipeline-model-parallel-size": "of an encoder; strategy.pipeline.size is a decoder's",
    "encoder-tensor-model-parallel-size": "of an encoder; strategy.tensor.size is a decoder's",
    "microbatch-group-size-per-virtual-pipeline-stage": "a plan interleaves groups of "
    "strategy.pipeline.size microbatches",
    "attention-backend": "strategy.attention is left to the framework profile: it is undecided",
    "checkpoint-in-cpu": "strategy.offload_activations says it, for stack workbench only",
    **dict.fromkeys(
        ("memory-centric-tiled-linear", "tile-factor"),
        "strategy.data.tile_factor says it, for stack workbench only",
    ),
    "ddp-num-buckets": "strategy.data.bucket_mib is a size; Megatron's default of it was taken",
    "init-method-std": "a plan's weights start by the model's own rule",
    **dict.fromkeys(
        ("loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"),
        "a plan scales the loss by its own rule",
    ),
    **dict.fromkeys(
        ("rampup-batch-size", "step-batch-size-schedule"),
        "a plan's batch is the same in every step",
    ),
    **dict.fromkeys(
        (word for word in KNOWN if re.match("(?:activation-|cpu-|fine-grained-.*)offload", word)),
        "strategy.offload_activations says it, for stack workbench only",
    ),
    **dict.fromkeys(
        (
            "offload-modules",
            "delay-offload-until-cuda-graph",
            "delta-offload-bytes-across-pp-ranks",
            "min-offloaded-tensor-size",
        ),
        "strategy.offload_activations says what is offloaded, for stack workbench only; "
        "strategy.tensor.size is of ranks",
    ),
    **dict.fromkeys(
        ("tensor-parallel-num-weight-shards", "expert-tensor-parallel-num-weight-shards"),
        "pieces in which a rank of strategy.tensor.size or strategy.expert.tensor stores weights",
    ),
    **dict.fromkeys(
        ("moe-mlp-glu-interleave-size", "moe-shared-expert-glu-interleave-size"),
        "the order of a weight's rows; strategy.expert.size is of ranks",
    ),
    **dict.fromkeys(
        (word for word in KNOWN if re.match("rl-inference-.*-parallel-size", word)),
        "of the engine that --perform-rl-step starts; strategy.tensor.size, strategy.pipeline.size,"
        " strategy.expert.size and strategy.expert.tensor are of training",
    ),
    **dict.fromkeys(
        ("padded-vocab-size", "no-pad-vocab-size", "disable-pad-vocab-size"),
        "a plan pads the vocabulary by its own rule",
    ),
    "tp-comm-overlap": "a plan hides no tensor-parallel communication",
    "mtp-loss-scaling-factor": "a weight of a loss, on which no time and no memory depends",
    **{
        word: "strategy.kernels says fused in one word"
        for word in KNOWN
        if re.match("(?!recompute).*-fusion$", word)
    },
    **{word: "strategy.precision says it in one word" for word in KNOWN if word.startswith("fp8-")},
    "no-position-embedding": "of learned positions; --position-embedding-type says model.positions",
    "deepspeed": "DeepSpeed runs it; strategy.stack is Megatron-LM's, with DeepSpeed's sharding",
    "no-pipeline-parallel": "strategy.pipeline.size says it, by --pipeline-model-parallel-size",
    "cross-entropy-loss-fusion": "strategy.loss says which logits there are, not whether one "
    "kernel reads them",
    "recompute-modules": "strategy.recompute may list modules, which no estimate prices; "
    "selective, of attention's core, was taken",
}
"""Argument -> why a plan does not hold it."""
WITHOUT_EXPERTS = WHYS | {
    word: "of experts, which --num-experts turns on" for word in KNOWN if word.startswith("moe-")
}
"""Likewise in a file of a model without experts."""

VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "gpt2-vocab.json": 50257,
    "bert-large-uncased-vocab.txt": 30522,
    "bert-large-cased-vocab.txt": 28996,
}
"""Tokenizer, or the name of its public file of words -> words in it: GPT-2's, Llama 2's, and BERT's
of 2018.
"""

LOST = {
    "model.name": "Megatron's arguments hold a shape, not a name",
    "model.positions": "Megatron-LM knows learned_absolute and rope",
    "model.mlp": "Megatron-LM knows gelu and swiglu",
    "model.embedding_norm": "Megatron-LM has no norm after the embedding",
    "strategy.tensor": "Megatron's tensor parallelism is 1-D",
    "strategy.pipeline.schedule": "Megatron runs 1F1B, interleaved with more than one chunk a rank",
    "strategy.data.reduce": "Megatron reduces once a step, with sharded gradients (stage 2 up) and "
    "no pipeline every microbatch",
    "strategy.data.keep_gathered": "Megatron-FSDP gathers again in the backward pass",
    "strategy.data.offload": "Megatron offloads the optimizer only",
    "strategy.recompute": "Megatron recomputes none, selected parts, all, or the first layers of "
    "every stage",
    "strategy.placement": "Megatron orders tensor, context, then data and pipeline in either order",
    "strategy.precision": "Megatron knows fp32, fp16, bf16, fp8, mxfp8 and nvfp4",
    "strategy.attention": "Megatron says flash, fused or unfused, and no generation",
    "strategy.loss": "Megatron-core's loss is of all logits, or fused with the head",
    "strategy.kernels": "Megatron's layers are Transformer Engine's fused ones, or local ones, "
    "which split no context and no sequence and compute in 16 bits or more",
    "training.optimizer.master": "Megatron keeps master weights beside 16-bit parameters",
    "training.optimizer.moments": "Megatron's moments are fp32 or bf16 here",
    "finetune": "Megatron-LM's pre-training has no fine-tuning",
    "telemetry.timeout_seconds": "Megatron counts the deadline in whole minutes",
    "corpus": "Megatron reads its own indexed files: made-up tokens here (--mock-data) until "
    "--data-path and --tokenizer-type name yours",
}
"""Field, or beginning of fields -> why Megatron's arguments do not say it."""
