"""Scripts that start Megatron-LM, read and not run: what the shell would pass on, and what the file
leaves open.
"""

from typing import Any

import pytest

from workbench import interop
from workbench.errors import PlanError
from workbench.interop.foreign_keys import UndecidedValue
from workbench.interop.megatron.argument_words import arguments, flags
from workbench.interop.translation import Imported

GPU_NAME = "h100-sxm-80gb"
OPEN = "left open by the file"
SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --micro-batch-size 1"
)


def script(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *lines, ""])


def read(*lines: str, **given: Any) -> Imported:
    return interop.read(script(*lines), "megatron", **{"gpu": GPU_NAME, "gpus": 8, **given})


def problems(*lines: str, **given: Any) -> dict[str, Any]:
    with pytest.raises(PlanError) as caught:
        read(*lines, **given)
    return {problem.field: problem.message for problem in caught.value.problems}


def told(notes: list[Any]) -> dict[str, Any]:
    return {note.field: (note.value, note.why) for note in notes}


def test_a_comment_that_ends_in_a_backslash_is_one_line() -> None:
    found = read(
        f'GPT_ARGS="{SHAPE}"',
        "#    --universal-checkpoint \\",
        'export TP_ARGS="--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"',
        "torchrun --nproc-per-node 8 pretrain_gpt.py $GPT_ARGS $TP_ARGS",
    )
    assert found.plan.resolve().sizes == {"tensor": 4, "context": 1, "data": 1, "pipeline": 2}
    assert told(found.ignored) == {"line 3": ("# --universal-checkpoint \\", "a comment")}


@pytest.mark.parametrize(
    "lines, passed",
    [
        (
            ["A=4; B=2", "python pretrain_gpt.py --num-layers $((A * B)) --hidden-size ${B}56"],
            {"num-layers": 8, "hidden-size": 256},
        ),
        (
            [
                "ARGS=(",
                "  --num-layers 4  # four",
                "  # --hidden-size 8 \\",
                "  --hidden-size 64",
                ")",
                "ARGS+=(--bf16)",
                'torchrun pretrain_gpt.py "${ARGS[@]}"',
            ],
            {"num-layers": 4, "hidden-size": 64, "bf16": True},
        ),
        (
            [
                "python pretrain_gpt.py --num-layers 4 \\",
                "  --train-samples 220_000_000 --lr 6.0e-5",
            ],
            {"num-layers": 4, "train-samples": 220_000_000, "lr": 6e-5},
        ),
        (
            [
                "export N='4'",
                'CMD="python pretrain_gpt.py --num-layers $N --save \\"a b\\""',
                "echo $CMD",
                "eval $CMD",
            ],
            {"num-layers": 4, "save": "a b"},
        ),
        (
            [
                'srun bash -c "python -u pretrain_gpt.py --num-layers 4 --hidden-size 8" 2>&1 | '
                "tee log"
            ],
            {"num-layers": 4, "hidden-size": 8},
        ),
        (
            [
                "D=bf16",
                "cd /x && python pretrain_gpt.py --$D --num-layers=4 --split 1,2 $@ > out &",
            ],
            {"bf16": True, "num-layers": 4, "split": "1,2"},
        ),
        (
            [
                "train() {",
                '  python pretrain_gpt.py --num-layers $1 --save "$2"',
                "}",
                "train 4 '/a b'",
            ],
            {"num-layers": 4, "save": "/a b"},
        ),
        (
            [
                "case gpt-7b in",
                "  *1b) L=2 ;;",
                "  *7b) L=4 ;;",
                "esac",
                "python pretrain_gpt.py --num-layers $L",
            ],
            {"num-layers": 4},
        ),
        (
            [
                "T=$(( 300 * 10 / 7 / 2 ))",
                "[ $T -gt 5 ] && X='--bf16'",
                "[[ $T == 5 ]] && X='--fp16'",
                "python pretrain_gpt.py --train-iters $T $X",
            ],
            {"train-iters": 214, "bf16": True},
        ),
        (
            [
                "cat <<EOT > ds.json",
                '{"a": "--tensor-model-parallel-size 8"}',
                "EOT",
                "deepspeed --num_gpus 4 pretrain_gpt.py --num-layers 4",
            ],
            {"num-layers": 4, "nproc-per-node": 4},
        ),
        (
            [
                "python tools/preprocess_data.py --seq-length 9 --num-layers 3 --workers 5",
                "python pretrain_gpt.py --num-layers 4",
            ],
            {"num-layers": 4},
        ),
        (
            [
                'run_cmd="python -u `pwd`/pretrain_gpt.py $@ --num-layers 4 --save <PATH TO IT> '
                '--fp16 "',
                'srun -l --output=$DIR/x.log sh -c "${run_cmd}"',
            ],
            {"num-layers": 4, "save": "%PATH_TO_IT%", "fp16": True},
        ),
        (
            [
                "C='--num-layers 4'",
                "export C",
                "bash -c 'python -m pretrain_gpt --node_rank ${RANK} $C' 2>&1 | tee x",
            ],
            {"num-layers": 4, "node-rank": OPEN},
        ),
        (
            ["A=${LAYERS:-4}", "M=${MODEL^^}", "python pretrain_gpt.py --num-layers ${A}"],
            {"num-layers": 4},
        ),
        (
            [
                'GPT_ARGS="--num-layers 4"',
                "# the rest is in the file that sources this one",
                "MORE=(--hidden-size 8)",
            ],
            {"num-layers": 4, "hidden-size": 8},
        ),
        (
            ["X=(--num-layers 4 --lr 1)", "python pretrain_gpt.py $X --hidden-size 3"],
            {"num-layers": True, "hidden-size": 3},
        ),
    ],
)
def test_what_the_shell_would_pass(lines: list[str], passed: dict[str, Any]) -> None:
    found = {
        flag: OPEN if isinstance(value, UndecidedValue) else value
        for flag, value in flags(script(*lines)).items()
    }
    assert found == passed


