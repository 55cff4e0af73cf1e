"""transformers' renderer of chat templates without the rest of transformers, which takes a second of processor time to import.

For a process that renders chats and does nothing else with transformers: the packages above the module are put in place without
running their own code. So the template runs in the very sandbox in which training runs it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PACKAGES = ("transformers", "transformers.utils")


def keep_rest_of_transformers_out() -> None:
    """From here on only modules that are named can be imported of transformers. Does nothing if it is imported already."""
    if _PACKAGES[0] in sys.modules:
        return
    found = importlib.util.find_spec(_PACKAGES[0])
    if found is None or found.origin is None:
        return
    root = Path(found.origin).parent.parent
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
