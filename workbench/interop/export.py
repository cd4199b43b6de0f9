"""A plan as files that run anywhere: plan.yaml, accelerate.yaml, launch.sh and a Slurm job.

What `accelerate launch` needs on CPU ranks: `distributed_type: MULTI_GPU` in the file (MULTI_CPU
starts one process only) and ACCELERATE_USE_CPU=true in the environment; each node is one launch
that names its machine rank. Of the file it does not read `rdzv_backend`, `same_network` and
`enable_cpu_affinity`, which stand on its command line or not at all.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.interop.launch_environment import (
    FORMER_NAMES,
    OTHER_LAUNCH,
    OTHER_LAUNCH_PREFIXES,
    environment,
    fixed,
    one_node,
)
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.layer_profile_rules import not_runnable
from workbench.plan.schema import Plan
from workbench.safe_io import yaml_files
from workbench.untrusted_text import visible

DEFAULT_PORT = 29500
PORTS = 1024, 65535
"""Ports that need no privilege."""
WORKER = "workbench.engine.worker"
LOOPBACK = "127.0.0.1"
PORT = "WORKBENCH_PORT"
"""Environment variable: where the ranks of one node meet, on its loopback address; else a port that
torchrun found.
"""
START_DEADLINE = "WORKBENCH_START_DEADLINE"
"""Environment variable: how long ranks wait for each other to start, where a supervisor sees
earlier that one will not come; else `telemetry.timeout_seconds`.
"""
JOIN_SECONDS = 600
"""How long the launchers of several nodes wait for each other."""
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
        "enable_cpu_affinity": False,  # a rank binds itself, near the GPU that it has
        "gpu_ids": "all",
        "machine_rank": 0,
        "main_process_ip": main_ip or LOOPBACK,
        "main_process_port": port,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": nodes,
        "num_processes": plan.world_size,
        "rdzv_backend": "c10d",
        "same_network": False,
        "use_cpu": plan.gpu.device == "cpu",
    }


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
    if full.profiled:
        raise PlanError(not_runnable(full, "launch"))
    _refuse_another_run(full, folder)
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


def _refuse_another_run(plan: ResolvedPlan, folder: Path) -> None:
    """Refuse a folder in which another plan was launched, whose records would be taken for this
    one's.
    """
    with suppress(OSError):
        launched = any((folder / name).exists() for name in ("telemetry", "checkpoints"))
        if launched and (folder / "plan.yaml").read_text(encoding="utf-8") != plan.to_yaml():
            raise refuse(
                "--to",
                f"'{folder}' holds records or checkpoints of another plan; legal: another folder, "
                "or an edit of plan.yaml there",
            )


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
    one = one_node(plan)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {' '.join(visible(plan.name).split())}",
            *([] if one else [f"# On every node: {BY_HAND} ./launch.sh"]),
            *_consent(plan),
            "set -euo pipefail",
            'cd "$(dirname "$0")"',
            "# Variables of another launch that this shell may be part of.",
            f"unset {' '.join(OTHER_LAUNCH)} \\",
            "  " + " ".join(f'"${{!{prefix}@}}"' for prefix in OTHER_LAUNCH_PREFIXES),
            *_exports(plan),
            *(_one_node() if one else _nodes(plan)),
            *_ALONE,
            "exec accelerate launch \\",
            "  --config_file accelerate.yaml \\",
            *([] if one else [f"  {option} \\" for option in _NODE_OPTIONS]),
            *(["  --main_process_port 0 \\", f"  {' '.join(rendezvous(plan))} \\"] if one else []),
            f'  -m {WORKER} plan.yaml "$@"',
            "",
        ]
    )


BY_HAND = "MACHINE_RANK=0..n-1 MAIN_IP=<address of node 0>"
_NODE_OPTIONS = (
    '--machine_rank "$MACHINE_RANK"',
    '--main_process_ip "$MAIN_IP"',
    '--main_process_port "$MAIN_PORT"',
    "--rdzv_backend c10d",
    f'--rdzv_conf "is_host=$(( MACHINE_RANK == 0 )),join_timeout={JOIN_SECONDS}'
    f',read_timeout={JOIN_SECONDS}"',
)
"""Options of a launch on several nodes: node 0 holds the store by which launchers meet, and a node
whose launcher fails is seen by the others before a collective of theirs times out.
"""
_ADDRESS = (
    "# An IPv6 address in the brackets that a URL has is taken without them.",
    '[[ "$MAIN_IP" =~ ^\\[(.*:.*)\\]$ ]] && MAIN_IP="${BASH_REMATCH[1]}"',
    'if ! [[ "$MAIN_IP" =~ ^[A-Za-z0-9_.:%-]+$ ]] || [[ "$MAIN_IP" =~ ^[^:]+:[0-9]*$ ]]; then',
    "  echo \"error: MAIN_IP is '$MAIN_IP'; legal: an address or name of node 0 without its port, "
    'which MAIN_PORT says" >&2',
    "  exit 2",
    "fi",
)
"""Lines that refuse what is no address at once: launchers would wait for each other in vain."""
_NODE_ORDER = (
    "# torchrun numbers nodes in the order of their addresses, and ranks meet on the first's: node",
    "# 0 goes by its own, and the others by names behind every address.",
    'if [ "$MACHINE_RANK" = 0 ]; then',
    '  export PET_LOCAL_ADDR="$MAIN_IP"',
    "else",
    '  PET_LOCAL_ADDR="$(printf \'~node%05d\' "$MACHINE_RANK")"',
    "  export PET_LOCAL_ADDR",
    "fi",
)


_ALONE = (
    "# One launch at a time; a file system without locks lets everybody in.",
    'exec 9>".launch-${MACHINE_RANK:-0}.lock"',
    "refused=0",
    "flock --nonblock --conflict-exit-code 75 9 2>/dev/null || refused=$?",
    'if [ "$refused" = 75 ]; then',
    "  echo \"error: another launch trains in $PWD; wait for its end, stop it ('workbench stop "
    "$PWD'), or export the plan to another folder\" >&2",
    "  exit 2",
    "fi",
)
"""Lines that take a lock, which is the launcher's as long as it lives."""