def test_words_that_a_line_does_not_go_on_to_are_no_arguments() -> None:
    found = arguments(
        script(f"torchrun pretrain_gpt.py {SHAPE} \\", "  # --seq-length 8 \\", "  --bf16")
    )
    assert "bf16" not in found.flags
    assert "the line before does not go on" in told(found.ignored)["line 4"][1]


def test_arguments_that_no_command_uses_are_told() -> None:
    found = read(f"torchrun pretrain_gpt.py {SHAPE}", 'MOE="--num-experts 8"', "mkdir -p logs")
    assert found.plan.resolve().shape.moe is None
    assert told(found.ignored)["$MOE"] == (
        "--num-experts 8",
        "no training command uses it (line 3)",
    )
    assert told(found.ignored)["line 4"] == ("mkdir -p logs", "another command")


def test_a_value_written_twice() -> None:
    found = read(f"python pretrain_gpt.py {SHAPE} \\", "  --num-layers 4")
    assert told(found.ignored)["--num-layers"] == (
        4,
        "written twice with the same value (lines 2 and 3)",
    )
    lines = [f"python pretrain_gpt.py {SHAPE} \\", "  --num-layers 6"]
    assert problems(*lines)["--num-layers"].startswith(
        "is 4 (line 2) and 6 (line 3), written twice; keep one of them"
    )
    assert read(*lines, set={"num-layers": 6}).plan.resolve().shape.layers == 6
    assert read(*lines, set={"model.layers": 4}).plan.resolve().shape.layers == 4


BRANCHES = [
    'if [ "$SIZE" == big ]; then',
    "  TP=4; LAYERS=8",
    "else",
    "  TP=2; LAYERS=8",
    "fi",
    f"torchrun --nproc_per_node 8 pretrain_gpt.py {SHAPE} --tensor-model-parallel-size $TP "
    "--seq-length $((LAYERS * 8))",
]


def test_branches_that_differ_are_refused_with_both_lines() -> None:
    message = problems(*BRANCHES)["--tensor-model-parallel-size"]
    assert "4 (line 3) or 2 (line 5)" in message and '[ "$SIZE" == big ]' in message
    assert message.endswith(
        "--set strategy.tensor.size=VALUE, or --set SIZE=VALUE, which the script reads"
    )


@pytest.mark.parametrize(
    "given, size",
    [
        ({"strategy.tensor.size": 1}, 1),
        ({"tensor-model-parallel-size": 4}, 4),
        ({"SIZE": "big"}, 4),
        ({"SIZE": "small"}, 2),
    ],
)
def test_branches_are_decided_from_outside(given: dict[str, Any], size: int) -> None:
    plan = read(*BRANCHES, set=given).plan
    assert plan.strategy.tensor.size == size and plan.training.sequence_length == 64


def test_what_is_set_is_known_to_the_script() -> None:
    assert "FOO is no variable that the file reads" in problems(*BRANCHES, set={"FOO": 1})["--set"]
    found = read(*BRANCHES, set={"SIZE": "big", "bf16": True, "seed": 5})
    assert (found.plan.strategy.precision, found.plan.training.seed) == ("bf16", 5)
    assert "--seed" not in told(found.ignored)


def test_a_condition_that_the_file_decides() -> None:
    assert read("SIZE=big", *BRANCHES).plan.strategy.tensor.size == 4
    assert read("SIZE=small", *BRANCHES).plan.strategy.tensor.size == 2


