"""An exported plan: what accelerate reads, what the shell runs, nothing half written."""

import os
import shutil
import subprocess
import tomllib
from collections.abc import Collection
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from workbench import interop
from workbench.errors import PlanError
from workbench.interop.export import accelerate_config, contents, export
from workbench.interop.launch_environment import environment
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan


def plan(**fields: Any) -> Plan:
    base = {"model": "tiny", "cluster": {"gpu": "local", "gpus": 2}, "strategy": {"preset": "ddp"}}
    return Plan.model_validate(base).replace(**fields)


def test_files_and_their_agreement(tmp_path: Path) -> None:
    paths = export(plan(), tmp_path / "out")
    assert sorted(p.name for p in paths) == [
        "accelerate.yaml",
        "job.sbatch",
        "launch.sh",
        "plan.yaml",
    ]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in paths)
    written = Plan.load(tmp_path / "out" / "plan.yaml")
    assert written == written.pin() == plan().pin()
    config = yaml.safe_load((tmp_path / "out" / "accelerate.yaml").read_text())
    assert config == accelerate_config(written.resolve()) and config["mixed_precision"] == "no"


def test_cpu_ranks_avoid_the_launcher_that_starts_one_process() -> None:
    full = plan().resolve()
    if full.gpu.device != "cpu":
        pytest.skip("GPUs are attached")
    config, env = accelerate_config(full), environment(full, cores=4)
    assert config["distributed_type"] == "MULTI_GPU" and config["num_processes"] == 2
    assert env["ACCELERATE_USE_CPU"] == "true" and env["OMP_NUM_THREADS"] == "2"
    assert env["OMP_WAIT_POLICY"] == "passive"


def test_a_launch_by_hand_is_as_quiet_as_a_run() -> None:
    assert (
        'export KINETO_LOG_LEVEL="${KINETO_LOG_LEVEL:-6}"'
        in contents(plan().resolve())["launch.sh"]
    )


def test_accelerate_accepts_every_key() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    known = {*ClusterConfig.__dataclass_fields__}
    assert set(accelerate_config(plan().resolve())) <= known


def test_several_nodes_are_one_launch_each() -> None:
    full = plan(**{"cluster.gpu": "a100-sxm-80gb", "cluster.gpus": 16}).resolve()
    files = contents(full)
    assert (
        accelerate_config(full)["num_machines"] == 2
        and accelerate_config(full)["num_processes"] == 16
    )
    for word in ("--machine_rank", "--main_process_ip", "--rdzv_backend c10d", "is_host="):
        assert word in files["launch.sh"]
    assert "#SBATCH --nodes=2" in files["job.sbatch"] and "--gpus-per-node=8" in files["job.sbatch"]


NASTY = {"name": 'it\'s "$(quoted)"\nhere'}
PYTHON = {"model": {"python": "tests.parallel.users_model:build", "vocab": 260}}
SCRIPTS = ("launch.sh", "job.sbatch")


def write_scripts(folder: Path, gpu: str, nodes: int, changes: dict[str, Any]) -> None:
    full = plan(**{"cluster.gpu": gpu, "cluster.nodes": nodes, **changes}).resolve()
    for name in SCRIPTS:
        assert "\nhere" not in contents(full)[name]
        (folder / name).write_text(contents(full)[name])


