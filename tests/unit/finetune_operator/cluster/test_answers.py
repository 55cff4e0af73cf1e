"""What is read out of an answer, no matter who wrote it."""

from __future__ import annotations

import pytest

from finetune_operator.cluster.answers import (
    ApiError,
    ApiUnreachableError,
    document_of,
    refusal_of,
    resource_of,
    retry_after_seconds,
)

NOW = 1_784_894_400.0
"""2026-07-24 12:00:00 UTC."""


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("", 0.0),
        ("soon", 0.0),
        ("-1", 0.0),
        ("1.5", 0.0),
        ("\u00b2", 0.0),
        ("0", 0.1),
        ("1", 1.0),
        (" 7 ", 7.0),
        ("31", 30.0),
        ("9" * 400, 30.0),
        ("Fri, 24 Jul 2026 12:00:05 GMT", 5.0),
        ("Fri, 24 Jul 2026 11:59:00 GMT", 0.1),
        ("Fri, 24 Jul 2027 12:00:00 GMT", 30.0),
        ("Friday, 24-Jul-26 12:00:03 GMT", 3.0),
        ("Fri Jul 24 12:00:04 2026", 4.0),
        ("Fri, 99 Jul 2026 12:00:05 GMT", 0.0),
    ],
)
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


@pytest.mark.parametrize("content", [b"<html>", b"[]", b"null", b""])
def test_an_answer_that_is_not_an_object_is_as_good_as_none(content: bytes) -> None:
    with pytest.raises(ApiUnreachableError, match="GET /api/v1/pods: the answer is not"):
        document_of("GET /api/v1/pods", content)


def test_an_answer_that_is_an_object_is_that_object() -> None:
    assert document_of("GET /api/v1/pods", b'{"items": null}') == {"items": None}


@pytest.mark.parametrize(
    ("content", "reason", "message"),
    [
        (b'{"reason": "Conflict", "message": "the object has changed"}', "Conflict", "the object has changed"),
        (b'{"reason": null}', "", ""),
        (b"upstream connect error", "", "upstream connect error"),
        (b"[]", "", "[]"),
        (b"x" * 600, "", "x" * 500),
    ],
)
def test_a_refusal_has_the_words_of_the_server_or_of_what_is_before_it(content: bytes, reason: str, message: str) -> None:
    refusal = refusal_of("PATCH", "/api/v1/pods/a", 409, 1.5, content)
    assert (refusal.code, refusal.reason, refusal.message, refusal.retry_after) == (409, reason, message, 1.5)
    assert str(refusal).startswith("PATCH /api/v1/pods/a: 409 ")


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [(404, "NotFound", "not found"), (409, "Conflict", "conflict"), (409, "AlreadyExists", "already exists"), (403, "", "")],
)
def test_refusals_are_of_one_kind_at_most(code: int, reason: str, kind: str) -> None:
    error = ApiError("POST", code, reason, "")
    holds = {"not found": error.is_not_found, "conflict": error.is_conflict, "already exists": error.is_already_exists}
    assert [name for name, value in holds.items() if value] == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (400, "admission webhook denied the request", True),
        (403, "exceeded quota", True),
        (413, "too large", True),
        (422, "invalid", True),
        (500, "Internal error occurred: failed calling webhook: no endpoints", True),
        (500, "etcdserver: leader changed", False),
        (503, "webhook", False),
        (401, "", False),
        (408, "", False),
        (409, "", False),
        (410, "", False),
        (429, "", False),
    ],
)
def test_a_refusal_is_what_the_server_will_say_again(code: int, message: str, expected: bool) -> None:
    assert ApiError("POST", code, "", message).is_refusal is expected