def test_a_flag_in_one_branch_only_is_open_where_a_plan_needs_it() -> None:
    lines = [
        "if [ $FP8 = 1 ]; then",
        "  X='--bf16 --log-interval 5'",
        "fi",
        f"python pretrain_gpt.py {SHAPE} $X",
    ]
    assert "given (line 3) or not given" in problems(*lines)["--bf16"]
    found = read(*lines, set={"bf16": True})
    assert found.plan.strategy.precision == "bf16"
    assert told(found.untranslated)["--log-interval"][0] == "5 (line 3) or not given"


def test_what_only_a_run_would_know_is_named() -> None:
    lines = [
        "TP=$1",
        "DIR=$(pwd)/x",
        f"python pretrain_gpt.py {SHAPE} --tensor-model-parallel-size $TP --save $DIR $EXTRA_ARGS",
    ]
    message = problems(*lines)["--tensor-model-parallel-size"]
    assert (
        "$1 (line 2), whose value the file does not say" in message
        and "--set strategy.tensor.size" in message
    )
    found = read(*lines, set={"1": 2})
    assert found.plan.strategy.tensor.size == 2
    assert told(found.untranslated)["--save"][0].startswith("$(pwd)/x")
    assert "no argument that the file gives" in told(found.untranslated)["$EXTRA_ARGS"][1]


def test_a_model_that_is_given_fills_an_open_shape() -> None:
    lines = ["python pretrain_gpt.py --num-layers $LAYERS --hidden-size $1 --num-attention-heads 4"]
    assert set(problems(*lines)) >= {"--num-layers", "--hidden-size"}
    assert read(*lines, model="tiny").plan.model == "tiny"


def test_the_environment_s_default_is_no_word_of_the_file() -> None:
    launcher = "torchrun --nproc_per_node ${GPUS:-8} --nnodes ${SLURM_NNODES:-1}"
    line = f"{launcher} pretrain_gpt.py {SHAPE} --seed ${{SEED:-7}}"
    found = read(line, gpus=32)
    assert found.plan.resolve().cluster.gpus == 32
    assumed = told(found.assumed)
    assert told(found.ignored)["--nnodes"] == ("1", "32 GPUs are given")
    assert assumed["--seed"] == (7, "default of the environment variable $SEED")
    assert assumed["--seed"][0] == 7 == found.plan.training.seed
    assert read(line, gpus=None).plan.resolve().cluster.gpus == 8


def test_the_default_of_an_argument_of_the_script_is_told_as_such() -> None:
    found = read(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SHAPE} --seed ${{1:-7}}", gpus=None)
    assert told(found.assumed)["--seed"] == (7, "default of the script's argument $1")


def test_slurm_s_own_lines_say_how_many_nodes() -> None:
    line = f"torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES pretrain_gpt.py {SHAPE}"
    found = read("#SBATCH --nodes=4", line, gpus=None)
    assert found.plan.resolve().cluster.gpus == 32


def test_what_a_script_asks_of_its_environment_is_taken_as_given() -> None:
    lines = [
        'if [[ -z "$TOKENIZER" ]]; then',
        "  echo 'set TOKENIZER'; exit 1",
        "fi",
        f"python pretrain_gpt.py {SHAPE}",
    ]
    assert read(*lines).plan.resolve().shape.layers == 4


def test_another_file_that_is_sourced_is_named() -> None:
    found = read("source config.sh", f"python pretrain_gpt.py {SHAPE}")
    assert told(found.ignored)["line 2"] == ("source config.sh", "another file, which is not read")


def test_a_script_without_a_vocabulary_asks_for_one() -> None:
    bare = SHAPE.replace("--vocab-size 512", "")
    assert "--vocab-size" in problems(f"python pretrain_gpt.py {bare}")["--vocab-size"]
    assert read(f"python pretrain_gpt.py {bare}", vocab_size=512).plan.resolve().shape.vocab == 512
    assert (
        "--vocab-size"
        in problems(f"python pretrain_gpt.py {bare} --tokenizer-type a b")["--vocab-size"]
    )
    found = read(f"python pretrain_gpt.py {bare} --tokenizer-type GPT2BPETokenizer")
    assert found.plan.resolve().shape.vocab == 50257 == told(found.assumed)["model.vocab"][0]


@pytest.mark.parametrize(
    "text",
    [
        "X=" * 400 + "\n--num-layers 4",
        "A=a\n" + 'A="$A$A"\n' * 60 + "python x.py --num-layers $A",
        "f() { f; }\nf",
        "eval " * 50 + "python x.py --num-layers 4",
        "if [ $A ]; then\n" * 300 + "fi\n" * 300,
        "python x.py --num-layers $((1/0))",
        "A=$A$A\nif x; then A=1$A; else A=2$A; fi\n" * 40 + "python x.py --num-layers $A",
    ],
)
def test_odd_scripts_end_in_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        interop.read(text, "megatron", gpu=GPU_NAME, gpus=8)
    assert str(caught.value)
