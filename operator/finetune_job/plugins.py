"""What a command does before it imports anything of pydantic."""

import sys
from types import ModuleType


def leave_out_plugins() -> None:
    """Have pydantic find no plugins: their loader imports the reader of installed distributions and reads all of them."""
    loader = ModuleType("pydantic.plugin._loader")
    loader.get_plugins = tuple  # type: ignore[attr-defined]
    sys.modules.setdefault(loader.__name__, loader)
