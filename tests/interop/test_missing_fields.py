"""What a file lacks is asked for all at once, whatever it is."""

import json

import pytest

from tests.interop.foreign_samples import GPU_NAME, SAMPLES, problems
from workbench import interop
from workbench.errors import PlanError
from workbench.interop.megatron import megatron_keys

SLOW = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
    "train_batch_size": 24,
}
SHAPE = (
    "pipe_parallel_size: 2\nnum_layers: 4\nhidden_size: 256\nnum_attention_heads: "
    "4\ntrain_iters: 10\n"
)


@pytest.mark.parametrize(
    "text, fields",
    [
        (
            json.dumps({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}),
            {"gpus", "gpu", "model"},
        ),
        (json.dumps(SLOW), {"gpus", "gpu", "model", "training.steps"}),
        (
            json.dumps({**SLOW, "pipeline": {"stages": 3}}),
            {"gpus", "gpu", "model", "training.steps"},
        ),
        (SHAPE + "train_micro_batch_size_per_gpu: 1\n", {"padded_vocab_size", "gpus", "gpu"}),
        (
            "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64",
            {"--vocab-size", "gpus", "gpu"},
        ),
        (
            "--num-layers 4 --hidden-size 64 --seq-length 64",
            {"--num-attention-heads", "gpus", "gpu"},
        ),
        (
            '[model]\nflavor = "debugmodel"\n[parallelism]\ntensor_parallel_degree = 2\n',
            {"model", "gpus", "gpu"},
        ),
        ("distributed_type: FSDP\n", {"model", "gpus", "gpu"}),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n",
            {"model", "gpus", "gpu"},
        ),
        ("distributed_type: MULTI_GPU\n", {"model", "gpus", "gpu"}),
    ],
)
def test_everything_that_a_file_lacks_is_asked_for_at_once(text: str, fields: set[str]) -> None:
    found = problems(interop.read, text)
    assert set(found) == fields
    assert all("(--" in message or "--set" in message for message in found.values())


def test_only_what_is_lacking_is_asked_for() -> None:
    given = {"gpu": GPU_NAME, "gpus": 16, "model": "tiny"}
    for name in given:
        rest = {key: value for key, value in given.items() if key != name}
        assert set(problems(interop.read, json.dumps({"train_batch_size": 16}), **rest)) == {name}
    assert set(problems(interop.load, SAMPLES / "ds_config.json", model="tiny", gpus=16)) == {"gpu"}


def test_another_refusal_stands_beside_what_is_lacking() -> None:
    found = problems(interop.read, json.dumps({"train_batch_size": "many"}))
    assert "must be an integer" in found["train_batch_size"]


def _open(flag: str) -> str:
    """A script that trains and leaves the value of `flag` open."""
    words = {
        **dict.fromkeys(("num-layers", "num-attention-heads"), "4"),
        **dict.fromkeys(("hidden-size", "vocab-size", "seq-length"), "512"),
        **{"micro-batch-size": "1", "global-batch-size": "16", "max-position-embeddings": "512"},
        flag: "$X",
    }
    return "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py " + " ".join(
        f"--{word} {value}" for word, value in words.items()
    )


VALUED = megatron_keys.KNOWN - megatron_keys.SWITCHES - set(megatron_keys.LAUNCHER)


@pytest.mark.parametrize("flag", sorted(VALUED))
def test_an_open_value_is_asked_for_only_where_memory_or_time_depend_on_it(flag: str) -> None:
    try:
        found = interop.read(_open(flag), "megatron", gpu=GPU_NAME)
    except PlanError as error:
        assert flag not in megatron_keys.LEARNING
        assert "$X (line 1), whose value the file does not say" in str(error)
    else:
        assumed = {note.field: note for note in found.assumed}
        untranslated = {note.field for note in found.untranslated}
        if flag in megatron_keys.LEARNING and f"--{flag}" not in untranslated:
            assert assumed[f"--{flag}"].value == "$X (line 1)"
            assert "taken as not given" in assumed[f"--{flag}"].why


SIZES = (
    "num-layers hidden-size vocab-size seq-length global-batch-size micro-batch-size zero-stage "
    "tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size "
    "num-experts recompute-granularity recompute-num-layers pp-partition-method "
    "pipeline-model-parallel-layout"
)


@pytest.mark.parametrize("flag", SIZES.split())
def test_an_open_size_is_asked_for_by_its_name(flag: str) -> None:
    assert "$X" in problems(interop.read, _open(flag), "megatron", gpu=GPU_NAME)[f"--{flag}"]


def test_an_open_value_of_several_is_assumed_with_what_it_may_be() -> None:
    text = "if [ $A = b ]; then SAVE=5; else SAVE=9; fi\n" + _open("save-interval")
    found = interop.read(text.replace("$X", "$SAVE"), "megatron", gpu=GPU_NAME)
    (note,) = (note for note in found.assumed if note.field == "--save-interval")
    assert "5" in str(note.value) and "9" in str(note.value) and found.plan.checkpoint.every == 0
