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
"""How long labels are believed: of jobs that wait in line all would be asked for."""
_FORBIDDEN = 403


class Namespaces:
    """Remembers for a moment what it has read."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._seen: dict[str, tuple[datetime, NamespaceView]] = {}

    async def view(self, name: str, now: datetime) -> NamespaceView:
        """Labels of a namespace, or why they cannot be read. Raises ApiError but for a missing right, ApiUnreachableError."""
        self._seen = {one: seen for one, seen in self._seen.items() if (now - seen[0]).total_seconds() < SEEN_SECONDS}
        if name not in self._seen:
            self._seen[name] = now, await self._read(name)
        return self._seen[name][1]

    async def _read(self, name: str) -> NamespaceView:
        try:
            found = await self._api.get(NAMESPACES, None, name)
        except ApiError as error:
            if error.code != _FORBIDDEN:
                raise
            return NamespaceView(error=f"it has no right to get namespaces: {error.message}")
        if found is None:
            return NamespaceView(error="it does not exist")
        labels = Fields(found).at("metadata").at("labels").raw
        return NamespaceView({key: value for key, value in labels.items() if isinstance(value, str)})
