"""How `--help` looks: each flag whole on a line of its own, what it does below it."""

from __future__ import annotations

from cyclopts.help import ColumnSpec, DefaultFormatter, HelpEntry
from cyclopts.help.specs import DescriptionRenderer, NameRenderer
from rich.console import Group, RenderableType
from rich.padding import Padding

# Longer than any flag, so that one is never cut at a hyphen and can be copied and searched for.
_NAME_COLUMNS = 200
_INDENT = 4


def _flag_above_help(entry: HelpEntry) -> RenderableType:
    name = NameRenderer(max_width=_NAME_COLUMNS)(entry)
    return Group(name, Padding(DescriptionRenderer()(entry), (0, 0, 0, _INDENT)))


HELP_FORMATTER = DefaultFormatter(column_specs=(ColumnSpec(renderer=_flag_above_help),))
