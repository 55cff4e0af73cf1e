"""Which objects an owner owns, by UID."""

from __future__ import annotations

MOST_IN_A_TUPLE = 8
"""Nearly every owner owns fewer: a set would cost each of them four times the memory of a tuple and more."""


class OwnerIndex:
    """Owner UID -> UIDs of what it owns."""

    def __init__(self) -> None:
        self._owned: dict[str, tuple[str, ...] | set[str]] = {}

    def add(self, owner: str, uid: str) -> None:
        """Note that the owner owns it."""
        known = self._owned.get(owner, ())
        if uid in known:
            return
        if isinstance(known, set):
            known.add(uid)
        else:
            self._owned[owner] = (*known, uid) if len(known) < MOST_IN_A_TUPLE else {*known, uid}

    def discard(self, owner: str, uid: str) -> None:
        """Forget that the owner owns it, if it was known."""
        known = self._owned.get(owner, ())
        left = tuple(other for other in known if other != uid) if len(known) <= MOST_IN_A_TUPLE else known
        if isinstance(left, set):
            left.discard(uid)
        elif left:
            self._owned[owner] = left
        else:
            self._owned.pop(owner, None)

    def of(self, owner: str) -> list[str]:
        """What it owns, in the order of UIDs."""
        return sorted(self._owned.get(owner, ()))

    def __contains__(self, owner: object) -> bool:
        """Whether it owns anything."""
        return owner in self._owned

    def __len__(self) -> int:
        """How many owners own something."""
        return len(self._owned)
