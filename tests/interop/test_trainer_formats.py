"""Arguments of Hugging Face's Trainer and TRL, LLaMA-Factory and axolotl: what a plan has of them,
what is refused, and whose defaults are taken.

Names, defaults and rules are recorded from transformers 5.24.0, TRL 1.16.0, LLaMA-Factory 0.9.5 and
axolotl 0.19.0.
"""

import dataclasses
import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, assumed, left, load, problems
from workbench import interop
from workbench.interop.trainer import trainer_keys as known
from workbench.interop.trainer.dialects import SPELLING, TrainerFormat, dialect, spellings
from workbench.interop.trainer.models_by_name import by_hub_name
from workbench.interop.translation import SOURCES, Imported
from workbench.plan.model.parameter_count import parameters
from workbench.planner.estimate import estimate
from workbench.safe_io import yaml_files
from workbench.units import gib_text

SAMPLES: dict[TrainerFormat, str] = {
    "hf-trainer": "hf_trainer.yaml",
    "llama-factory": "llama_factory.yaml",
    "axolotl": "axolotl.yml",
}
BASE: dict[TrainerFormat, dict[str, Any]] = {
    "hf-trainer": {
        **{"model_name_or_path": "llama-3-8b", "per_device_train_batch_size": 2, "bf16": True},
        **{"max_steps": 50, "max_length": 512, "learning_rate": 1e-5, "torch_dtype": "bfloat16"},
    },
    "llama-factory": {
        **{"model_name_or_path": "llama-3-8b", "per_device_train_batch_size": 2, "bf16": True},
        **{"max_steps": 50, "cutoff_len": 512, "learning_rate": 1e-5, "stage": "sft"},
        "finetuning_type": "full",
    },
    "axolotl": {
        **{"base_model": "llama-3-8b", "micro_batch_size": 2, "gradient_accumulation_steps": 1},
        **{"max_steps": 50, "sequence_len": 512, "learning_rate": 1e-5},
    },
}
METHODS: dict[str, dict[TrainerFormat, dict[str, Any]]] = {
    "full": {format: {} for format in SPELLING},
    "lora": {
        "hf-trainer": {"use_peft": True, "lora_r": 8},
        "llama-factory": {"finetuning_type": "lora", "lora_rank": 8},
        "axolotl": {"adapter": "lora", "lora_r": 8, "lora_target_linear": True},
    },
    "qlora": {
        "hf-trainer": {"use_peft": True, "lora_r": 8, "load_in_4bit": True},
        "llama-factory": {"finetuning_type": "lora", "lora_rank": 8, "quantization_bit": 4},
        "axolotl": {
            **{"adapter": "qlora", "lora_r": 8, "lora_target_linear": True, "load_in_4bit": True}
        },
    },
    "dpo": {
        "hf-trainer": {"beta": 0.2, "loss_type": "sigmoid"},
        "llama-factory": {"stage": "dpo", "pref_beta": 0.2},
        "axolotl": {"rl": "dpo", "rl_beta": 0.2},
    },
}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True},
}
SHARDING: dict[str, dict[str, Any]] = {
    "none": {},
    "deepspeed": {"deepspeed": AUTO},
    "fsdp": {"fsdp": "full_shard auto_wrap"},
}
FORMATS = list(SPELLING)


def read(format: TrainerFormat, given: dict[str, Any] | None = None, **more: Any) -> Imported:
    data = {**BASE[format], **more}
    return interop.read(
        yaml_files.dump(data), format, **{"gpu": GPU_NAME, "gpus": 8, **(given or {})}
    )


def fields(found: Imported, *paths: str) -> dict[str, Any]:
    full = found.plan.resolve()
    return {path: reduce(getattr, path.split("."), full) for path in paths}


def whys(found: Imported) -> dict[str, str]:
    return {note.field: note.why for note in (*found.untranslated, *found.assumed)}


@pytest.mark.parametrize("sharding", SHARDING)
@pytest.mark.parametrize("format", ["llama-factory", "axolotl"])
def test_fp8_changes_what_is_computed_and_not_what_is_kept(
    format: TrainerFormat, sharding: str
) -> None:
    plain = read(format, bf16=True, **SHARDING[sharding])
    found = read(format, bf16=True, fp8=True, **SHARDING[sharding])
    assert found.plan.strategy.precision == "fp8" and "fp8" not in left(found)
    kept = ("strategy.stack", "strategy.gradient_dtype", "finetune.optimizer.master")
    assert fields(found, *kept) == fields(plain, *kept)


