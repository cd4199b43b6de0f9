"""What a file lacks is asked for all at once, whatever it is."""

import json

import pytest

from tests.interop.foreign_samples import GPU_NAME, SAMPLES, problems
from workbench import interop

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
