"""Which arguments Megatron-LM has, why a plan leaves some of them out, and which fields of a plan
they cannot say.

Names and defaults are those of `megatron/training/arguments.py` in NVIDIA/Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Set

WORDS = """
account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
accumulate-allreduce-grads-in-fp32 adam-beta1 adam-beta2 adam-eps add-qkv-bias adlr-autoresume
adlr-autoresume-interval align-grad-reduce align-param-gather app-tag-run-name app-tag-run-version
apply-layernorm-1p apply-query-key-layer-scaling apply-residual-connection-post-layernorm
apply-rope-fusion async-save async-tensor-model-parallel-allreduce attention-backend
attention-dropout attention-softmax-in-fp32 auto-detect-ckpt-format batch-size bert-embedder-type
bert-load bert-no-binary-head bf16 bias-gelu-fusion biencoder-projection-dim
biencoder-shared-query-context-model block-data-path calc-ft-timeouts calculate-per-token-loss
check-for-large-grads check-for-nan-in-loss-and-grad check-for-spiky-loss
check-weight-hash-across-dp-replicas-interval checkpoint-activations ckpt-assume-constant-structure
ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format ckpt-format
ckpt-fully-parallel-load ckpt-fully-parallel-save ckpt-step clip-grad
clone-scatter-output-in-embedding config-logger-dir context-parallel-size cp-comm-type
create-attention-mask-in-dataloader cross-entropy-fusion-impl cross-entropy-loss-fusion
cuda-graph-impl cuda-graph-modules cuda-graph-scope cuda-graph-warmup-steps data-args-path
data-cache-path data-impl data-parallel-random-init data-parallel-sharding-strategy data-path
data-per-class-fraction data-sharding dataloader-save dataloader-type ddp-average-in-collective
ddp-bucket-size ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers decoder-num-layers
decoder-seq-length decoder-tp-comm-overlap decoupled-lr decoupled-min-lr
decrease-batch-size-if-needed defer-embedding-wgrad-compute delay-param-gather delay-wgrad-compute
deprecated-use-mcore-models deterministic-mode dino-bottleneck-size disable-bias-linear
disable-mamba-mem-eff-path disable-straggler-on-startup disable-tp-comm-bulk-dgrad
disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
disable-tp-comm-split-ag disable-tp-comm-split-rs dist-ckpt-format dist-ckpt-optim-fully-reshardable
dist-ckpt-strictness dist-url distribute-saved-activations distributed-backend
distributed-timeout-minutes embed-layernorm embedding-path empty-unused-memory-level
enable-cuda-graph enable-experimental enable-ft-package enable-full-sharding-in-hsdp
enable-gloo-process-groups enable-gpt-oss enable-msc enable-one-logger encoder-num-layers
encoder-pipeline-model-parallel-size encoder-seq-length encoder-tensor-model-parallel-size
end-weight-decay enforce-fp32-residual eod-mask-loss error-injection-rate error-injection-type
eval-interval eval-iters evidence-data-path exit-duration-in-mins exit-interval
exit-on-missing-checkpoint exit-signal-handler exp-avg-dtype exp-avg-sq-dtype
experimental-attention-variant expert-model-parallel-size expert-outer-dp-sharding-strategy
expert-tensor-parallel-size export-default-te-spec export-kd-cfg export-kd-teacher-load
export-model-type export-te-mcore-model external-cuda-graph ffn-hidden-size fim-data fim-rate
finetune first-last-layers-bf16 flash-decode fp16 fp16-lm-cross-entropy fp32-residual-connection
fp4-format fp8-amax-compute-algo fp8-amax-history-len fp8-format fp8-interval fp8-margin
fp8-param-gather fp8-recipe fp8-wgrad fsdp-double-buffer full-validation global-batch-size
glu-linear-offset grad-reduce-in-bf16 gradient-accumulation-fusion gradient-reduce-div-fusion
group-query-attention head-lr-mult heterogeneous-layers-config-encoded-json
heterogeneous-layers-config-path hidden-dropout hidden-size hierarchical-context-parallel-sizes
high-priority-stream-groups hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern
hysteresis ict-head-size ict-load img-h img-w inference-batch-times-seqlen-threshold
inference-max-requests inference-max-seq-length inference-rng-tracker init-method-std
init-method-xavier-uniform init-model-with-meta-device initial-loss-scale inprocess-restart
is-hybrid-model iter-per-epoch kaimm-async-dataloader keep-fp8-transpose-cache
keep-fp8-weight-transpose-cache kv-channels kv-lora-rank layernorm-epsilon lazy-mpu-init
linear-attention-freq load loader local-rank log-batch-size-to-tensorboard log-device-memory-used
log-energy log-interval log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard
log-max-attention-logit log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress
log-straggler log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard
log-world-size-to-tensorboard logging-level loss-scale loss-scale-window lr lr-decay-iters
lr-decay-samples lr-decay-style lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples
lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style main-grads-dtype main-params-dtype
make-vocab-size-divisible-by mamba-head-dim mamba-num-groups mamba-num-heads mamba-state-dim
manual-gc manual-gc-interval mask-factor mask-prob mask-type max-position-embeddings
max-tokens-to-oom megatron-fsdp-version memory-snapshot-path merge-file micro-batch-size
microbatch-group-size-per-virtual-pipeline-stage mid-level-dataset-surplus min-loss-scale min-lr
mlp-chunks-for-prefill mmap-bin-files mock-data model-parallel-size moe-apply-probs-on-input
moe-aux-loss-coeff moe-deepep-num-sms moe-enable-deepep moe-expert-capacity-factor moe-extended-tp
moe-ffn-hidden-size moe-flex-dispatcher-backend moe-grouped-gemm moe-input-jitter-eps moe-layer-freq
moe-layer-recompute moe-pad-expert-input-to-capacity moe-per-layer-logging moe-permute-fusion
moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias
moe-router-force-load-balancing moe-router-fusion moe-router-group-topk
moe-router-load-balancing-type moe-router-num-groups moe-router-padding-for-fp8
moe-router-padding-for-quantization moe-router-pre-softmax moe-router-score-function moe-router-topk
moe-router-topk-limited-devices moe-router-topk-scaling-factor moe-shared-expert-gate
moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-token-dispatcher-type
moe-token-drop-policy moe-token-dropping moe-upcycling-granularity
moe-use-device-initiated-grouped-gemm moe-use-legacy-grouped-gemm moe-use-upcycling moe-z-loss-coeff
mrope-section mscale mscale-all-dim mtp-loss-scaling-factor mtp-num-layers multi-latent-attention
multiple-validation-sets muon-extra-scale-factor muon-momentum muon-num-ns-steps muon-scale-mode
muon-tp-mode nccl-all-reduce-for-prefill nccl-communicator-config-path nccl-ub
no-add-position-embedding no-async-tensor-model-parallel-allreduce no-barrier-with-level-1-timing
no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-check-for-nan-in-loss-and-grad
no-ckpt-fully-parallel-save no-clone-scatter-output-in-embedding
no-create-attention-mask-in-dataloader no-data-sharding no-delay-grad-reduce no-fp8-wgrad
no-gradient-accumulation-fusion no-initialization no-load-optim no-load-rng
no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard no-manual-gc-eval
no-masked-softmax-fusion no-mmap-bin-files no-one-logger no-overlap-p2p-communication
no-persist-layer-norm no-position-embedding no-rope-freq no-rope-fusion no-save-optim no-save-rng
no-scatter-gather-tensors-in-pipeline no-use-tokenizer-model-from-checkpoint-args
no-weight-decay-cond-type non-persistent-ckpt-type non-persistent-global-ckpt-dir
non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir non-persistent-save-interval
norm-epsilon normalization num-attention-heads num-channels num-classes num-dataset-builder-threads
num-distributed-optimizer-instances num-experts num-layers num-layers-at-end-in-bf16
num-layers-at-start-in-bf16 num-layers-per-virtual-pipeline-stage num-query-groups
num-virtual-stages-per-pipeline-rank num-workers object-storage-cache-path one-logger-async
one-logger-entity one-logger-project one-logger-run-name onnx-safe openai-gelu optimizer
optimizer-cpu-offload optimizer-offload-fraction outer-dp-sharding-strategy output-bert-embeddings
overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce overlap-moe-expert-parallel-comm
overlap-p2p-communication-warmup-flush overlap-param-gather overlap-param-gather-with-optimizer-step
override-opt-param-scheduler override-opt_param-scheduler patch-dim per-split-data-args-path
pin-cpu-grads pin-cpu-params pipeline-model-parallel-comm-backend pipeline-model-parallel-layout
pipeline-model-parallel-size pipeline-model-parallel-split-rank position-embedding-type
pretrained-checkpoint profile profile-ranks profile-step-end profile-step-start q-lora-rank qk-clip
qk-clip-alpha qk-clip-threshold qk-head-dim qk-l2-norm qk-layernorm qk-pos-emb-head-dim
query-in-block-prob quick-geglu rampup-batch-size recompute-activations recompute-granularity
recompute-method recompute-modules recompute-num-layers record-memory-history
relative-attention-max-distance relative-attention-num-buckets replication replication-factor
replication-jump rerun-mode reset-attention-mask reset-position-ids result-rejected-tracker-filename
retriever-report-topk-accuracies retriever-score-scaling retriever-seq-length retro-add-retriever
rope-scaling-factor rope-type rotary-base rotary-interleaved rotary-percent rotary-scaling-factor
rotary-seq-len-interpolation-factor sample-rate save save-interval save-retain-interval seed
seq-length sequence-parallel sft sgd-momentum sharp-enabled-group short-seq-prob skip-train
skipped-train-samples softmax-type spec split squared-relu standalone-embedding-stage
start-weight-decay straggler-ctrlr-port straggler-minmax-count suggested-communication-unit-size
swiglu swin-backbone-type symmetric-ar-type te-rng-tracker tensor-model-parallel-size
tensorboard-dir tensorboard-log-interval tensorboard-queue-size test-data-path test-mode
tiktoken-num-special-tokens tiktoken-pattern tiktoken-special-tokens timing-log-level
timing-log-option titles-data-path tokenizer-hf-include-special-tokens tokenizer-hf-use-fast
tokenizer-metadata tokenizer-model tokenizer-prompt-format tokenizer-special-tokens tokenizer-type
torch-fsdp2-no-reshard-after-forward torch-fsdp2-reshard-after-forward tp-comm-bootstrap-backend
tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad train-data-path train-iters
train-samples train-sync-interval transformer-impl trust-remote-code
untie-embeddings-and-output-weights use-checkpoint-args use-checkpoint-opt-param-scheduler
use-checkpoint-opt_param-scheduler use-cpu-initialization use-custom-fsdp use-dist-ckpt
use-dist-ckpt-deprecated use-distributed-optimizer use-flash-attn use-fused-weighted-squared-relu
use-legacy-models use-mcore-models use-megatron-fsdp use-mp-args-from-checkpoint-args
use-one-sent-docs use-persistent-ckpt-worker use-precision-aware-optimizer use-pytorch-profiler
use-ring-exchange-p2p use-rope-scaling use-rotary-position-embeddings use-sharp
use-te-activation-func use-tokenizer-model-from-checkpoint-args use-torch-fsdp2
use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping v-head-dim valid-data-path
vision-backbone-type vision-pretraining vision-pretraining-type vocab-extra-ids vocab-file
vocab-size wandb-entity wandb-exp-name wandb-project wandb-save-dir warmup weight-decay
weight-decay-incr-style wgrad-deferral-limit window-attn-skip-freq window-size yaml-cfg
tokenizer-library use-nccl-ub
"""
"""Every argument, without its dashes."""

OLDER = """
abort-on-unmet-fused-kernel-constraints activations-checkpoint-granularity
activations-checkpoint-method activations-checkpoint-num-layers checkpoint-in-cpu
checkpoint-num-layers codecarbon-dir contigious-checkpointing cpu-optimizer cpu-torch-adam
create-moe-param-group curriculum-learning data-efficiency-curriculum-learning data-parallel-impl
ddp-impl deepscale deepspeed deepspeed-activation-checkpointing deepspeed-config deepspeed-mpi
disable-mem-efficient-ln disable-moe-token-dropping distribute-checkpointed-activations
ds-fused-adam ds-inference ds-sequence-parallel-size enable-expert-tensor-parallelism eval-only
expert-interval fp8-e4m3 fp8-hybrid glu-activation inference kill-switch-path log-level
log-level-replica log-optimizer-states-to-tensorboard log-path loss-on-targets-only lr-decay-tokens
lr-warmup-tokens max-absolute-position-embeddings mean-noise-span-length memory-centric-tiled-linear
mlp-type moe-eval-capacity-factor moe-expert-parallel-size moe-loss-coeff moe-min-capacity
moe-train-capacity-factor no-contiguous-buffers-in-local-ddp no-pipeline-parallel
no-query-key-layer-scaling noise-density num-key-value-heads override-lr-scheduler pad-vocab-size-to
partition-activations pp-partition-method profile-backward random-ltd remote-device
return-data-index scattered-embeddings skip-train-iteration-range split-transformers
sync-tp-duplicated-parameters synchronize-each-layer tile-factor tokenizer-name-or-path topk
train-data-exact-num-epochs train-tokens train-weighted-split-paths train-weighted-split-paths-path
universal-checkpoint use-bnb-optimizer use-checkpoint-lr-scheduler
use-contiguous-buffers-in-local-ddp use-contiguous-parameters-in-local-ddp use-flash-attn-triton
use-flash-attn-v1 use-flash-attn-v2 use-pin-memory use-tutel valid-num-workers
valid-weighted-split-paths valid-weighted-split-paths-path verify-checkpoint
verify-checkpoint-model-type zero-allgather-bucket-size zero-contigious-gradients
zero-reduce-bucket-size zero-reduce-scatter zero-stage
"""
"""Arguments of Megatron-DeepSpeed, the fork that trains with both, and of Megatron-LM before 2023.
"""

LAUNCHER = (
    "nproc-per-node",
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "standalone",
    "start-method",
    "role",
    "module",
    "no-python",
    "log-dir",
    "redirects",
    "tee",
    "local-ranks-filter",
    "local-addr",
    "run-path",
    "log-line-prefix-template",
)
"""Arguments of torchrun, which stand before the script's."""

