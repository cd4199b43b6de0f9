"""DeepSpeed's ds_config.json, read as a plan and written from one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interop.foreign_samples import (
    DS,
    GPU_NAME,
    LEFT_OPEN,
    LLAMA,
    ON_16,
    OPTIMIZER,
    SAMPLES,
    THROUGH_DEEPSPEED,
    TRAINERS,
    assumed,
    left,
    load,
    problems,
)
from workbench import interop
from workbench.interop.deepspeed import read_deepspeed
from workbench.interop.translation import ImportOptions
from workbench.plan.schema import Plan


def test_a_ds_config_says_sharding_batch_optimizer_and_so_how_many_gpus() -> None:
    found = load("ds_config.json", model="llama-3-8b")
    plan = found.plan
    assert (found.format, plan.strategy.stack) == ("deepspeed", "deepspeed-zero")
    assert plan.cluster.gpus == 512 // (4 * 8)
    assert (plan.strategy.data.zero, plan.strategy.data.offload, plan.strategy.data.overlap) == (
        2,
        "optimizer",
        True,
    )
    assert plan.strategy.data.bucket_mib == 2e8 * 4 / 2**20  # elements, in the gradients' fp32
    assert (plan.strategy.precision, plan.strategy.gradient_dtype) == ("bf16", "fp32")
    assert (plan.training.global_batch, plan.training.micro_batch, plan.training.steps) == (
        512,
        4,
        900,
    )
    optimizer = plan.training.optimizer
    assert (optimizer.learning_rate, optimizer.beta2, optimizer.weight_decay) == (2e-4, 0.98, 0.05)
    assert (optimizer.decay, optimizer.warmup_steps, optimizer.final_ratio, optimizer.clip) == (
        "linear",
        30,
        0,
        0.5,
    )
    assert plan.telemetry.trackers == ["tensorboard"]
    assert left(found) == {
        "zero_optimization.allgather_bucket_size": 2e8,
        "zero_optimization.offload_optimizer.pin_memory": True,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.type": "WarmupDecayLR",
        "tensorboard.output_path": "logs",
        "flops_profiler.enabled": False,
        "steps_per_print": 20,
    }
    assert set(assumed(found)) == {"strategy.recompute", "training.sequence_length"}


def test_every_key_of_a_file_is_either_translated_or_told() -> None:
    for name, more in (
        ("ds_config.json", {"model": "tiny"}),
        ("accelerate.yaml", {"model": "tiny"}),
        ("megatron.sh", {}),
    ):
        found = load(name, **more)
        told = [*found.translated, *left(found)]
        assert len(told) == len(set(told))
    keys = {
        "zero_optimization.stage",
        "steps_per_print",
        "train_batch_size",
        "scheduler.params.warmup_type",
        "scheduler.params.warmup_num_steps",
    }
    config = {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 3,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log", "warmup_num_steps": 9}},
    }
    found = read_deepspeed.read(config, ON_16)
    assert keys | {"scheduler.type"} == {*found.translated, *left(found)}


@pytest.mark.parametrize(
    "sizes, global_batch, micro",
    [
        ((64, None, None), 64, 4),
        ((64, 2, None), 64, 2),
        ((None, 2, 3), 96, 2),
        ((64, None, 2), 64, 2),
    ],
)
def test_two_batch_sizes_give_the_third(
    sizes: tuple[Any, ...], global_batch: int, micro: int
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    training = read_deepspeed.read(config, ON_16).plan.training
    assert (training.global_batch, training.micro_batch) == (global_batch, micro)


def test_batch_sizes_that_contradict_each_other() -> None:
    config = {
        "train_batch_size": 60,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    }
    message = problems(read_deepspeed.read, config, ON_16)["train_batch_size"]
    assert (
        "60" in message
        and "2 x gradient_accumulation_steps 2 x 16" in message
        and "legal: 64" in message
    )
    assert (
        "legal: 32"
        in problems(
            read_deepspeed.read,
            {"train_batch_size": 40, "train_micro_batch_size_per_gpu": 2},
            ON_16,
        )["train_batch_size"]
    )


def test_axes_of_a_ds_config_share_the_gpus() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2,
        "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
    }
    full = read_deepspeed.read(config, ON_16).plan.resolve()
    assert full.sizes == {"tensor": 2, "context": 2, "data": 2, "pipeline": 2}
    assert full.strategy.context.algorithm == "ulysses" and full.strategy.recompute == "full"


def test_auto_is_left_to_the_trainer_and_told() -> None:
    config = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    assert left(read_deepspeed.read(config, ON_16)) == {
        "train_batch_size": "auto",
        "zero_optimization.reduce_bucket_size": "auto",
    }


def test_auto_leaves_the_plans_own_default() -> None:
    found = read_deepspeed.read(TRAINERS, ON_16)
    full, plain = (
        found.plan.resolve(),
        Plan.of("llama-3-8b", gpu=GPU_NAME, gpus=16, strategy="ddp").resolve(),
    )
    assert full.strategy.precision == plain.strategy.precision == "bf16"
    for field in OPTIMIZER:
        assert getattr(full.training.optimizer, field) == getattr(
            plain.training.optimizer, field
        ), field
    for field in ("global_batch", "micro_batch", "steps"):
        assert getattr(full.training, field) == getattr(plain.training, field), field
    assert full.strategy.data.bucket_mib == plain.strategy.data.bucket_mib
    notes = {note.field: note for note in found.assumed}
    assert set(notes) >= LEFT_OPEN
    assert notes["strategy.precision"].value == "bf16" and "auto" in notes["strategy.precision"].why
    assert notes["training.optimizer.weight_decay"].value == 0.1
    assert sum(value == "auto" for value in left(found).values()) == 16


def test_auto_beside_what_the_file_says() -> None:
    wide = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 2**20},
        "bf16": {"enabled": "auto"},
    }
    assert read_deepspeed.read(wide, ON_16).plan.strategy.data.bucket_mib == 2  # bf16 on this GPU
    fp16 = read_deepspeed.read({**TRAINERS, "fp16": {"enabled": True}}, ON_16)
    assert fp16.plan.strategy.precision == "fp16" and "strategy.precision" not in assumed(fp16)
    peak = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-5, "warmup_num_steps": 10}}
    rate = read_deepspeed.read({**TRAINERS, "scheduler": peak}, ON_16)
    assert rate.plan.training.optimizer.learning_rate == 1e-5
    assert "training.optimizer.learning_rate" not in assumed(rate)
    micro = (
        read_deepspeed.read({**TRAINERS, "train_micro_batch_size_per_gpu": 2}, ON_16)
        .plan.resolve()
        .training
    )
    assert (micro.micro_batch, micro.global_batch) == (2, 4 * 16 * 2)
    whole = (
        read_deepspeed.read({**TRAINERS, "train_batch_size": 256}, ON_16).plan.resolve().training
    )
    assert (whole.micro_batch, whole.global_batch) == (1, 256)
    steps = (
        read_deepspeed.read({**TRAINERS, "gradient_accumulation_steps": 8}, ON_16)
        .plan.resolve()
        .training
    )
    assert (steps.micro_batch, steps.global_batch) == (1, 8 * 16)
    assert (
        assumed(read_deepspeed.read({**TRAINERS, "gradient_accumulation_steps": 8}, ON_16))[
            "training.micro_batch"
        ]
        == 1
    )
    refused = problems(read_deepspeed.read, {"zero_optimization": {"stage": "auto"}}, ON_16)
    assert "'auto'; must be an integer" in refused["zero_optimization.stage"]


def test_offload_by_its_older_switches() -> None:
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}
    assert (
        read_deepspeed.read({"zero_optimization": zero}, ON_16).plan.strategy.data.offload
        == "parameters"
    )
    found = read_deepspeed.read({"zero_optimization": {**zero, "cpu_offload": False}}, ON_16)
    assert found.plan.strategy.data.offload == "none"
    assert left(found) == {"zero_optimization.cpu_offload_params": True}


@pytest.mark.parametrize(
    ("older", "today"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"bfloat16": {"enabled": "auto"}}, {"bf16": {"enabled": "auto"}}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": False}, {"zero_optimization": {"stage": 0}}),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, {"bf16": {"enabled": False}}),
    ],
)
def test_older_spellings_mean_what_todays_do(older: dict[str, Any], today: dict[str, Any]) -> None:
    rest = {"zero_optimization": {"stage": 2}, "train_batch_size": 16}
    plans = [
        interop.read(json.dumps({**rest, **own}), model="tiny", gpu=GPU_NAME, gpus=8).plan
        for own in (older, today)
    ]
    assert plans[0] == plans[1]


def test_what_is_nearest_is_told_too() -> None:
    config = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme"},
            "offload_param": {"device": "cpu"},
        },
        "optimizer": {"type": "Lamb"},
    }
    found = read_deepspeed.read(config, ON_16)
    assert (
        found.plan.strategy.data.offload == "parameters"
        and found.plan.training.optimizer.name == "adamw"
    )
    assert left(found) == {
        "zero_optimization.offload_optimizer.device": "nvme",
        "optimizer.type": "Lamb",
    }
    assert "optimizer.type" not in found.translated


def test_yaml_in_braces_is_yaml() -> None:
    text = '{ # flow style\n  "train_batch_size": 16,\n  "zero_optimization": {"stage": 1,},\n}\n'
    found = interop.read(text, model="tiny", gpu=GPU_NAME, gpus=16)
    assert found.format == "deepspeed" and found.plan.strategy.data.zero == 1
    assert (
        "not valid JSON"
        in problems(interop.read, '{"train_batch_size": ]', model="tiny", gpu=GPU_NAME, gpus=8)[
            "file"
        ]
    )


def test_an_accelerate_yaml_with_deepspeed_in_its_own_keys() -> None:
    found = interop.read(THROUGH_DEEPSPEED, model="llama-3-8b", gpu=GPU_NAME)
    full = found.plan.resolve()
    assert (found.format, full.strategy.stack, full.cluster.gpus, full.cluster.nodes) == (
        "fsdp",
        "deepspeed-zero",
        16,
        2,
    )
    assert (full.strategy.data.zero, full.strategy.data.offload) == (3, "optimizer")
    assert (full.strategy.precision, full.training.optimizer.clip) == ("bf16", 0.5)
    assert set(found.translated) == {
        "distributed_type",
        "num_processes",
        "num_machines",
        "mixed_precision",
        "deepspeed_config.zero_stage",
        "deepspeed_config.gradient_clipping",
        "deepspeed_config.offload_optimizer_device",
    }
    assert full.strategy.data.offload_tier == "disk"
    assert set(left(found)) == {"deepspeed_config.zero3_init_flag", "machine_rank"}
    plain = Plan.of("llama-3-8b", gpu=GPU_NAME, gpus=16, strategy="ddp").resolve().training
    assert (full.training.global_batch, full.training.micro_batch) == (
        plain.global_batch,
        plain.micro_batch,
    )
    assert {"training.global_batch", "training.optimizer.name"} <= set(assumed(found))
    fewer = interop.read(
        THROUGH_DEEPSPEED.replace("  zero_stage: 3\n", ""), model="llama-3-8b", gpu=GPU_NAME
    )
    assert fewer.plan.strategy.data.zero == 2 and assumed(fewer)["strategy.data.zero"] == 2


def test_an_accelerate_yaml_that_names_a_ds_config(tmp_path: Path) -> None:
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: fp16\ndeepspeed_config:\n"
    )
    (tmp_path / "config.yaml").write_text(
        text + "  deepspeed_config_file: ds.json\n  zero_stage: 1\n"
    )
    ds = {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "steps_per_print": 7,
    }
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    found = interop.load(tmp_path / "config.yaml", model="tiny", gpu=GPU_NAME)
    assert (found.plan.strategy.data.zero, found.plan.strategy.precision) == (2, "fp16")
    assert "ds.json: zero_optimization.stage" in found.translated
    assert {
        "ds.json: steps_per_print",
        "ds.json: train_batch_size",
        "deepspeed_config.zero_stage",
    } == set(left(found))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stag": 2}}')
    assert (
        "did you mean"
        in problems(interop.load, tmp_path / "config.yaml", model="tiny", gpu=GPU_NAME)[
            "ds.json: zero_optimization.stag"
        ]
    )


def test_unknown_keys_may_be_told_instead() -> None:
    found = interop.read(
        DS.replace("16,", '16, "house_style": {"a": 1},'),
        model="tiny",
        gpu=GPU_NAME,
        gpus=16,
        lenient=True,
    )
    assert left(found) == {"house_style.a": 1}


@pytest.mark.parametrize(
    "lack, name, words",
    [
        ("gpu", "ds_config.json", "--gpu"),
        ("model", "accelerate.yaml", "--model"),
        ("gpus", "megatron.yaml", "--gpus"),
    ],
)
def test_what_a_file_lacks_is_asked_for_by_name(lack: str, name: str, words: str) -> None:
    given = {"model": "tiny", "gpu": GPU_NAME, "gpus": 16}
    if name == "ds_config.json":
        given.pop("gpus")
    given.pop(lack)
    assert words in problems(interop.load, SAMPLES / name, **given)[lack]


@pytest.mark.parametrize(
    "given, field",
    [
        ({"gpus": "8"}, "gpus"),
        ({"gpus": 0}, "gpus"),
        ({"gpu": "h1000"}, "cluster.gpu"),
        ({"model": "no"}, "model"),
        ({"format": "nemo"}, "format"),
    ],
)
def test_what_is_given_beside_is_checked(given: dict[str, Any], field: str) -> None:
    found = problems(interop.read, DS, **({"model": "tiny", "gpu": GPU_NAME, "gpus": 16} | given))
    assert "ds_config" not in found[field]


def test_a_refusal_says_which_numbers_are_the_files() -> None:
    beside = ImportOptions("tiny", GPU_NAME, 16, sets={"training.optimizer.warmup_steps": 10**7})
    ours = problems(read_deepspeed.read, json.loads(DS), beside)["training.optimizer.warmup_steps"]
    assert "says it" not in ours and "assumed" not in ours
    short = ImportOptions("tiny", GPU_NAME, 16, sets={"training.steps": 50})
    slow: dict[str, Any] = {"type": "WarmupLR"}
    assumes = problems(read_deepspeed.read, {**json.loads(DS), "scheduler": slow}, short)[
        "training.optimizer.warmup_steps"
    ]
    assert "says it" not in assumes and assumes.endswith("(assumed: the file does not say it)")
    slow["params"] = {"warmup_num_steps": 1000}
    says = problems(read_deepspeed.read, {**json.loads(DS), "scheduler": slow}, short)[
        "training.optimizer.warmup_steps"
    ]
    assert says.endswith("(as DeepSpeed ds_config.json says it)")


def test_a_file_of_a_known_format_without_a_key_in_use_is_refused() -> None:
    found = problems(
        read_deepspeed.read, {"steps_per_print": 5, "wall_clock_breakdown": False}, ON_16
    )
    assert "steps_per_print, wall_clock_breakdown, none of which a plan can use" in found["file"]


def test_unknown_keys_have_a_list_of_their_own() -> None:
    found = interop.read(
        DS.replace("16,", '16, "house_style": 1,'),
        model="tiny",
        gpu=GPU_NAME,
        gpus=16,
        lenient=True,
    )
    assert [(note.field, note.value) for note in found.unknown] == [("house_style", 1)]
    titles = {
        title.partition(":")[0]: [note.field for note in rows] for title, _, rows in found.tables()
    }
    assert titles["Unknown"] == ["house_style"] and "house_style" not in titles["Not translated"]


def test_fields_that_are_set_stand_above_the_file() -> None:
    sets = {"cluster.gpus": 8, "training.global_batch": 64, "training.steps": 7}
    found = interop.read(DS, model="tiny", gpu=GPU_NAME, set=sets)
    plan = found.plan
    assert (plan.cluster.gpus, plan.training.global_batch, plan.training.steps) == (8, 64, 7)
    assert [(note.field, note.value) for note in found.ignored] == [("training.global_batch", 16)]
    assert "training.steps" not in assumed(found)
    assert "no" in problems(
        interop.read, DS, model="tiny", gpu=GPU_NAME, gpus=8, set={"no.such": 1}
    )


def test_a_vocabulary_may_be_given_where_the_arguments_have_none() -> None:
    words = [word for word in LLAMA if word not in ("--vocab-size", 512)]
    found = interop.read(json.dumps(words), gpu=GPU_NAME, gpus=8, vocab_size=700)
    assert found.plan.resolve().shape.vocab == 700 and assumed(found)["model.vocab"] == 700
    assert (
        "--vocab-size"
        in problems(interop.read, json.dumps(words), gpu=GPU_NAME, gpus=8)["--vocab-size"]
    )
    assert (
        "the file says 512"
        in problems(interop.read, json.dumps(LLAMA), gpu=GPU_NAME, gpus=8, vocab_size=700)[
            "vocab_size"
        ]
    )
    assert (
        "model"
        in problems(interop.read, DS, model="tiny", gpu=GPU_NAME, gpus=8, vocab_size=700)[
            "vocab_size"
        ]
    )


def test_an_import_shows_itself_in_a_notebook() -> None:
    shown = load("ds_config.json", model="llama-3-8b")._repr_html_()
    assert "steps_per_print" in shown and "<table>" in shown and "stack: deepspeed-zero" in shown
    assert "sequence_length" in interop.write(Plan.of("tiny", gpu=GPU_NAME), "fsdp")._repr_html_()
