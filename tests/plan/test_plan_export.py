"""An exported plan: what accelerate reads, what the shell runs, nothing half written."""

import os
import shutil
import subprocess

import pytest
import yaml

from workbench.plan.errors import PlanError
from workbench.plan.export import accelerate_config, contents, environment, export
from workbench.plan.schema import Plan


def plan(**fields):
    base = {"model": "tiny", "cluster": {"gpu": "local", "gpus": 2}, "strategy": {"preset": "ddp"}}
    return Plan.model_validate(base).replace(**fields)


def test_files_and_their_agreement(tmp_path):
    paths = export(plan(), tmp_path / "out")
    assert sorted(p.name for p in paths) == ["accelerate.yaml", "job.sbatch", "launch.sh", "plan.yaml"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in paths)
    written = Plan.load(tmp_path / "out" / "plan.yaml")
    assert written == written.resolved() == plan().resolved()
    config = yaml.safe_load((tmp_path / "out" / "accelerate.yaml").read_text())
    assert config == accelerate_config(written) and config["mixed_precision"] == "no"


def test_cpu_ranks_avoid_the_launcher_that_starts_one_process():
    full = plan().complete()
    if full.card.device != "cpu":
        pytest.skip("cards are attached")
    config, env = accelerate_config(full), environment(full, cores=4)
    assert config["distributed_type"] == "MULTI_GPU" and config["num_processes"] == 2
    assert env["ACCELERATE_USE_CPU"] == "true" and env["OMP_NUM_THREADS"] == "2"
    assert env["OMP_WAIT_POLICY"] == "passive"


def test_a_launch_by_hand_is_as_quiet_as_a_run():
    assert 'export KINETO_LOG_LEVEL="${KINETO_LOG_LEVEL:-6}"' in contents(plan().complete())["launch.sh"]


def test_accelerate_accepts_every_key():
    from accelerate.commands.config.config_args import ClusterConfig

    known = {*ClusterConfig.__dataclass_fields__}
    assert set(accelerate_config(plan().complete())) <= known


def test_several_nodes_are_one_launch_each():
    full = plan(**{"cluster.gpu": "a100-sxm-80gb", "cluster.gpus": 16}).complete()
    files = contents(full)
    assert accelerate_config(full)["num_machines"] == 2 and accelerate_config(full)["num_processes"] == 16
    for word in ("--machine_rank", "--main_process_ip", "--rdzv_backend"):
        assert word in files["launch.sh"]
    assert "#SBATCH --nodes=2" in files["job.sbatch"] and "--gpus-per-node=8" in files["job.sbatch"]


@pytest.mark.parametrize("name", ["launch.sh", "job.sbatch"])
@pytest.mark.parametrize("gpus", [1, 16])
def test_scripts_are_valid_shell(tmp_path, name, gpus):
    full = plan(**{"cluster.gpu": "a100-sxm-80gb", "cluster.gpus": gpus, "name": 'it\'s "$(quoted)"\nhere'}).complete()
    (tmp_path / name).write_text(contents(full)[name])
    assert subprocess.run([shutil.which("bash") or "bash", "-n", tmp_path / name], check=False).returncode == 0
    assert "\nhere" not in contents(full)[name]


@pytest.mark.parametrize("given", [[], ["--allow-code"]])
@pytest.mark.parametrize("name", ["launch.sh", "job.sbatch"])
def test_scripts_hand_on_the_users_consent_and_never_give_it(tmp_path, name, given):
    model = {"python": "tests.parallel.users_model:build", "vocab": 260}
    files = contents(plan(model=model).complete())
    assert "./launch.sh --allow-code" in files["launch.sh"] and "--allow-code" not in files["plan.yaml"]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    for tool in ("accelerate", "srun", "scontrol"):
        run = 'shift; exec "$@"' if tool == "srun" else 'echo "$@"'
        (tmp_path / tool).write_text(f"#!/bin/sh\n{run}\n")
        (tmp_path / tool).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "1", "SLURM_NODEID": "0"}
    environment = {**slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", tmp_path / name, *given]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1 - len(given) :] == ["plan.yaml", *given]


def test_unwritable_folder_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"--to: .*cannot be written"):
        export(plan(), tmp_path / "file" / "out")