DISTINCT = frozenset(
    (
        "num-layers",
        "hidden-size",
        "num-attention-heads",
        "ffn-hidden-size",
        "micro-batch-size",
        "seq-length",
        "global-batch-size",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "model-parallel-size",
        "context-parallel-size",
        "expert-model-parallel-size",
        "max-position-embeddings",
        "train-iters",
        "train-samples",
    )
)
"""Arguments that show a text to be Megatron's."""

KNOWN = frozenset(WORDS.split()) | frozenset(LAUNCHER) | frozenset(OLDER.split())


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

LEARNING_WORDS = """
adam-beta1 adam-beta2 adam-eps async-save clip-grad distributed-timeout-minutes eval-interval
eval-iters layernorm-epsilon lr lr-decay-iters lr-decay-samples lr-decay-style lr-decay-tokens
lr-warmup-fraction lr-warmup-iters lr-warmup-samples lr-warmup-tokens min-lr moe-aux-loss-coeff
moe-loss-coeff moe-router-topk-scaling-factor moe-z-loss-coeff norm-epsilon rope-scaling-factor
rotary-base save-interval seed sgd-momentum train-iters train-samples train-tokens warmup
weight-decay
"""
LEARNING = frozenset(LEARNING_WORDS.split())
"""Arguments on which neither the memory nor the time of a step depends: where a file leaves one
open, its default is taken; the value of any other that a plan uses is asked for.
"""

