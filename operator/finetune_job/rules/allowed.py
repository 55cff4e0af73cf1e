"""What a profile lets through: addresses by their beginnings."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_job.api.base import RegistryPath, parse_destination


def is_allowed(address: str, beginnings: Sequence[str]) -> bool:
    """Whether whole segments of `address` are those of one beginning: hf://our-org is no beginning of hf://our-organisation/model."""
    scheme, _, rest = address.partition("://")
    spellings = [rest.rstrip("/")]
    place = parse_destination(address)
    if isinstance(place, RegistryPath):
        # A repository stands for all its tags.
        repository = f"{place.registry}/{place.repository}"
        spellings = [repository, f"{repository}:{place.tag}"]
    return any(_begins(scheme, spelling, beginning) for beginning in beginnings for spelling in spellings)


def _begins(scheme: str, rest: str, beginning: str) -> bool:
    wanted_scheme, separator, wanted_rest = beginning.partition("://")
    if not separator or wanted_scheme != scheme:
        return False
    wanted = [part for part in wanted_rest.split("/") if part]
    return rest.split("/")[: len(wanted)] == wanted
