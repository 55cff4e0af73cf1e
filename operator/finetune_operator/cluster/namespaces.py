"""Labels of the namespaces of jobs, for profiles that ask for them. Namespaces are not watched: few profiles have a selector, and
only jobs that have not begun need the answer.
"""

from __future__ import annotations

from datetime import datetime

from finetune_operator.cluster.answers import ApiError
from finetune_operator.cluster.api import Api
from finetune_operator.cluster.kinds import NAMESPACES
from finetune_operator.cluster.raw_objects import Fields
from finetune_operator.decide.observed import NamespaceView

SEEN_SECONDS = 2.0
"""How long labels are cached: otherwise each job that waits in line would read them."""
_FORBIDDEN = 403


class Namespaces:
    """Reads namespaces, and caches them for a moment."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._seen: dict[str, tuple[datetime, NamespaceView]] = {}

    async def view(self, name: str, now: datetime) -> NamespaceView:
        """Labels of a namespace, or why they cannot be read. Raises ApiUnreachableError, and ApiError except for a missing
        right.
        """
        self._seen = {
            cached_name: cached for cached_name, cached in self._seen.items() if (now - cached[0]).total_seconds() < SEEN_SECONDS
        }
        if name not in self._seen:
            self._seen[name] = now, await self._read(name)
        return self._seen[name][1]

    async def _read(self, name: str) -> NamespaceView:
        try:
            document = await self._api.get(NAMESPACES, None, name)
        except ApiError as error:
            if error.code != _FORBIDDEN:
                raise
            return NamespaceView(error=f"it has no right to get namespaces: {error.message}")
        if document is None:
            return NamespaceView(error="it does not exist")
        labels = Fields(document).at("metadata").at("labels").raw
        return NamespaceView({key: value for key, value in labels.items() if isinstance(value, str)})
