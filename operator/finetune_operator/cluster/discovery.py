"""Waits until the API server serves our kinds: kopf would never notice a kind that is served later, and never watch it."""

from __future__ import annotations

import asyncio

from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.api import Api
from finetune_operator.cluster.kinds import JOBS, PROFILES
from finetune_operator.logs import logger

_log = logger(__name__)


class CrdsMissingError(Exception):
    """The CustomResourceDefinitions were not installed in time."""


async def wait_for_crds(api: Api, longest: float, poll: float) -> None:
    """Return once both kinds are served. Raises CrdsMissingError after `longest` seconds."""
    reported = ""
    try:
        async with asyncio.timeout(longest):
            while True:
                missing = await _missing(api)
                if not missing:
                    return
                if missing != reported:
                    _log.warning("waiting for the API server to serve our kinds", missing=missing)
                    reported = missing
                await asyncio.sleep(poll)
    except TimeoutError as error:
        raise CrdsMissingError(
            f"after {longest:.0f} s still missing: {reported}; install the chart with crds.enabled=true, or apply crds/"
        ) from error


async def _missing(api: Api) -> str:
    try:
        # kopf starts from the list of groups, which a server may renew later than the group itself.
        groups = await api.request("GET", "/apis")
        if JOBS.group not in [group["name"] for group in groups["groups"]]:
            return f"API group {JOBS.group}"
        served = {item["name"] for item in (await api.request("GET", JOBS.root))["resources"]}
    except ApiError as error:
        return str(error)
    except ApiUnreachableError as error:
        return str(error)
    return ", ".join(kind.plural for kind in (JOBS, PROFILES) if kind.plural not in served)