def test_why_an_argument_is_left_out() -> None:
    found = read("llama-factory", use_v1_kernels=True)
    assert "kernels" in whys(found)["use_v1_kernels"]
    loftq = {"peft": {"loftq_config": {"loftq_bits": 4}}}
    found = read("axolotl", **METHODS["lora"]["axolotl"], **loftq)
    assert "adapters start" in whys(found)["peft.loftq_config.loftq_bits"]


FACTS: dict[TrainerFormat, dict[str, Any]] = {
    "hf-trainer": {
        "model.name": "llama-3-8b",
        "strategy.stack": "hf-trainer-16bit",
        "strategy.data.zero": 0,
        "strategy.precision": "bf16",
        "strategy.recompute": "full",
        "strategy.attention": "flash-2",
        "strategy.kernels": "liger",
        "strategy.loss": "fused_linear",
        "finetune.method": "full",
        "finetune.sequence_length": 2048,
        "finetune.micro_batch": 4,
        "finetune.global_batch": 64,
        "finetune.steps": 400,
        "finetune.seed": 42,
        "finetune.evaluation.every": 50,
        "finetune.optimizer.name": "adamw",
        "finetune.optimizer.learning_rate": 2e-5,
        "finetune.optimizer.weight_decay": 0.01,
        "finetune.optimizer.beta2": 0.999,
        "finetune.optimizer.warmup_steps": 40,
        "finetune.optimizer.decay": "cosine",
        "finetune.optimizer.final_ratio": 0.1,
        "finetune.optimizer.clip": 1.0,
        "finetune.optimizer.master": "none",
        "finetune.optimizer.moments": "bf16",
        "checkpoint.every": 100,
        "checkpoint.keep": 1,
        "telemetry.trackers": ["wandb"],
    },
    "llama-factory": {
        "strategy.stack": "hf-trainer",
        "strategy.precision": "bf16",
        "strategy.recompute": "full",
        "finetune.method": "lora",
        "finetune.lora.rank": 16,
        "finetune.lora.alpha": 32.0,
        "finetune.lora.targets": ["attention.q", "attention.v"],
        "finetune.quantize.format": "nf4",
        "finetune.quantize.double": True,
        "finetune.sequence_length": 2048,
        "finetune.global_batch": 64,
        "finetune.optimizer.warmup_steps": 30,
        "finetune.optimizer.final_ratio": 0.0,
    },
    "axolotl": {
        "strategy.stack": "fsdp",
        "strategy.data.zero": 3,
        "strategy.data.offload": "none",
        "strategy.precision": "bf16",
        "strategy.recompute": "full",
        "strategy.attention": "flash-2",
        "finetune.lora.rank": 32,
        "finetune.lora.alpha": 16.0,
        "finetune.lora.dropout": 0.05,
        "finetune.lora.targets": "all",
        "finetune.sequence_length": 4096,
        "finetune.micro_batch": 2,
        "finetune.global_batch": 64,
        "finetune.steps": 200,
        "finetune.optimizer.moments": "int8",
        "finetune.optimizer.warmup_steps": 10,
        "checkpoint.every": 0,
    },
}


@pytest.mark.parametrize("format", FORMATS)
def test_a_typical_file_is_the_plan_that_its_framework_runs(format: TrainerFormat) -> None:
    found = load(SAMPLES[format], gpus=8)
    assert found.format == format and format in SOURCES
    assert fields(found, *FACTS[format]) == FACTS[format]
    assert estimate(found.plan)
    data = yaml_files.parse((Path(__file__).parent / "foreign" / SAMPLES[format]).read_text())
    told = {*found.translated, *left(found), *(note.field for note in found.ignored)}
    assert {key for key, value in data.items() if value is not None} <= {
        key.partition(".")[0] for key in told
    }


