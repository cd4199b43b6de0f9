"""A plan as files that run anywhere: plan.yaml, accelerate.yaml, launch.sh and a Slurm job.

What `accelerate launch` needs on CPU ranks: `distributed_type: MULTI_GPU` in the file (MULTI_CPU
starts one process only) and ACCELERATE_USE_CPU=true in the environment; each node is one launch
that names its machine rank.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from workbench.errors import refuse
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.safe_io import yaml_files

DEFAULT_PORT = 29500
WORKER = "workbench.engine.worker"
LOOPBACK = "127.0.0.1"
PORT = "WORKBENCH_PORT"
"""Environment variable: where the ranks of one node meet, on its loopback address; else a port that
torchrun found.
"""
ON_ONE_NODE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # torchrun's agent would share a store with its ranks that listens on all addresses: the first
    # rank makes one.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""Environment of a launch whose ranks are all on one node: none of them listens on a network."""
JOB_TIME = "24:00:00"
"""Time limit of a Slurm job, which would else be the partition's."""


def accelerate_config(
    plan: ResolvedPlan, port: int = DEFAULT_PORT, main_ip: str | None = None
) -> dict[str, Any]:
    """What `accelerate launch --config_file` reads for a complete `plan`; axes are the worker's
    own, not declared here.

    `port` and `main_ip` are where the first node listens; `main_ip` defaults to this machine for
    one node.
    """
    nodes = int(plan.cluster.nodes or 1)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_NPU" if plan.gpu.device == "npu" else "MULTI_GPU",
        "downcast_bf16": "no",
        "enable_cpu_affinity": plan.gpu.device
        == "cuda",  # accelerate binds by what NVML says of a GPU
        "gpu_ids": "all",
        "machine_rank": 0,
        "main_process_ip": main_ip or LOOPBACK,
        "main_process_port": port,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": nodes,
        "num_processes": plan.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": plan.gpu.device == "cpu",
    }


def one_node(plan: Plan) -> bool:
    """Whether all ranks of the plan are on one node."""
    return (plan.cluster.nodes or 1) == 1


