"""Stand-ins for Slurm's commands: a job of two nodes, which are process groups of this machine.

`install` writes `scontrol` and `srun`. `srun` starts its command once a node, under the host name
that `scontrol` lists, and ends when all have ended; unlike Slurm's it ends no node because of
another, so that what survivors do is their own doing. In the job's folder, `nodeN.pid` is the
process group of a node and `nodeN.out` what it prints.
"""

import os
import subprocess
import sys
from pathlib import Path

HOSTS = ("localhost", "second")
"""The first is where launchers meet, so it must be a name of the loopback address."""
HOST = "STUB_HOST"
"""Environment variable: the host name of a process."""
OWN_DISK = "STUB_OWN_DISK"
"""Environment variable: a folder that the second node has in place of the job's."""
HOST_NAME = f"""import os, platform, socket
if name := os.environ.get({HOST!r}):
    socket.gethostname = platform.node = lambda: name
"""


def install(folder: Path) -> dict[str, str]:
    """Write the commands into `folder`; returns the environment of a job that finds them."""
    folder.mkdir()
    here = Path(__file__).resolve()
    commands = {
        "scontrol": f"printf '%s\\n' {' '.join(HOSTS)}",
        "srun": f'exec {sys.executable} {here} "$@"',
    }
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "sitecustomize.py").write_text(HOST_NAME)
    paths = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    imports = os.pathsep.join([str(folder), str(here.parents[2])])
    slurm = {"SLURM_JOB_NODELIST": "stub[1-2]", "SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "2"}
    return {**os.environ, **slurm, "PATH": os.pathsep.join(paths), "PYTHONPATH": imports}


def start(node: int, command: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "SLURM_NODEID": str(node), HOST: HOSTS[node]}
    with Path(f"node{node}.out").open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=os.environ.get(OWN_DISK) if node == 1 else None,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    Path(f"node{node}.pid").write_text(str(process.pid))
    return process


def main() -> int:
    command = sys.argv[1:]
    while command[0].startswith("--"):
        command.pop(0)
    nodes = [start(node, command) for node in range(len(HOSTS))]
    return max(abs(node.wait()) for node in nodes)


if __name__ == "__main__":
    sys.exit(main())
