"""Ask accelerate for its own reading of its YAML: a JSON list of {name, path, world} on stdin, name
-> refusal on stdout.
"""

from typing import Any

from tests.interop.consumers.refusals import print_refusals


def main() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    def check(job: dict[str, Any]) -> None:
        read = load_config_from_file(job["path"])
        assert read.num_processes == job["world"], read.num_processes

    print_refusals(check)


if __name__ == "__main__":
    main()