SWITCHES = frozenset(
    (
        "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split",
        "accumulate-allreduce-grads-in-fp32",
        "add-qkv-bias",
        "async-save",
        "bf16",
        "checkpoint-activations",
        "cpu-optimizer",
        "deepspeed",
        "deepspeed-activation-checkpointing",
        "disable-bias-linear",
        "disable-moe-token-dropping",
        "embed-layernorm",
        "fp16",
        "grad-reduce-in-bf16",
        "group-query-attention",
        "moe-router-pre-softmax",
        "multi-latent-attention",
        "no-pipeline-parallel",
        "optimizer-cpu-offload",
        "quick-geglu",
        "recompute-activations",
        "sequence-parallel",
        "squared-relu",
        "swiglu",
        "torch-fsdp2-no-reshard-after-forward",
        "untie-embeddings-and-output-weights",
        "use-custom-fsdp",
        "use-megatron-fsdp",
        "use-mcore-models",
        "use-precision-aware-optimizer",
        "use-rotary-position-embeddings",
        "use-torch-fsdp2",
        "use-tp-pp-dp-mapping",
        *(
            word
            for word in WORDS.split()
            if word.startswith(("no-", "log-", "overlap-", "use-", "moe-permute"))
        ),
    )
)
"""Arguments that take no value."""

