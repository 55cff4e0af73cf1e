"""Texts of Warning events about our Jobs and pods. They report problems that are not in status, such as a missing Secret or a
quota.

Anybody with permission to write events can write any number of them about anything. So only texts about known Jobs and pods are
kept for long, only the newest few per object, and total sizes are limited, for known and unknown objects separately.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from finetune_operator.cache.cache import Cache
from finetune_operator.client.kinds import BATCH_JOBS, PODS, JobKey
from finetune_operator.client.object_key import LONGEST_UID
from finetune_operator.client.raw_objects import Fields

PER_OBJECT = 5
LONGEST_TEXT = 1024
"""Maximum length of an event's message, in characters; the API server rejects longer messages."""
MOST_CHARACTERS = 8 << 20
MOST_CHARACTERS_OF_OTHERS = 1 << 20
"""Limit for texts about unknown objects. Most of these objects are not ours; a few are ours but not cached yet."""


class WarningEvents:
    """The latest texts of Warning events. The watch of events adds them, and reconcile passes read them."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._ours = _BoundedTexts(MOST_CHARACTERS)
        self._others = _BoundedTexts(MOST_CHARACTERS_OF_OTHERS)

    def take(self, event: Any) -> JobKey | None:
        """Store an event. Returns the job to reconcile if this is the first event about the object with this reason."""
        fields = Fields(event)
        about = fields.at("involvedObject")
        kind = {PODS.name: PODS, BATCH_JOBS.name: BATCH_JOBS}.get(about.text("kind", 64))
        uid, namespace = about.name("uid", LONGEST_UID), fields.at("metadata").name("namespace")
        if kind is None or not uid or fields.text("type", 16) != "Warning":
            return None
        # An event can name any UID, but its author can only write to the event's namespace, so the object must be there.
        key = self._cache.job_key_of(kind, uid)
        if key is not None and key.namespace != namespace:
            return None
        reason, message = fields.text("reason", 128), fields.text("message", LONGEST_TEXT)
        times = (fields.text("lastTimestamp", 32), fields.at("series").text("lastObservedTime", 32), fields.text("eventTime", 32))
        texts = self._others if key is None else self._ours
        is_new = texts.put((namespace, uid), reason, f"{reason}: {message}", max(times))
        return key if is_new else None

    def about(self, namespace: str, uid: str) -> tuple[str, ...]:
        """Texts about an object; the latest comes last."""
        texts = self._ours.get((namespace, uid)) | self._others.get((namespace, uid))
        return tuple(text for _, text in sorted((time, text) for text, (time, _) in texts.items())[-PER_OBJECT:])


class _BoundedTexts:
    """Object -> its texts -> time and reason. If the total gets too large, the least recently updated objects are dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_object: OrderedDict[tuple[str, str], dict[str, tuple[str, str]]] = OrderedDict()
        self._size = 0

    def get(self, of: tuple[str, str]) -> dict[str, tuple[str, str]]:
        return self._by_object.get(of, {})

    def put(self, of: tuple[str, str], reason: str, text: str, time: str) -> bool:
        """Add a text. Returns whether it is the object's first text with that reason."""
        known = self._by_object.setdefault(of, {})
        self._by_object.move_to_end(of)
        is_new = all(known_reason != reason for _, known_reason in known.values())
        if text not in known:
            self._size += len(text)
        known[text] = (time, reason)
        while len(known) > PER_OBJECT:
            oldest = min(known, key=lambda known_text: known[known_text][0])
            del known[oldest]
            self._size -= len(oldest)
        while self._size > self._most:
            _, texts = self._by_object.popitem(last=False)
            self._size -= sum(map(len, texts))
        return is_new
