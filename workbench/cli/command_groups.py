"""How `workbench --help` lists the verbs: by family, each in its first words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterator


class Grouped(TyperGroup):
    """Commands listed under their `rich_help_panel`, as plain text."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each family, in the order of registration."""
        families: dict[str, list[tuple[str, str]]] = {}
        for family, name, words in self._told(ctx):
            families.setdefault(family, []).append((name, words))
        widest = max(len(name) for rows in families.values() for name, _ in rows)
        for family, rows in families.items():
            with formatter.section(family):
                formatter.write_dl([(name.ljust(widest), words) for name, words in rows])

    def _told(self, ctx: Any) -> Iterator[tuple[str, str, str]]:
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            yield command.rich_help_panel, name, re.split("[:;]", command.help)[0].rstrip(".")
