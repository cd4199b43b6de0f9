"""The format of a text is found by marks that only it has; a text in none is refused by its own
name, read leniently or not.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, problems
from workbench import interop
from workbench.data_files import read_data_file
from workbench.errors import PlanError
from workbench.interop.format_marks import frameworks
from workbench.interop.translation import SOURCES

SAMPLES = Path(__file__).parent / "foreign"
ROOT = Path(__file__).parents[2]
KEY_TABLES = ("deepspeed", "megatron", "torchtitan", "accelerate", "gpt-neox")
OTHERS = {
    "torchrun": ("torchrun --nnodes 2 --nproc_per_node 8 --master_addr h0 train.py\n", "'torchrun"),
    "torchrun-more": (
        "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d train.py --lr 1e-4 --bf16 "
        "--seed 3 --save out\n",
        "no framework whose arguments are known",
    ),
    "deepspeed-launch": (
        "deepspeed --num_gpus 8 train.py --deepspeed conf/ds_z3.json --bf16\n",
        "Give 'conf/ds_z3.json', which it names",
    ),
    "another-script": ('bash -x "$HERE/run_8b.sh" $1\n', "Give that one"),
    "in-a-container": (
        "srun bash -c 'docker run x bash -c \"TP=2 bash examples/train_v3.sh 2>&1\"'\n",
        "'examples/train_v3.sh'",
    ),
    "sourced": ("TP=8\nEXTRA='--bf16'\n. `pwd`/CONFIG.sh\n", "stand in another"),
    "deepspeed-chat": (
        "deepspeed main.py --model_name_or_path x --per_device_train_batch_size 2 --zero_stage 2\n",
        "DeepSpeed-Chat",
    ),
    "ms-swift": ("NPROC_PER_NODE=8 swift sft --model x --deepspeed zero3 --bf16\n", "ms-swift"),
    "ms-swift-megatron": (
        "megatron sft --load x --tensor_model_parallel_size 2 --micro_batch_size 1 "
        "--global_batch_size 16 --train_iters 9\n",
        "ms-swift",
    ),
    "verl-script": (
        "python3 -m verl.trainer.main_ppo data.train_batch_size=1024 "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2\n",
        "verl",
    ),
    "openrlhf": (
        "deepspeed --module openrlhf.cli.train_sft --max_len 2048 --train_batch_size 256 \\\n"
        "  --micro_train_batch_size 2 --zero_stage 3 --bf16 --seed 1 --lr_warmup_ratio 0.03 "
        "--l2 0.1 --load x --weight_decay 0\n",
        "OpenRLHF",
    ),
    "colossalai": (
        "colossalai run --nproc_per_node 8 --master_port 1 train.py --plugin gemini --tp 2 "
        "--bf16 --lr 1e-4 --save-interval 10 --seed 1\n",
        "Colossal-AI",
    ),
    "weights-tool": (
        "python tools/convert.py --model_name_or_path x --output_dir y --lora_rank 8\n",
        "no framework whose arguments are known",
    ),
    "torchtune": (
        "output_dir: /tmp/x\nmodel:\n  _component_: torchtune.models.x\nbatch_size: 2\n"
        "optimizer:\n  _component_: torch.optim.AdamW\n  lr: 2e-5\nepochs: 1\ndtype: bf16\n"
        "gradient_accumulation_steps: 4\nseed: null\n",
        "torchtune",
    ),
    "nanotron": (
        "general: {project: x, seed: 42}\nmodel:\n  dtype: bfloat16\n  model_config: "
        "{hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 99}\n"
        "parallelism: {dp: 2, tp: 8, pp: 1}\n"
        "tokens: {micro_batch_size: 64, sequence_length: 128, train_steps: 10}\n",
        "nanotron",
    ),
    "nanotron-short": (
        "parallelism: {tp: 8}\ntokens: {micro_batch_size: 64}\nmodel: {dtype: bfloat16}\n",
        "nanotron",
    ),
    "automodel": (
        "step_scheduler: {global_batch_size: 64, local_batch_size: 8}\nmodel:\n"
        "  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n"
        "optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5}\n",
        "Automodel",
    ),
    "primus": (
        "work_group: x\nmodules:\n  pre_trainer:\n    framework: megatron\n    overrides:\n"
        "      train_iters: 50\n      micro_batch_size: 2\n      global_batch_size: 128\n"
        "      seq_length: ${PRIMUS_SEQ:4096}\n",
        "Primus",
    ),
    "primus-module": (
        "extends: [../module_base.yaml]\ntrain_iters: 9\nglobal_batch_size: 16\n"
        "micro_batch_size: 2\nseq_length: 1024\n",
        "Primus",
    ),
    "bridge": (
        "model: {tensor_model_parallel_size: 2, seq_length: 4096}\n"
        "train: {train_iters: 10, global_batch_size: 8, micro_batch_size: 1}\n"
        "optimizer: {lr: 1.0e-4}\n",
        "Megatron-Bridge",
    ),
    "mindformers": (
        "runner_config: {epochs: 2, batch_size: 4}\nparallel_config: {data_parallel: 2, "
        "model_parallel: 4}\nmodel: {model_config: {type: X, seq_length: 4096, num_layers: 4, "
        "hidden_size: 64}}\n",
        "MindFormers",
    ),
    "verl": (
        "actor_rollout_ref: {actor: {ppo_micro_batch_size: 4, fsdp_config: {}}}\n"
        "trainer: {n_gpus_per_node: 8}\n",
        "verl",
    ),
    "flux": (
        '[model]\nname = "flux"\nflavor = "flux-dev"\n[training]\nlocal_batch_size = 4\n'
        '[encoder]\nt5_encoder = "x"\n[parallelism]\ndata_parallel_shard_degree = 8\n',
        "flux",
    ),
    "python": (
        "# Copyright\nimport os\nfrom x import y\n\n\ndef recipe():\n"
        '    return ["--num-layers", "4", "--hidden-size", "64", "--micro-batch-size", "1"]\n',
        "Python",
    ),
    "python-nemo": (
        "# Copyright\nimport nemo_run as run\nfrom nemo.collections import llm\n"
        "from megatron.core import x\n",
        "NeMo",
    ),
    "python-bridge": ("from megatron.bridge.recipes import x\n", "Megatron-Bridge"),
    "python-megatron": ("from megatron.training import pretrain\n", "Megatron-LM"),
    "python-colossal": ("def f():\n    import colossalai.nn\n", "Colossal-AI"),
    "python-torchtitan": ("from torchtitan.config import JobConfig\n", "torchtitan"),
    "python-flux": ("import torchtitan.models.flux.x\n", "flux"),
    "python-short": ("from a import b\n\nb(tensor_model_parallel_size=4)\n", "Python"),
    "config": ('{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}', "config.json"),
    "yaml": ("fp16: true\noptimizer: adam\n", "no format"),
    "toml": ('[tool]\nname = "x"\n[model]\nkind = "y"\n', "no format"),
}


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_framework_is_refused_by_its_name(name: str, lenient: bool) -> None:
    text, named = OTHERS[name]
    beside = {"model": "llama-3-8b", "gpu": GPU_NAME, "gpus": 16, "lenient": lenient}
    assert named in problems(interop.read, text, **beside)["file"]


@pytest.mark.parametrize(
    ("text", "format"),
    [
        *(
            ((SAMPLES / name).read_text(), format)
            for name, format in (
                ("accelerate.yaml", "fsdp"),
                ("accelerate_deepspeed.yaml", "fsdp"),
                ("ds_config.json", "deepspeed"),
                ("gpt_neox.yml", "gpt-neox"),
                ("megatron.sh", "megatron"),
                ("megatron.yaml", "megatron"),
                ("torchtitan.toml", "torchtitan"),
                ("hf_trainer.yaml", "hf-trainer"),
                ("llama_factory.yaml", "llama-factory"),
                ("axolotl.yml", "axolotl"),
            )
        ),
        ('{"bf16": {"enabled": true}}', "deepspeed"),
        ('{"per_device_train_batch_size": 2, "bf16": true}', "hf-trainer"),
        ("trl sft --model_name_or_path x --per_device_train_batch_size 2", "hf-trainer"),
        ('{"train_batch_size": 8, "bf16": {"enabled": "auto"}}', "deepspeed"),
        ('{"train_batch_size": 8, "gradient_accumulation_steps": 2}', "deepspeed"),
        ('{"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}', "deepspeed"),
        ('{"train_batch_size": 8, "zero_optimisation": {"stage": 1}}', "deepspeed"),
        ("zero_optimization:\n  stage: 2\nfp16:\n  enabled: true\n", "deepspeed"),
        ("ARGS='--lr 1e-4 --min-lr 1e-5 --train-iters 100'\n", "megatron"),
        ("--num-layers 2 --hidden-size 64 --seq-length 32", "megatron"),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2", "megatron"),
        ("# comment\ntrain_iters: 5\nlr: 0.1\nbf16: true\n", "megatron"),
        ("compute_environment: LOCAL_MACHINE\nnum_processes: 8\n", "fsdp"),
        ("[training]\nsteps = 4\n", "torchtitan"),
    ],
)
def test_a_format_is_known_by_its_own_marks(text: str, format: str) -> None:
    assert interop.detect(text) == format


@pytest.mark.parametrize(
    "text",
    [
        '{"train_micro_batch_size_per_gpu":1,"zero_optimization":{"stage":3},"bf17":"auto"}',
        '{"train_batch_size":16,"zero_optimization":{"stage":3,"stages":"auto"}}',
    ],
)
def test_auto_makes_no_key_known(text: str) -> None:
    beside = {"model": "llama-3-8b", "gpu": GPU_NAME, "gpus": 16}
    (message,) = problems(interop.read, text, **beside).values()
    assert "unknown key" in message
    found = interop.read(text, lenient=True, **beside)
    assert [note.value for note in found.unknown] == ["auto"]


def _with(mark: str) -> dict[str, Any]:
    """A mapping that has the keys of a mark."""
    found: dict[str, Any] = {}
    for part in mark.split(" + "):
        path, _, value = part.partition("=")
        section = found
        *above, last = path.removeprefix("*.").split(".")
        for name in above:
            section = section.setdefault(name, {})
        section.setdefault(last, f"{value}.x" if value else 1)
    return found


LLAMA = "---\n# a run\nmodel_name_or_path: x\nstage: sft\nfinetuning_type: full\n"
REGISTRY = "from torchtitan.trainer import Trainer\ndef f() -> Trainer.Config:\n    a = "


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (LLAMA + "seed: 1\nseed: 2\n", "seed", "written twice"),
        (LLAMA + "deepspeed: *d\n", "file", "undefined alias"),
        (LLAMA + "deepspeed: &d {a: *d}\n", "file", "not valid YAML"),
        (LLAMA + "a: " + "[" * 5000 + "\n", "file", "nested too deeply"),
        (LLAMA + "a: [1\n", "file", "not valid YAML"),
        (REGISTRY + "+".join(["1"] * 20_000) + "\n", "file", "nested too deeply"),
        (REGISTRY + "(1\n", "file", "not valid Python"),
    ],
)
def test_a_damaged_file_is_refused_by_its_damage(text: str, field: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        interop.read(text, gpu=GPU_NAME, gpus=8)
    assert caught.value.problems[0].field == field and words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "mark"), [(one.name, mark) for one in frameworks() for mark in one.keys]
)
def test_each_mark_shows_its_framework(name: str, mark: str) -> None:
    framework = next(one for one in frameworks() if one.name == name)
    text = json.dumps(_with(mark))
    if name in SOURCES and "keys" in framework.read:
        assert interop.detect(text) == name
    else:
        assert f"configuration of {framework.title};" in problems(interop.detect, text)["file"]


@pytest.mark.parametrize(
    ("name", "module"), [(one.name, module) for one in frameworks() for module in one.imports]
)
def test_each_import_shows_its_framework(name: str, module: str) -> None:
    framework = next(one for one in frameworks() if one.name == name)
    if "imports" in framework.read:
        return  # its Python is read
    for text in (f"import {module}\n", f"def f():\n    from {module}.x import y\n"):
        assert f"code of {framework.title};" in problems(interop.detect, text)["file"]


def test_the_page_says_which_versions_keys_and_marks_are_of() -> None:
    page = (ROOT / "docs/import.md").read_text(encoding="utf-8")
    for name in KEY_TABLES:
        table = read_data_file(f"data/foreign/{name}.yaml")
        assert f"| {table['framework']} | {table['version']} | {table['date']} |" in page
    marks = " ".join(page[page.index("Marks are known of") :].split())
    for framework in frameworks():
        assert (
            f"{framework.version}," in marks or f"{framework.version} ({framework.date})" in marks
        )


@pytest.mark.parametrize(
    ("old", "new"),
    [("num_processes: 16", "num_processes: 1e3"), ("num_processes: 16", "num_processes: 16.0")],
)
def test_a_number_of_processes_is_written_as_one(old: str, new: str) -> None:
    text = "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\n".replace(old, new)
    beside = {"model": "llama-3-8b", "gpu": GPU_NAME}
    assert "integer" in problems(interop.read, text, **beside)["num_processes"]
