"""The first complete list, and the later ones that drop objects whose deletion the watches missed.

After an expired watch kopf lists anew but never compares, so an object deleted in the gap would stay for ever.
"""

from __future__ import annotations

from finetune_operator.cluster.api import Api
from finetune_operator.cluster.cache import Cache, JobKey
from finetune_operator.cluster.fields import Fields
from finetune_operator.cluster.kinds import WATCHED, Kind, selector_of


def scopes(kind: Kind, namespaces: tuple[str, ...]) -> tuple[str | None, ...]:
    """Namespaces in which a kind is listed and watched; None: everywhere at once."""
    return namespaces if namespaces and kind.namespaced else (None,)


async def fill(api: Api, cache: Cache, namespaces: tuple[str, ...]) -> None:
    """Take every watched object into the cache."""
    for kind in WATCHED:
        for namespace in scopes(kind, namespaces):
            items, _ = await api.list(kind, namespace, label_selector=selector_of(kind))
            for item in items:
                cache.take(kind, item)


async def drop_ghosts(api: Api, cache: Cache, namespaces: tuple[str, ...]) -> set[JobKey]:
    """Drop what no longer exists. Returns the jobs that this concerns. Only metadata travels."""
    concerned: set[JobKey] = set()
    for kind in WATCHED:
        for namespace in scopes(kind, namespaces):
            items, version = await api.list(kind, namespace, label_selector=selector_of(kind), metadata_only=True)
            listed = [Fields(item).at("metadata").name("uid") for item in items]
            concerned |= cache.drop_ghosts(kind, listed, version, () if namespace is None else (namespace,))
    return concerned
