"""`workbench` and `python -m workbench`: the command, in one word also where Ctrl-C comes while it
is loaded.
"""

from __future__ import annotations

import os
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
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[
            0
        ]  # put there by `python -m`: a file beside a plan must not stand in for a package
    main()