def _nodes(plan: ResolvedPlan) -> list[str]:
    """Which node this is, and a line that says where it waits for the others: one that never comes
    has not said it.
    """
    node = f"node $MACHINE_RANK of {plan.cluster.nodes} (from 0)"
    where = "$MAIN_IP:$MAIN_PORT"
    return [
        ': "${MACHINE_RANK:?rank of this node, from 0}" "${MAIN_IP:?address of node 0}"',
        *_ADDRESS,
        f'MAIN_PORT="${{MAIN_PORT:-{DEFAULT_PORT}}}"',
        *_whole_number("MACHINE_RANK", 0, (plan.cluster.nodes or 1) - 1),
        *_whole_number("MAIN_PORT", *PORTS),
        "export MACHINE_RANK",
        "# Launches of other plans that meet at the same address are kept apart.",
        f'export PET_RDZV_ID="${{SLURM_JOB_ID:-{_identity(plan)}}}"',
        *_NODE_ORDER,
        f'echo "$(hostname), {node}: waits {JOIN_SECONDS} s for the others at {where}" >&2',
    ]


def _one_node() -> list[str]:
    """Where the ranks of one node meet, where the user says it."""
    lines = [f"  {line}" for line in _whole_number("MAIN_PORT", *PORTS)]
    return ['if [ -n "${MAIN_PORT:-}" ]; then', *lines, "fi", f'export {PORT}="${{MAIN_PORT:-}}"']


def _whole_number(name: str, least: int, most: int) -> list[str]:
    """Lines that refuse a shell variable that is no whole number of a range, and take away leading
    zeros, which bash reads as octal.
    """
    legal = f"error: {name} is '${name}'; legal: {least} to {most}"
    outside = f"(( 10#${name} < {least} || 10#${name} > {most} ))"
    return [
        f'if ! [[ "${name}" =~ ^[0-9]{{1,9}}$ ]] || {outside}; then',
        f'  echo "{legal}" >&2',
        "  exit 2",
        "fi",
        f"{name}=$(( 10#${name} ))",
    ]


def _identity(plan: ResolvedPlan) -> str:
    """A word that the nodes of one plan share, and hardly another plan has."""
    return hashlib.sha256(plan.to_yaml().encode()).hexdigest()[:16]


def _consent(plan: ResolvedPlan) -> list[str]:
    if plan.code is None:
        return []
    code = visible(plan.code.python)
    return [f"# {code} is code, which runs only where you say so: ./launch.sh --allow-code"]


def _exports(plan: ResolvedPlan) -> list[str]:
    """The environment of the ranks; what the user's shell has goes before ours, unless ranks would
    join another device or network by it.
    """
    lines = [
        f"export {key}={value}" if key in fixed(plan) else f'export {key}="{_default(key, value)}"'
        for key, value in environment(plan).items()
        if key != "OMP_NUM_THREADS"
    ]
    if plan.gpu.device == "cuda":
        lines += ["# Ranks choose PYTORCH_ALLOC_CONF by their torch, unless it is set here."]
    return [
        *lines,
        f"threads=$(( $(nproc) / {plan.cluster.gpus_per_node} ))",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( threads > 0 ? threads : 1 ))}"',
    ]


def _default(key: str, value: str) -> str:
    """What the user's shell has under this name, or under its former one, else `value`."""
    if key in FORMER_NAMES:
        value = f"${{{FORMER_NAMES[key]}:-{value}}}"
    return f"${{{key}:-{value}}}"


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
            'cores="${SLURM_CPUS_ON_NODE:-$(nproc)}"  # a site may not set it',
            "# Each task sees its own SLURM_NODEID, so the variable is expanded there and not "
            "here.",
            "# shellcheck disable=SC2016",
            'srun --kill-on-bad-exit=1 --cpus-per-task="$cores" --cpu-bind=none \\',
            '  bash -c \'MACHINE_RANK="$SLURM_NODEID" exec bash ./launch.sh "$@"\' launch "$@"',
            "",
        ]
    )
