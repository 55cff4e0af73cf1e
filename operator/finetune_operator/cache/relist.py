"""Lists all objects, first at the start, and later to make up for what the watches missed.

kopf restarts an expired watch with a list, but does not compare it with the previous list, so an object deleted in between would
stay in the cache. Relisting also makes up for lost events.
"""

from __future__ import annotations

from finetune_operator.cache.cache import Cache
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import CACHED, JobKey, Kind, selector_of
from finetune_operator.client.raw_objects import Fields


def scopes(kind: Kind, namespaces: tuple[str, ...]) -> tuple[str | None, ...]:
    """Namespaces in which a kind is listed and watched; None means all of them at once."""
    return namespaces if namespaces and kind.namespaced else (None,)


async def relist(api: Api, cache: Cache, namespaces: tuple[str, ...]) -> set[JobKey]:
    """Store all objects of the cached kinds, and remove those that are gone. Returns the affected jobs."""
    concerned: set[JobKey] = set()
    for kind in CACHED:
        for namespace in scopes(kind, namespaces):
            concerned |= await _relist(api, cache, kind, namespace)
    return concerned


async def _relist(api: Api, cache: Cache, kind: Kind, namespace: str | None) -> set[JobKey]:
    concerned: set[JobKey] = set()
    present: set[str] = set()
    version = 0
    async for page in api.pages(kind, namespace, label_selector=selector_of(kind)):
        if page.is_first:
            present.clear()
        for item in page.items:
            # If an object cannot be read, its cached state stays.
            present.add(Fields(item).at("metadata").name("uid"))
            concerned |= cache.take(kind, item)
        version = int(page.version)
    return concerned | cache.remove_missing(kind, present, version, () if namespace is None else (namespace,))
