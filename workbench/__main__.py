"""`workbench` and `python -m workbench`: the command, in one word also where Ctrl-C comes while it is loaded."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Entry point of the `workbench` command."""
    try:
        from workbench import cli

        cli.main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
