"""The first complete list, and the later ones that repair what the watches missed.

After an expired watch kopf lists again but never compares, so an object deleted in the gap would stay in the cache. The effects
of lost events are repaired here, too.
"""

from __future__ import annotations

from collections.abc import Callable

from finetune_operator.cluster.api import Api
from finetune_operator.cluster.cache import Cache, JobKey
from finetune_operator.cluster.kinds import WATCHED, Kind, selector_of
from finetune_operator.cluster.object_key import ObjectKey
from finetune_operator.cluster.raw_objects import Fields

MOST_SINGLE_READS = 100
"""If more objects than this were missed, all objects of their kind are fetched."""

OnListed = Callable[[Kind, str | None, str], None]
"""Called with a kind, a namespace and the resourceVersion of its complete list."""


def scopes(kind: Kind, namespaces: tuple[str, ...]) -> tuple[str | None, ...]:
    """Namespaces in which a kind is listed and watched; None: everywhere at once."""
    return namespaces if namespaces and kind.namespaced else (None,)


async def fill(api: Api, cache: Cache, namespaces: tuple[str, ...], listed: OnListed = lambda *_: None) -> None:
    """Take every watched object into the cache."""
    for kind in WATCHED:
        for namespace in scopes(kind, namespaces):
            _, version = await _take_all(api, cache, kind, namespace)
            listed(kind, namespace, version)


async def relist(api: Api, cache: Cache, namespaces: tuple[str, ...]) -> set[JobKey]:
    """Find what was missed. Returns the jobs that this concerns. Only metadata is transferred, and the objects that turn out to
    be news.
    """
    concerned: set[JobKey] = set()
    for kind in WATCHED:
        for namespace in scopes(kind, namespaces):
            concerned |= await _relist(api, cache, kind, namespace)
    return concerned


async def _take_all(api: Api, cache: Cache, kind: Kind, namespace: str | None) -> tuple[set[JobKey], str]:
    """Take a complete list into the cache. Returns the jobs that its news concerns, and its version."""
    concerned: set[JobKey] = set()
    version = ""
    async for page in api.pages(kind, namespace, label_selector=selector_of(kind)):
        version = page.version
        for item in page.items:
            concerned |= cache.take(kind, item)
    return concerned, version


async def _relist(api: Api, cache: Cache, kind: Kind, namespace: str | None) -> set[JobKey]:
    present: set[str] = set()
    newer: list[ObjectKey] = []
    version = 0
    async for page in api.pages(kind, namespace, label_selector=selector_of(kind), metadata_only=True):
        if page.is_first:
            present.clear()
            newer.clear()
        for item in page.items:
            key = cache.key_of(kind, item)
            # An object that cannot be read stays as it is known.
            present.add(Fields(item).at("metadata").name("uid") if key is None else key.uid)
            if key is not None and cache.is_news(kind, key):
                newer.append(key)
        version = int(page.version)
    concerned = cache.remove_missing(kind, present, version, () if namespace is None else (namespace,))
    # Most of it has come through the watches by now: what is left was missed.
    newer = [key for key in newer if cache.is_news(kind, key)]
    if len(newer) > MOST_SINGLE_READS:
        return concerned | (await _take_all(api, cache, kind, namespace))[0]
    for key in newer:
        if cache.is_news(kind, key):
            document = await api.get(kind, key.namespace or None, key.name)
            concerned |= set() if document is None else cache.take(kind, document)
    return concerned
