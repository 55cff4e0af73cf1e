"""Objects of the API server, read whatever is in them."""

import copy
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_cli.jobs.diagnosis import diagnose
from finetune_cli.jobs.plain import harmless, plain
from finetune_cli.jobs.seen import seen_event, seen_job, seen_pod
from finetune_cli.render.diagnosis import diagnosis_text
from finetune_cli.render.job_status import status_document, status_text
from finetune_cli.render.jobs import jobs_document, jobs_text
from finetune_cli.render.verdicts import as_json, as_yaml
from finetune_job.names import Role
from tests.support.examples import examples
from tests.unit.finetune_cli.jobs import objects


@pytest.mark.parametrize(
    ("document", "phase"),
    [
        (objects.SUCCEEDED, "Succeeded"),
        (objects.RUNNING, "Training"),
        (objects.FAILED, "Failed"),
        (objects.STALLED, "Stalled"),
        (objects.WAITING, "Training"),
        (objects.NEW, "Pending"),
        (objects.HOSTILE, "Stalled"),
    ],
)
def test_a_job_is_in_one_phase(document: objects.Document, phase: str) -> None:
    assert seen_job(document).phase == phase


def test_a_job_says_who_it_is_and_what_it_asks_for() -> None:
    job = seen_job(objects.RUNNING)
    assert (job.title, job.uid, job.team, job.profile, job.num_ranks) == ("team/running", "uid-2", "vision", "default", 8)
    assert job.created == datetime(2026, 3, 1, 9, 55, tzinfo=UTC)
    assert job.started == datetime(2026, 3, 1, 10, 0, tzinfo=UTC)
    assert [each.outcome for each in job.attempts_of(Role.TRAIN)] == ["Failed", "Running"]
    assert job.batch_jobs == {"running-fetch-0", "running-preflight-0", "running-train-0", "running-train-1"}
    assert not job.has_ended
    assert job.unreadable == ()


def test_what_cannot_be_read_of_a_status_is_left_out_and_named() -> None:
    job = seen_job(objects.HOSTILE)
    assert job.unreadable == ("attempts", "conditions", "findings", "observedGeneration", "startTime")
    assert [each.type for each in job.status.conditions] == ["Stalled"]
    assert job.status.attempts == []
    assert job.started is None


@pytest.mark.parametrize("document", [{}, {"metadata": 3, "spec": [], "status": "x"}, {"spec": {"parallelism": {"nodes": True}}}])
def test_an_object_of_another_form_is_an_empty_job(document: objects.Document) -> None:
    job = seen_job(document)
    assert (job.title, job.uid, job.team, job.phase, job.num_ranks, job.created) == ("/", "", "", "Pending", 1, None)


def test_a_pod_says_its_place_and_the_states_of_its_containers() -> None:
    pod = seen_pod(objects.pod(objects.RUNNING, "train", 1, 3))
    assert (pod.role, pod.attempt, pod.node_rank, pod.node, pod.has_logs) == ("train", 1, 3, "gpu-3", True)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    pod = seen_pod(objects.pod(objects.RUNNING, "train", 1, 0, "Pending", **waiting))
    assert not pod.has_logs
    assert [(one.state, one.reason, one.message) for one in pod.containers] == [("waiting", "ImagePullBackOff", "no such image")]
    wrong = copy.deepcopy(objects.pod(objects.RUNNING, "train", 1))
    wrong["metadata"]["labels"] = {"finetune.dev/attempt": "1e9", "batch.kubernetes.io/job-completion-index": "9" * 40}
    wrong["status"]["containerStatuses"] = [{"state": []}, 7]
    pod = seen_pod(wrong)
    assert (pod.role, pod.attempt, pod.node_rank, [one.state for one in pod.containers]) == ("", 0, 0, [""])


def test_an_event_has_the_time_it_was_seen_last() -> None:
    event = seen_event(
        {
            "type": "Warning",
            "reason": "FailedScheduling",
            "message": "0/3 nodes",
            "count": 4,
            "metadata": {"creationTimestamp": "2026-03-01T10:00:00Z"},
            "lastTimestamp": "2026-03-01T10:05:00Z",
            "involvedObject": {"kind": "Pod", "name": "running-train-0-0"},
        }
    )
    assert event.time == datetime(2026, 3, 1, 10, 5, tzinfo=UTC)
    assert (event.subject, event.kind, event.reason, event.count) == ("Pod/running-train-0-0", "Warning", "FailedScheduling", 4)
    assert seen_event({"eventTime": 3}).time is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loss fell\n  to 1.2", "loss fell to 1.2"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b31m\u202eabc", "\\x9b31m\\u202eabc"),
        ("grün 模型", "grün 模型"),
        ("x" * 50, "x" * 17 + "..."),
        (None, "None"),
    ],
)
def test_a_text_of_a_stranger_is_shown_on_one_line_without_control_characters(text: object, shown: str) -> None:
    assert plain(text, 20) == shown


def test_a_line_of_a_log_keeps_its_blanks() -> None:
    assert harmless("a\t  b\x07\r") == "a\t  b\\x07\\r"


def test_what_does_not_print_is_escaped_in_data_and_reads_back() -> None:
    import json

    import yaml

    content = {"message": "\x1b[2J\x9b\u202e\x7f grün \ud800"}
    assert as_json(content).replace("\n", "").isprintable()
    assert json.loads(as_json(content)) == content
    assert "grün" in as_json(content)
    content = {"message": "\x1b[2J\x9b\u202e\x7f grün"}
    assert as_yaml(content).replace("\n", "").isprintable()
    assert yaml.safe_load(as_yaml(content)) == content


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4))


@st.composite
def hostile_jobs(draw: st.DrawFn) -> objects.Document:
    """A job of another kind, with some values anywhere in it replaced."""
    document = copy.deepcopy(draw(st.sampled_from(objects.ALL[:-1])))
    for _ in range(draw(st.integers(1, 4))):
        place = document
        while True:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
                place[key] = draw(JSON)
                break
            place = inner
        if not isinstance(document["metadata"], dict) or not document:
            break
    return document


@settings(max_examples=examples(35, 150), deadline=None)
@given(hostile_jobs())
def test_whatever_a_job_holds_is_printed_on_lines_without_control_characters(document: objects.Document) -> None:
    job = seen_job(document)
    diagnosis = diagnose(job, objects.NOW)
    for text in (
        jobs_text([job], objects.NOW, everywhere=True),
        status_text(job, diagnosis, objects.NOW),
        diagnosis_text(job, diagnosis),
        as_json(status_document(job, diagnosis, objects.NOW)),
        as_json(jobs_document([job], objects.NOW)),
    ):
        assert text.replace("\n", "").isprintable()
