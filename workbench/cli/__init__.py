"""The shell's side of the verbs: `workbench COMMAND`; a file a family of commands, and what they
share.
"""

from workbench.cli.app import answer, main

__all__ = ["answer", "main"]
