"""Counts and names objects that cannot be read, wholly or in part: each of their versions once, however often it is seen."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from finetune_operator.cluster.fields import Fields
from finetune_operator.cluster.kinds import Kind
from finetune_operator.logs import logger

_log = logger(__name__)
REMEMBERED = 4096
"""Versions of objects whose unreadable values have been told."""
LONGEST_NAME = 64
"""Characters of a stranger's texts that go to the log."""


class UnreadableObjects:
    """Used by the main loop and the watch thread. `count` is called with the kind."""

    def __init__(self, count: Callable[[str], None] | None = None) -> None:
        self._count = count
        self._told: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, kind: Kind, document: Any, paths: tuple[str, ...]) -> None:
        """These values of the object are left out, or the whole object is."""
        metadata = Fields(document).at("metadata")
        namespace, name = metadata.text("namespace", LONGEST_NAME), metadata.text("name", LONGEST_NAME)
        version = (kind.name, metadata.text("uid", LONGEST_NAME) or f"{namespace}/{name}", metadata.text("resourceVersion", 32))
        with self._lock:
            if version in self._told:
                return
            self._told[version] = None
            if len(self._told) > REMEMBERED:
                self._told.popitem(last=False)
        if self._count is not None:
            self._count(kind.name)
        left_out = [path[: 2 * LONGEST_NAME] for path in paths]
        _log.warning("object holds values that cannot be read", kind=kind.name, namespace=namespace, name=name, left_out=left_out)