def environment(plan: ResolvedPlan, cores: int | None = None) -> dict[str, str]:
    """Environment of `accelerate launch` for a complete `plan`; `cores` of the machine, default
    this one's.

    The ranks of a node share its cores, on GPUs too: torchrun would give each one thread, and an
    offloaded optimizer steps on the host. The profiler that measures memory would fill the logs
    with its own comings and goings. Ranks are started by `python -m`, which without PYTHONSAFEPATH
    would import what lies in the current folder before what is installed.
    """
    ranks = int(plan.cluster.gpus_per_node or plan.world_size)
    threads = {"OMP_NUM_THREADS": str(max(1, (cores or os.cpu_count() or 1) // ranks))}
    quiet = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "KINETO_LOG_LEVEL": "6"}
    quiet |= ON_ONE_NODE if one_node(plan) else {}
    if plan.gpu.device != "cpu":
        return {**threads, **quiet}
    return {"ACCELERATE_USE_CPU": "true", **threads, "OMP_WAIT_POLICY": "passive", **quiet}


def rendezvous(plan: Plan) -> list[str]:
    """Options of `accelerate launch` for how its launchers meet: the one of a single node by a file
    of its own.

    torchrun's other ways listen on all addresses of the machine, for whoever comes.
    """
    return ["--rdzv_backend", "c10d", "--rdzv_conf", "store_type=file"] if one_node(plan) else []


def export(plan: Plan, folder: str | Path) -> list[Path]:
    """Write the files into `folder`, all or none; returns their paths. Raises `PlanError` if it
    cannot be written.
    """
    full, folder = plan.pin(), Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as draft:
            for name, text in contents(full).items():
                path = Path(draft, name)
                path.write_text(text, encoding="utf-8")
                path.chmod(0o755 if name == "launch.sh" else 0o644)
            return [
                Path(shutil.move(path, folder / path.name))
                for path in sorted(Path(draft).iterdir())
            ]
    except OSError as error:
        raise refuse("--to", f"'{folder}' cannot be written: {error.strerror or error}") from None


def contents(plan: ResolvedPlan) -> dict[str, str]:
    """File name -> text of an exported, resolved `plan`."""
    return {
        "plan.yaml": plan.to_yaml(),
        "accelerate.yaml": yaml_files.dump(accelerate_config(plan)),
        "launch.sh": launch_script(plan),
        "job.sbatch": slurm_script(plan),
    }


def launch_script(plan: ResolvedPlan) -> str:
    """A shell script that starts this node's ranks; on several nodes it is run once a node.

    What it is given goes on to the worker: a model that is code needs `--allow-code`, which no file
    says for the user.
    """
    lines = [
        "#!/usr/bin/env bash",
        f"# {' '.join(plan.name.split())}",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
    ]
    for key, value in environment(plan).items():
        if key != "OMP_NUM_THREADS":
            lines.append(f'export {key}="${{{key}:-{value}}}"')
    lines += [
        f"threads=$(( $(nproc) / {plan.cluster.gpus_per_node} ))",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( threads > 0 ? threads : 1 ))}"',
    ]
    lines += ["exec accelerate launch \\", "  --config_file accelerate.yaml \\"]
    if (plan.cluster.nodes or 1) > 1:
        lines.insert(
            2, "# On every node: MACHINE_RANK=0..n-1 MAIN_IP=<address of node 0> ./launch.sh"
        )
        lines += [
            '  --machine_rank "${MACHINE_RANK:?rank of this node, from 0}" \\',
            '  --main_process_ip "${MAIN_IP:?address of the first node}" \\',
        ]
    if not one_node(plan):
        lines += [f'  --main_process_port "${{MAIN_PORT:-{DEFAULT_PORT}}}" \\']
        lines += ['  --rdzv_backend "${RDZV_BACKEND:-static}" \\']
    else:
        lines.insert(-2, f'export {PORT}="${{MAIN_PORT:-}}"')
        lines += ["  --main_process_port 0 \\", f"  {' '.join(rendezvous(plan))} \\"]
    lines += [f'  -m {WORKER} plan.yaml "$@"', ""]
    if plan.code:
        lines.insert(
            2,
            f"# {plan.code.python} is code, which runs only where you say so: ./launch.sh "
            f"--allow-code",
        )
    return "\n".join(lines)


def slurm_script(plan: ResolvedPlan) -> str:
    """A Slurm batch file: one task a node, each of which is one launch and has the whole node.

    Slurm's default is one core and one core's memory a task, and `srun` does not take over what
    `sbatch` was asked for.
    """
    nodes, per_node = plan.cluster.nodes, plan.cluster.gpus_per_node
    gpus = [] if plan.gpu.device == "cpu" else [f"#SBATCH --gpus-per-node={per_node}"]
    title = "".join(c if c.isalnum() else "-" for c in plan.name)[:40]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={title}",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
            *gpus,
            "#SBATCH --exclusive",
            "#SBATCH --mem=0",
            "# How long the job may take; `sbatch --time=HH:MM:SS job.sbatch` overrides it.",
            f"#SBATCH --time={JOB_TIME}",
            "#SBATCH --output=slurm-%j.out",
            "set -euo pipefail",
            'cd "$SLURM_SUBMIT_DIR"',
            'hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")" || hosts=""',
            'if [ -z "$hosts" ]; then',
            "  echo \"error: scontrol lists no nodes of '$SLURM_JOB_NODELIST', so no node can "
            'find the first" >&2',
            "  exit 1",
            "fi",
            "export MAIN_IP=\"${hosts%%$'\\n'*}\"",
            'export MAIN_PORT="${MAIN_PORT:-$(( 20000 + SLURM_JOB_ID % 10000 ))}"',
            "# Each task sees its own SLURM_NODEID, so the variable is expanded there and not "
            "here.",
            "# shellcheck disable=SC2016",
            'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none \\',
            '  bash -c \'MACHINE_RANK="$SLURM_NODEID" exec bash ./launch.sh "$@"\' launch "$@"',
            "",
        ]
    )
