"""The panels of `finetune --help`, and the group that prints them.

Typer prints panels by rich only, with borders and emphasis. Help is also read in files and by people who set NO_COLOR, so that
`PanelGroup` prints the same panels as plain text.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from typer.core import TyperGroup


class Panel(StrEnum):
    """The title above a group of verbs, in the order of the help."""

    TRAIN = "Train"
    LOOK = "Look"
    CHANGE = "Change"
    RESULTS = "Results"
    OTHER = "Other"


class PanelGroup(TyperGroup):
    """A group of commands whose help has a section for each `rich_help_panel`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel that has commands."""
        commands: list[Any] = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        width = formatter.width - 6 - max((len(command.name) for command in commands), default=0)
        for panel in Panel:
            rows = [
                (command.name, command.get_short_help_str(width))
                for command in commands
                if command.rich_help_panel == panel and not command.hidden
            ]
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)
