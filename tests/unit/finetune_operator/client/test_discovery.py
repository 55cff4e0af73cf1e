"""Waiting for our kinds: kopf would never see one that is not served when it looks."""

import asyncio
from typing import Any

import pytest

from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.discovery import CrdsMissingError, wait_for_crds

Document = dict[str, Any]
GROUPS: Document = {"groups": [{"name": "batch"}, {"name": "finetune.dev"}]}
BOTH: Document = {"resources": [{"name": "finetunejobs"}, {"name": "finetunejobs/status"}, {"name": "finetuneprofiles"}]}
JOBS_ONLY: Document = {"resources": [{"name": "finetunejobs"}]}


class Discovery:
    """Answers of /apis and of our group, one after the other; the last one for ever."""

    def __init__(self, *answers: Document | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def request(self, method: str, path: str) -> Document:
        assert method == "GET"
        self.asked.append(path)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def wait(api: Discovery, longest: float = 60.0) -> None:
    async def bounded() -> None:
        # A wait without an end fails the test, and does not hang it.
        async with asyncio.timeout(20):
            await wait_for_crds(api, longest, 0.0)  # type: ignore[arg-type]

    asyncio.run(bounded())


def test_kinds_that_are_served_are_waited_for_no_longer() -> None:
    api = Discovery(GROUPS, BOTH)
    wait(api)
    assert api.asked == ["/apis", "/apis/finetune.dev/v1alpha1"]


def test_group_kind_and_server_are_waited_for_in_any_order() -> None:
    away = ApiUnreachableError("away")
    starting = ApiError("GET /apis", 503, "", "starting")
    api = Discovery(
        away,
        {"groups": [{"name": "batch"}]},
        starting,
        GROUPS,
        JOBS_ONLY,
        GROUPS,
        ApiError("GET", 404, "NotFound", ""),
        GROUPS,
        BOTH,
    )
    wait(api)
    assert len(api.asked) == 9


@pytest.mark.parametrize(
    ("answers", "missing"),
    [
        ([{"groups": []}], "API group finetune.dev"),
        ([GROUPS, JOBS_ONLY, GROUPS, JOBS_ONLY], "finetuneprofiles"),
        ([ApiUnreachableError("no route to host")], "no route to host"),
    ],
)
def test_what_is_missing_in_the_end_is_named_with_the_fix(
    answers: list[Any], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(Discovery):
        async def request(self, method: str, path: str) -> Document:
            if not self.answers:
                self.answers = list(answers)
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    with pytest.raises(
        CrdsMissingError, match=rf"{missing} is still missing after 0 s; install the chart with crds.enabled=true"
    ):
        wait(Endless(*answers), longest=0.05)