@pytest.mark.parametrize("how", SHARDING)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("format", FORMATS)
def test_each_method_under_each_sharding(format: TrainerFormat, method: str, how: str) -> None:
    found = read(format, **METHODS[method][format], **SHARDING[how])
    tune, strategy = found.plan.finetune, found.plan.strategy
    assert tune is not None
    assert tune.method == ("lora" if "lora" in method else "full")
    assert bool(tune.quantize) == (method == "qlora")
    assert strategy.data.zero == (0 if how == "none" else 3)
    stacks = {"deepspeed": "deepspeed-zero", "fsdp": "fsdp"}
    if method == "dpo":
        assert tune.preference and tune.preference.beta == 0.2
        assert strategy.stack == "workbench" and tune.micro_batch == 4
        assert "this engine's" in whys(found)["strategy.stack"]
    elif how != "none":
        assert strategy.stack == stacks[how]
    else:
        assert strategy.stack.startswith("hf-trainer")
        assert "strategy.data.zero" in assumed(found)
    assert estimate(found.plan)


def test_states_are_those_of_the_weights_that_are_loaded() -> None:
    """Bytes a trained parameter: bf16 weights 2 + 2 + 4; fp32 weights under autocast 6 + 4 + 8."""

    def states(**more: Any) -> float:
        held = estimate(read("hf-trainer", **more).plan).memory
        rows = held[held["rank"] == 0] if "rank" in held else held
        parts = rows[rows["category"].isin(["parameters", "gradients", "optimizer"])]
        moment = parts[parts["moment"] == parts["moment"].iloc[0]] if "moment" in parts else parts
        return float(moment.drop_duplicates("category")["bytes"].sum())

    count = parameters(read("hf-trainer").plan.resolve().shape).total
    assert states() == pytest.approx(8 * count, rel=0.01)
    assert states(torch_dtype="float32") == pytest.approx(18 * count, rel=0.01)


def test_deepspeeds_autos_are_the_trainers() -> None:
    config = {
        **AUTO,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"},
        },
    }
    found = read("hf-trainer", deepspeed=config, warmup_steps=7, gradient_accumulation_steps=4)
    assert fields(
        found,
        "strategy.data.bucket_mib",
        "finetune.global_batch",
        "finetune.optimizer.learning_rate",
        "finetune.optimizer.beta2",
        "finetune.optimizer.warmup_steps",
        "finetune.optimizer.decay",
    ) == {
        "strategy.data.bucket_mib": 4096 * 4096 * 2 / 2**20,
        "finetune.global_batch": 64,
        "finetune.optimizer.learning_rate": 1e-5,
        "finetune.optimizer.beta2": 0.999,
        "finetune.optimizer.warmup_steps": 7,
        "finetune.optimizer.decay": "linear",
    }
    assert "deepspeed.zero_optimization.stage" in found.translated


@pytest.mark.parametrize("how", SHARDING)
@pytest.mark.parametrize(
    ("format", "more", "precision"),
    [
        ("llama-factory", {"fp8": True}, "fp8"),
        ("hf-trainer", {"bf16": False, "torch_dtype": "float32", "tf32": True}, "tf32"),
    ],
)
def test_what_products_are_computed_in_is_no_matter_of_the_sharding(
    format: TrainerFormat, more: dict[str, Any], precision: str, how: str
) -> None:
    found = read(format, **more, **SHARDING[how])
    assert found.plan.strategy.precision == precision
    if how == "deepspeed":
        gradients = {"fp8": "bf16", "tf32": "fp32"}
        assert found.plan.strategy.gradient_dtype == gradients[precision]


@pytest.mark.parametrize(
    ("format", "more", "gpus"),
    [
        ("llama-factory", {"ray_num_workers": 4}, 4),
        ("axolotl", {"use_ray": True, "ray_num_workers": 4}, 4),
        ("axolotl", {"use_ray": False, "ray_num_workers": 4}, 8),
    ],
)
def test_rays_workers_are_the_gpus(format: TrainerFormat, more: dict[str, Any], gpus: int) -> None:
    found = read(format, {"gpus": None if gpus == 4 else 8}, **more)
    assert found.plan.cluster.gpus == gpus
    assert ("ray_num_workers" in found.translated) == (gpus == 4)


@pytest.mark.parametrize(("stage", "packed"), [("sft", False), ("pt", True)])
def test_llama_factory_packs_rows_in_pre_training(stage: str, packed: bool) -> None:
    assert assumed(read("llama-factory", stage=stage))["packing"] is packed


@pytest.mark.parametrize(
    ("key", "value"),
    [("train_micro_batch_size_per_gpu", 4), ("gradient_clipping", 0.5), ("train_batch_size", 8)],
)
def test_settings_that_the_trainer_would_refuse_are_refused(key: str, value: Any) -> None:
    said = problems(read, "hf-trainer", deepspeed={**AUTO, key: value})
    assert "legal: auto, or the same" in said[f"deepspeed.{key}"]