def checked(command: list[str], folder: Path) -> CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("changes", [NASTY, PYTHON], ids=["name", "python"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "local"])
def test_scripts_are_valid_shell(
    tmp_path: Path, gpu: str, nodes: int, changes: dict[str, Any]
) -> None:
    write_scripts(tmp_path, gpu, nodes, changes)
    for name in SCRIPTS:
        done = checked(["bash", "-n", name], tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("changes", [NASTY, PYTHON], ids=["name", "python"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "local"])
def test_shellcheck_finds_nothing(
    tmp_path: Path, gpu: str, nodes: int, changes: dict[str, Any]
) -> None:
    write_scripts(tmp_path, gpu, nodes, changes)
    done = checked(["shellcheck", "--shell=bash", *SCRIPTS], tmp_path)
    assert done.returncode == 0, done.stdout


def job(
    folder: Path,
    full: ResolvedPlan,
    given: Any = (),
    scontrol: str = "echo first; echo second",
    node: str = "0",
    without: Collection[str] = (),
) -> CompletedProcess[str]:
    """Run `full`'s batch file as Slurm would, with stand-ins for its commands; what each was called
    with is printed.
    """
    for file, text in contents(full).items():
        (folder / file).write_text(text)
    stand_ins = {
        "accelerate": 'echo "$OMP_NUM_THREADS threads, $MAIN_IP: $@"',
        "srun": 'echo "srun $@"; while case "$1" in --*) ;; *) false ;; esac; do shift; done; '
        'exec "$@"',
        "scontrol": scontrol,
        "nproc": "echo 96",
    }
    for tool, body in stand_ins.items():
        (folder / tool).write_text(f"#!/bin/sh\n{body}\n")
        (folder / tool).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "1",
        "SLURM_NODEID": node,
        "SLURM_CPUS_ON_NODE": "96",
    }
    environment = {
        "SLURM_SUBMIT_DIR": str(folder),
        **{key: value for key, value in slurm.items() if key not in without},
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    command = ["bash", folder / "job.sbatch", *given]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_job_gives_a_node_whole_to_its_ranks(tmp_path: Path) -> None:
    full = plan(**{"cluster.gpu": "a100-sxm-80gb", "cluster.gpus": 16}).resolve()
    done = job(tmp_path, full, node="1")
    assert done.returncode == 0, done.stderr
    srun, launched = done.stdout.splitlines()
    assert "--cpus-per-task=96" in srun.split() and "--cpu-bind=none" in srun.split()
    assert launched.startswith("12 threads, first: launch") and "--machine_rank 1" in launched
    asked = [
        line for line in contents(full)["job.sbatch"].splitlines() if line.startswith("#SBATCH")
    ]
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0"} <= set(asked)
    assert any(line.startswith("#SBATCH --time=") for line in asked)


@pytest.mark.parametrize("scontrol", ["exit 3", "exit 0"], ids=["fails", "lists nothing"])
def test_a_job_whose_nodes_nobody_lists_says_so_and_starts_nothing(
    tmp_path: Path, scontrol: str
) -> None:
    full = plan(**{"cluster.gpu": "a100-sxm-80gb", "cluster.gpus": 16}).resolve()
    done = job(tmp_path, full, scontrol=scontrol)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("error: ") and "n[1-2]" in done.stderr


def test_ranks_on_gpus_share_the_nodes_cores() -> None:
    """torchrun gives a rank one thread where nothing is said, and an offloaded optimizer steps on
    the host.
    """
    full = plan(**{"cluster.gpu": "a100-sxm-80gb", "cluster.gpus": 16}).resolve()
    assert environment(full, cores=96)["OMP_NUM_THREADS"] == "12"
    assert environment(full, cores=4)["OMP_NUM_THREADS"] == "1"
    assert "ACCELERATE_USE_CPU" not in environment(full, cores=96)
    assert "$(( $(nproc) / 8 ))" in contents(full)["launch.sh"]


@pytest.mark.parametrize("given", [[], ["--allow-code"]])
@pytest.mark.parametrize("name", ["launch.sh", "job.sbatch"])
def test_scripts_hand_on_the_users_consent_and_never_give_it(
    tmp_path: Path, name: str, given: list[Any]
) -> None:
    model = {"python": "tests.parallel.users_model:build", "vocab": 260}
    full = plan(model=model).resolve()
    files = contents(full)
    assert (
        "./launch.sh --allow-code" in files["launch.sh"]
        and "--allow-code" not in files["plan.yaml"]
    )
    if name == "job.sbatch":
        done = job(tmp_path, full, given)
    else:
        job(tmp_path, full)  # which leaves the files and the stand-ins
        path = f"{tmp_path}:{os.environ['PATH']}"
        script = ["bash", tmp_path / name, *given]
        done = subprocess.run(
            script, env={"PATH": path}, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1 - len(given) :] == ["plan.yaml", *given]


def test_unwritable_folder_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"--to: .*cannot be written"):
        export(plan(), tmp_path / "file" / "out")


EVIL = "evil\x1b]0;pwn\x07 \u202etxt\u2066\x9b2J\x7f"
HIDDEN = set(EVIL) - set("evil]0;pwn txt2J")


def test_text_that_is_read_by_people_has_no_hidden_characters() -> None:
    made = plan(name=EVIL, **{"cluster.nodes": 2})
    texts = {**contents(made.resolve()), "toml": interop.write(made, "torchtitan", "0.2.2").text}
    texts["py"] = interop.write(made, "torchtitan", "0.3.0").text
    python = plan(name=EVIL, model={"python": "tests.parallel.users_model:build", "vocab": 260})
    texts["python.sh"] = contents(python.resolve())["launch.sh"]
    for name, text in texts.items():
        assert not HIDDEN & set(text), f"{name} has {HIDDEN & set(text)}"
    assert Plan.model_validate(yaml.safe_load(texts["plan.yaml"])).name == EVIL
    assert tomllib.loads(texts["toml"])["job"]["description"] == EVIL


@pytest.mark.parametrize(
    ("given", "meets"),
    [
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
        ("10.0.0.1", "10.0.0.1"),
        ("node-0.cluster", "node-0.cluster"),
        ("[::1]:29500", None),
        ("node0:29500", None),
        ("http://node0", None),
        ("node0; true", None),
        ("[]", None),
    ],
)
def test_the_address_of_node_0_is_one_without_brackets_and_port(
    tmp_path: Path, given: str, meets: str | None
) -> None:
    for file, text in contents(plan(**{"cluster.nodes": 2}).resolve()).items():
        (tmp_path / file).write_text(text)
    (tmp_path / "accelerate").write_text('#!/bin/sh\necho "$PET_LOCAL_ADDR $@"\n')
    (tmp_path / "accelerate").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MACHINE_RANK": "0",
        "MAIN_IP": given,
    }
    done = subprocess.run(
        ["bash", tmp_path / "launch.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if meets is None:
        assert done.returncode == 2 and "MAIN_PORT" in done.stderr and given in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{meets} ") and f"--main_process_ip {meets} " in done.stdout


def test_a_job_whose_site_does_not_count_cores_asks_the_node(tmp_path: Path) -> None:
    full = plan(**{"cluster.gpu": "a100-sxm-80gb", "cluster.gpus": 16}).resolve()
    done = job(tmp_path, full, without=("SLURM_CPUS_ON_NODE",))
    assert done.returncode == 0, done.stderr
    assert "--cpus-per-task=96" in done.stdout
