"""What is read out of an answer, no matter who wrote it."""

import pytest

from finetune_operator.client.answers import ApiError, resource_of, retry_after_seconds
from tests.support.cases import table

NOW = 1_784_894_400.0
"""2026-07-24 12:00:00 UTC."""


@pytest.mark.parametrize(("header", "seconds"), table(__file__, "test_pause_is_read_in_seconds_and_as_a_date_within_bounds"))
def test_pause_is_read_in_seconds_and_as_a_date_within_bounds(header: str | None, seconds: float) -> None:
    assert retry_after_seconds(header, NOW) == seconds


def test_resource_is_named_as_the_server_does() -> None:
    assert resource_of("/api/v1/namespaces/team/pods/a") == "pods"
    assert resource_of("/api/v1/pods") == "pods"
    assert resource_of("/api/v1/namespaces/team/events") == "events"
    assert resource_of("/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs/tune/status") == "finetunejobs/status"
    assert resource_of("/apis/finetune.dev/v1alpha1/finetuneprofiles/default") == "finetuneprofiles"
    assert resource_of("/apis/finetune.dev/v1alpha1") == ""
    assert resource_of("/api/v1/namespaces/team") == "namespaces"
    assert resource_of("/healthz") == ""


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [(404, "NotFound", "not found"), (409, "Conflict", "conflict"), (409, "AlreadyExists", "already exists"), (403, "", "")],
)
def test_refusals_are_of_one_kind_at_most(code: int, reason: str, kind: str) -> None:
    error = ApiError("POST", code, reason, "")
    holds = {"not found": error.is_not_found, "conflict": error.is_conflict, "already exists": error.is_already_exists}
    assert [name for name, value in holds.items() if value] == ([kind] if kind else [])


@pytest.mark.parametrize(("code", "message", "expected"), table(__file__, "test_a_refusal_is_what_the_server_will_say_again"))
def test_a_refusal_is_what_the_server_will_say_again(code: int, message: str, expected: bool) -> None:
    assert ApiError("POST", code, "", message).is_refusal is expected