@pytest.mark.parametrize("where", ["", "configs", ".."])
def test_a_file_beside_is_read(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / where).mkdir(exist_ok=True)
    (folder / where / "ds.json").write_text(json.dumps(AUTO))
    name = "ds.json" if where == ".." else str(Path(where) / "ds.json")
    path = folder / "recipe.yaml"
    path.write_text(yaml_files.dump({**BASE["llama-factory"], "deepspeed": name}))
    found = interop.load(path, gpu=GPU_NAME, gpus=8)
    assert found.plan.strategy.data.zero == 3
    assert "deepspeed" in found.translated and f"{name}: bf16.enabled" in found.translated


def test_a_file_that_is_not_there_is_asked_for_by_name_with_all_else() -> None:
    text = yaml_files.dump({**BASE["axolotl"], "base_model": "a/b", "deepspeed": "d/zero3.json"})
    said = problems(interop.read, text)
    assert set(said) == {"model", "gpus", "gpu", "deepspeed"}
    assert "d/zero3.json" in said["deepspeed"] and "a/b" in said["model"]
    found = read("axolotl", {"set": {"strategy.data.zero": 3}}, deepspeed="d/zero3.json")
    assert found.plan.strategy.data.zero == 3
    assert "is not here" in whys(found)["deepspeed"]


@pytest.mark.parametrize("name", ["../../ds.json", "/etc/hostname", "link.json"])
def test_files_elsewhere_are_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    folder = tmp_path / "a" / "b" / "c" / "d" / "e" / "f"
    folder.mkdir(parents=True)
    (folder / "link.json").symlink_to(tmp_path / "ds.json")
    path = folder / "x.yaml"
    path.write_text(yaml_files.dump({**BASE["hf-trainer"], "deepspeed": name}))
    assert "deepspeed" in problems(interop.load, path, gpu=GPU_NAME, gpus=8)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "loop"])
