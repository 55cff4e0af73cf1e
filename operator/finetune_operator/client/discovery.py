"""Waits until the API server serves our kinds, because kopf does not notice, and so would not watch, kinds served later."""

from __future__ import annotations

import asyncio

from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import JOBS, PROFILES
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
            f"{reported} is still missing after {longest:.0f} s; install the chart with crds.enabled=true, or apply crds/"
        ) from error


async def _missing(api: Api) -> str:
    try:
        # kopf starts from the list of API groups. A server may update that list after the group itself, so check both.
        groups = await api.request("GET", "/apis")
        if JOBS.group not in [group["name"] for group in groups["groups"]]:
            return f"API group {JOBS.group}"
        served = {item["name"] for item in (await api.request("GET", JOBS.root))["resources"]}
    except (ApiError, ApiUnreachableError) as error:
        return str(error)
    return ", ".join(kind.plural for kind in (JOBS, PROFILES) if kind.plural not in served)