_DATA = "a plan names its text in `corpus`"
_LOG = "logging; a run keeps its own telemetry"
_LAUNCH = "how it is launched; a plan's launcher decides"
WHYS = {
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
    "cross-entropy-loss-fusion": "strategy.loss says which logits there are, not whether one "
    "kernel reads them",
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
    "rampup-batch-size": "a plan's batch is the same in every step",
    "tp-comm-overlap": "a plan hides no tensor-parallel communication",
    "mtp-loss-scaling-factor": "a weight of a loss, on which no time and no memory depends",
    "recompute-modules": "strategy.recompute may list modules, which no estimate prices; "
    "selective, of attention's core, was taken",
}
"""Argument -> why a plan does not hold it."""

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
    "strategy.kernels": "Megatron's layers are Transformer Engine's fused ones, or local",
    "training.optimizer.master": "Megatron keeps master weights beside 16-bit parameters",
    "training.optimizer.moments": "Megatron's moments are fp32 or bf16 here",
    "finetune": "Megatron-LM's pre-training has no fine-tuning",
    "telemetry.timeout_seconds": "Megatron counts the deadline in whole minutes",
    "corpus": "Megatron reads its own indexed files (--data-path)",
}
"""Field, or beginning of fields -> why Megatron's arguments do not say it."""