def test_a_name_that_no_file_has_is_refused_by_its_key(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = tmp_path / "x.yaml"
    path.write_text(yaml_files.dump({**BASE["hf-trainer"], "deepspeed": name}))
    assert "deepspeed" in problems(interop.load, path, gpu=GPU_NAME, gpus=8)
    path.write_text(yaml_files.dump({**BASE["hf-trainer"], "model_name_or_path": name}))
    assert "model" in problems(interop.load, path, gpu=GPU_NAME, gpus=8)
    launch = {"distributed_type": "DEEPSPEED", "num_processes": 8}
    launch |= {"deepspeed_config": {"deepspeed_config_file": name}}
    path.write_text(yaml_files.dump(launch))
    said = problems(interop.load, path, gpu=GPU_NAME, model="tiny")
    assert "deepspeed_config.deepspeed_config_file" in said


@pytest.mark.parametrize("format", FORMATS)
def test_unknown_arguments_are_refused_with_what_is_near(format: TrainerFormat) -> None:
    said = problems(read, format, learning_rte=1e-4)
    assert "learning_rate" in said["learning_rte"]
    text = yaml_files.dump({**BASE[format], "learning_rte": 1e-4})
    found = interop.read(text, format, gpu=GPU_NAME, gpus=8, lenient=True)
    assert [note.field for note in found.unknown] == ["learning_rte"]


@pytest.mark.parametrize(
    ("format", "more", "field"),
    [
        ("hf-trainer", {"num_generations": 8}, "num_generations"),
        ("hf-trainer", {"desirable_weight": 1.0}, "desirable_weight"),
        ("hf-trainer", {"optim": "adafactor"}, "optim"),
        ("hf-trainer", {"optim": "lion_8bit"}, "optim"),
        ("hf-trainer", {"load_in_8bit": True, "use_peft": True}, "load_in_8bit"),
        ("hf-trainer", {"load_in_4bit": True}, "load_in_4bit"),
        ("hf-trainer", {"beta": 0.1, "loss_type": "simpo"}, "loss_type"),
        ("hf-trainer", {"beta": 0.1, "output_dir": "runs/llama-orpo"}, "beta"),
        ("hf-trainer", {"attn_implementation": "mine"}, "attn_implementation"),
        (
            "hf-trainer",
            {"use_peft": True, "lora_target_modules": ["embed_tokens"]},
            "lora_target_modules",
        ),
        ("llama-factory", {"stage": "kto"}, "stage"),
        ("llama-factory", {"stage": "rm"}, "stage"),
        ("llama-factory", {"finetuning_type": "freeze"}, "finetuning_type"),
        ("llama-factory", {"quantization_bit": 8, "finetuning_type": "lora"}, "quantization_bit"),
        ("llama-factory", {"stage": "dpo", "pref_loss": "orpo"}, "pref_loss"),
        ("axolotl", {"rl": "grpo"}, "rl"),
        ("axolotl", {"adapter": "llama-adapter"}, "adapter"),
        ("axolotl", {"adapter": "qlora", "lora_r": 8}, "load_in_4bit"),
        ("hf-trainer", {"bf16": True, "fp16": True}, "fp16"),
        ("axolotl", {"optimizer": "muon"}, "optimizer"),
        ("axolotl", {"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins"),
        ("axolotl", {"context_parallel_size": 3}, "gpus"),
    ],
)
def test_what_would_be_another_run_is_refused(
    format: TrainerFormat, more: dict[str, Any], field: str
) -> None:
    assert field in problems(read, format, **more)


@pytest.mark.parametrize(
    ("format", "key"),
    [(format, key) for format in FORMATS for key in known.REFUSED if key in dialect(format).known],
)
def test_an_argument_in_the_table_of_refusals(format: TrainerFormat, key: str) -> None:
    assert known.REFUSED[key] in problems(read, format, **{key: True})[key]
    assert "off" in whys(read(format, **{key: False}))[key]


def test_the_trainers_defaults_are_the_packages() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    now = {field.name: field.default for field in dataclasses.fields(arguments)}
    assert set(now) - {"default_optim"} <= dialect("hf-trainer").known
    told = {key: v for key, v in dialect("hf-trainer").defaults.items() if key in now}
    same = {key: value == now[key] for key, value in told.items() if now[key] is not None}
    same.pop("optim")  # the fused kernel of the same states, by the version of torch
    assert all(same.values()), same


@pytest.mark.parametrize("format", FORMATS)
def test_names_that_the_reader_spells_are_the_frameworks(format: TrainerFormat) -> None:
    for trainer in ("", "SFT", "DPO") if format == "hf-trainer" else ("",):
        assert set(dialect(format, trainer).defaults) <= dialect(format, trainer).known
    odd = {
        name
        for meaning in SPELLING[format]
        for name in spellings(format, meaning)[:1]
        if name not in dialect(format).known
    }
    missing = {"dtype", "attn_implementation", "use_bnb_nested_quant", "bnb_4bit_quant_type"}
    others = {"gradient_checkpointing", "use_liger_kernel", "lora_r", "lora_target_modules"}
    assert odd <= (set() if format == "hf-trainer" else missing | others)


@pytest.mark.parametrize(
    ("more", "trainer"),
    [
        ({}, "TRL (SFT)"),
        ({"max_length": None}, "the Trainer"),
        ({"beta": 0.1, "loss_type": "ipo"}, "TRL (DPO)"),
    ],
)
def test_whose_defaults_are_taken_is_said(more: dict[str, Any], trainer: str) -> None:
    found = read("hf-trainer", learning_rate=None, **more)
    assert trainer in whys(found)["finetune.optimizer.learning_rate"]
    recompute = "none" if trainer == "the Trainer" else "full"
    assert found.plan.strategy.recompute == recompute
    assert ("trainer" in assumed(found)) == (trainer == "the Trainer")


def test_beta_alone_asks_which_method_it_is() -> None:
    assert "DPO, ORPO" in problems(read, "hf-trainer", beta=0.1)["finetune.preference.beta"]
    for found in (
        read("hf-trainer", beta=0.1, output_dir="runs/llama-dpo"),
        read("hf-trainer", {"set": {"finetune.preference.beta": 0.1}}, beta=0.1),
    ):
        assert found.plan.finetune and found.plan.finetune.preference


def test_epochs_are_no_steps_and_a_long_warm_up_asks() -> None:
    found = read("axolotl", max_steps=None, num_epochs=3)
    assert assumed(found)["finetune.steps"] == 100 and "3 epochs" in whys(found)["finetune.steps"]
    assert found.plan.training.optimizer.warmup_steps == 3  # axolotl: 3 % of the steps
    said = problems(read, "axolotl", max_steps=None, warmup_steps=500)
    assert "500 steps" in said["finetune.steps"]
    for field in ("finetune.steps", "training.steps"):
        found = read("axolotl", {"set": {field: 1000}}, max_steps=None, warmup_ratio=0.5)
        assert found.plan.training.steps == 1000 and "finetune.steps" not in assumed(found)
        assert found.plan.training.optimizer.warmup_steps == 500


def test_two_names_of_one_thing_that_differ_are_refused() -> None:
    assert "another name" in problems(read, "hf-trainer", max_seq_length=1024)["max_seq_length"]


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ({"torch_dtype": "float32", "use_peft": True, "lora_r": 8}, "torch_dtype", "+ 2 bytes x"),
        ({"optim": "paged_adamw_8bit"}, "optim", "paged"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha", "the same memory and time"),
        ({"packing": False}, "packing", "the most memory and time"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type", "cosine was taken"),
        ({"save_strategy": "epoch"}, "save_strategy", "an epoch"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size", "halved"),
        ({"num_train_epochs": 3}, "num_train_epochs", "max_steps stands above"),
    ],
)
def test_what_a_plan_cannot_say_is_listed_with_what_it_changes(
    more: dict[str, Any], field: str, words: str
) -> None:
    assert words in whys(read("hf-trainer", **more))[field]


def test_a_reference_beside_the_policy_is_said_with_its_size() -> None:
    found = read("hf-trainer", beta=0.1, loss_type="sigmoid")
    size = gib_text(2 * parameters(found.plan.resolve().shape).total)
    assert size in whys(found)["finetune.preference"]


CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


@pytest.mark.parametrize(
    ("more", "fields_said"),
    [
        ({"context_parallel_size": 2}, {"strategy.context.size": 2, "finetune.global_batch": 8}),
        (
            {"tensor_parallel_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2},
            {"strategy.tensor.size": 2, "strategy.data.zero": 3, "strategy.data.shard": 2},
        ),
        (
            {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}},
            {"strategy.data.zero": 3, "strategy.data.keep_gathered": True},
        ),
        ({"gradient_checkpointing": "offload"}, {"strategy.recompute": "full"}),
        (
            {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rms_norm": True},
            {"strategy.kernels": "liger", "strategy.loss": "auto"},
        ),
        ({"cut_cross_entropy": True}, {"strategy.loss": "fused_linear"}),
        ({"plugins": [CUT]}, {"strategy.loss": "fused_linear"}),
        ({"plugins": [CUT], "cut_cross_entropy": False}, {"strategy.loss": "auto"}),
        (
            {"max_steps": 200, "num_epochs": 4, "saves_per_epoch": 1, "evals_per_epoch": 2}
            | {"save_steps": None, "val_set_size": 0.1},
            {"checkpoint.every": 50, "finetune.evaluation.every": 25},
        ),
        (
            {"max_steps": 200, "saves_per_epoch": 1, "evals_per_epoch": 2, "num_epochs": 1}
            | {"save_steps": None, "val_set_size": 0},
            {"checkpoint.every": 0, "finetune.evaluation.every": 0},
        ),
        ({"bf16": False, "fp16": True}, {"strategy.precision": "fp16"}),
        ({"gradient_accumulation_steps": None, "batch_size": 8}, {"finetune.global_batch": 64}),
        ({"cosine_min_lr_ratio": 0.2}, {"finetune.optimizer.final_ratio": 0.2}),
    ],
)
def test_axolotls_own_words(more: dict[str, Any], fields_said: dict[str, Any]) -> None:
    found = read("axolotl", **more)
    plain = {"strategy.loss": found.plan.strategy.loss}
    assert fields(found, *fields_said) | (plain if "strategy.loss" in fields_said else {}) == (
        fields_said
    )
    assert estimate(found.plan)


@pytest.mark.parametrize(
    ("gpu", "precision"), [("a100-sxm-80gb", "bf16"), ("v100-sxm2-32gb", "fp16")]
)
def test_auto_is_what_the_gpu_has(gpu: str, precision: str) -> None:
    found = read("axolotl", {"gpu": gpu})
    assert found.plan.strategy.precision == precision
    assert found.plan.strategy.attention == ("flash-2" if precision == "bf16" else "efficient")
    assert estimate(found.plan)


def test_each_setting_of_fsdp_is_in_the_account() -> None:
    config = {
        **{"cpu_offload": True, "min_num_params": 0, "xla": False, "version": 2},
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "mixed_precision_policy": {"param_dtype": "bf16"},
        "backward_prefetch": "backward_pre",
    }
    found = read("hf-trainer", fsdp="full_shard auto_wrap", fsdp_config=config)
    told = {*found.translated, *left(found)}
    assert {f"fsdp_config.{key}".split(".param")[0] for key in config} <= {
        key.removesuffix(".param_dtype") for key in told
    }
    assert found.plan.strategy.data.offload == "parameters"


LINE = (
    "accelerate launch --config_file launch.yaml --num_processes 4 run_sft.py recipe.yaml "
    "--learning_rate 3e-5 --no_remove_unused_columns --max_steps ${STEPS}\n"
)


def test_a_launch_with_its_files_is_one_plan(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml_files.dump(BASE["hf-trainer"]))
    launch = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 8,
        "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
    }
    (tmp_path / "launch.yaml").write_text(yaml_files.dump(launch))
    path = tmp_path / "train.sh"
    path.write_text("STEPS=70\n" + LINE)
    found = interop.load(path, gpu=GPU_NAME)
    assert fields(
        found,
        "cluster.gpus",
        "strategy.data.zero",
        "strategy.data.offload",
        "strategy.stack",
        "finetune.optimizer.learning_rate",
        "finetune.steps",
        "finetune.global_batch",
    ) == {
        "cluster.gpus": 4,
        "strategy.data.zero": 2,
        "strategy.data.offload": "optimizer",
        "strategy.stack": "deepspeed-zero",
        "finetune.optimizer.learning_rate": 3e-5,
        "finetune.steps": 70,
        "finetune.global_batch": 8,
    }
    path.write_text(LINE)
    said = problems(interop.load, path, gpu=GPU_NAME)
    assert "STEPS" in said["max_steps"]
    path.write_text("accelerate launch --config_file launch.yaml scripts/dpo.py recipe.yaml\n")
    found = interop.load(path, gpu=GPU_NAME)
    assert found.plan.cluster.gpus == 8 and found.plan.strategy.data.zero == 2
    assert found.plan.finetune and found.plan.finetune.preference
    (tmp_path / "launch.yaml").write_text(yaml_files.dump({**launch, "distributed_type": "NO"}))
    assert interop.load(path, gpu=GPU_NAME).plan.cluster.gpus == 1


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        ("trl sft --model_name_or_path gpt2 --per_device_train_batch_size 4", "TRL (SFT)"),
        ("trl dpo --model_name_or_path gpt2 --per_device_train_batch_size 4", "TRL (DPO)"),
        (
            "python train.py --model_name_or_path gpt2 --per_device_train_batch_size 4",
            "the Trainer",
        ),
        ("--model_name_or_path gpt2 --per_device_train_batch_size 4", "the Trainer"),
    ],
)
def test_a_command_says_which_trainer_it_is(text: str, trainer: str) -> None:
    found = interop.read(text, gpu=GPU_NAME, gpus=2)
    assert found.format == "hf-trainer"
    assert trainer in whys(found)["finetune.optimizer.learning_rate"]
    assert bool(found.plan.finetune and found.plan.finetune.preference) == ("DPO" in trainer)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("NousResearch/Meta-Llama-3-8B", "llama-3-8b"),
        ("unsloth/Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("openai-community/gpt2", "gpt2"),
        ("mistralai/Mistral-7B-Instruct-v0.2", None),
        ("meta-llama/Llama-3.1-8B", None),
        ("HuggingFaceH4/zephyr-7b-beta", None),
    ],
)
def test_a_model_of_the_hub_by_its_name(name: str, entry: str | None) -> None:
    assert by_hub_name(name) == entry


def test_a_folder_of_weights_is_the_model_and_its_base(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    shape: dict[str, object] = {"hidden_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4}
    shape |= {"intermediate_size": 128, "vocab_size": 512, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 512}))
    (folder / "model.safetensors").write_bytes(b"")
    path = tmp_path / "x.yaml"
    path.write_text(yaml_files.dump({**BASE["hf-trainer"], "model_name_or_path": "weights"}))
    found = interop.load(path, gpu=GPU_NAME, gpus=8)
    assert found.plan.resolve().shape.hidden == 64
    assert found.plan.finetune and found.plan.finetune.base == str(folder)
