"""transformers' renderer of chat templates without the rest of transformers, which takes a second of processor time to import.

For a process that renders chats and does nothing else with transformers: the packages above the module are put in place without
running their own code. So the template runs in the very sandbox in which training runs it.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

_PACKAGES = ("transformers", "transformers.utils")
RENDERER = "transformers.utils.chat_template_utils"


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """As much of transformers' loggers as the renderer calls."""

    def warning_once(self, message: str) -> None:
        self.warning(message)


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


def import_renderer() -> None:
    """Import the renderer alone: without numpy, whose scalars no record holds, and without the Hub's client and progress bars,
    which the loggers of transformers load. Both stay importable. Raises ModuleNotFoundError.
    """
    numbers, loggers = ModuleType("numpy"), ModuleType("transformers.utils.logging")
    vars(numbers)["generic"] = type("generic", (), {})
    vars(loggers)["get_logger"] = lambda name: _Logger(logging.getLogger(name), {})
    absent = {module.__name__: module for module in (numbers, loggers) if module.__name__ not in sys.modules}
    sys.modules.update(absent)
    try:
        import_module(RENDERER)
    finally:
        for name in absent:
            del sys.modules[name]
