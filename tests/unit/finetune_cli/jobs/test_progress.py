"""Times, shares, device hours and differences that are computed from statuses."""

from __future__ import annotations

import copy
import time
from datetime import UTC, datetime, timedelta

import pytest

from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs.comparison import Difference, differences
from finetune_cli.jobs.documents import moment
from finetune_cli.jobs.durations import duration_text, parse_duration
from finetune_cli.jobs.pod_logs import LogRequest, chosen_pods, is_of_rank
from finetune_cli.jobs.progress import device_seconds, figures, seconds_left, state, timeline
from finetune_cli.jobs.redact import redacted, redacted_text
from finetune_cli.jobs.seen import seen_job, seen_pod
from finetune_cli.jobs.usage import usage_of_jobs
from finetune_cli.render.columns import bar, sparkline
from finetune_cli.render.jobs import top_document, top_text
from finetune_job.names import Role
from tests.unit.finetune_cli.jobs import objects


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5s", 1.5), ("10m", 600), ("1h30m", 5400), ("2d", 172_800), ("0", 0)]
)
def test_a_length_of_time_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert parse_duration(text, "--since") == seconds


@pytest.mark.parametrize("text", ["", " ", "ten", "10 m", "-1", "1m1h", "1e9", "99999999d", "nan"])
def test_what_is_no_length_of_time_is_refused_with_the_option_and_a_fix(text: str) -> None:
    with pytest.raises(LocalError, match=r"--since: .*; write "):
        parse_duration(text, "--since")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (-3, "0s"),
        (59.9, "59s"),
        (61, "1m01s"),
        (3599, "59m59s"),
        (3660, "1h01m"),
        (90_000, "1d1h"),
        (86_400, "1d0h"),
    ],
)
def test_a_length_of_time_is_shown_in_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_the_time_left_is_that_of_the_pace_so_far() -> None:
    # 59 steps in 59 minutes, 140 to go, and one minute has passed since.
    assert seconds_left(seen_job(objects.RUNNING), objects.NOW) == 139 * 60
    assert seconds_left(seen_job(objects.RUNNING), objects.NOW + timedelta(days=9)) is None
    assert [seconds_left(seen_job(each), objects.NOW) for each in (objects.SUCCEEDED, objects.FAILED, objects.WAITING)] == [
        None
    ] * 3
    strange = copy.deepcopy(objects.RUNNING)
    strange["status"]["progress"] |= {"firstStepTime": "soon", "loss": "inf", "mfu": "much"}
    job = seen_job(strange)
    assert seconds_left(job, objects.NOW) is None
    found = figures(job)
    assert found is not None
    assert (found.loss, found.mfu, found.share) == (None, None, 0.3)


def test_a_stage_lasts_from_its_first_attempt_to_its_last() -> None:
    rows = {row.name: (row.state, row.seconds, len(row.attempts)) for row in timeline(seen_job(objects.RUNNING), objects.NOW)}
    assert rows["preflight"] == ("done", 120, 1)
    assert rows["train"] == ("Running", 114 * 60, 2)
    assert rows["merge"] == ("Pending", None, 0)


def test_device_hours_are_counted_from_when_the_pods_had_nodes() -> None:
    assert device_seconds(seen_job(objects.SUCCEEDED), objects.NOW) == 3600 * 8
    assert device_seconds(seen_job(objects.WAITING), objects.NOW) == 0
    smaller = copy.deepcopy(objects.SUCCEEDED)
    for attempt in smaller["status"]["attempts"]:
        attempt["ranks"] = 2
    assert device_seconds(seen_job(smaller), objects.NOW) == 3600 * 2
    # A number that somebody has written into the status.
    for ranks, counted in ((-3, 1), (0, 1), (2**40, 8)):
        for attempt in smaller["status"]["attempts"]:
            attempt["ranks"] = ranks
        assert device_seconds(seen_job(smaller), objects.NOW) == 3600 * counted
    jobs = [seen_job(each) for each in (objects.SUCCEEDED, objects.FAILED, objects.job("other", None, profile="cpu"))]
    (row,) = usage_of_jobs(jobs, lambda job: job.team, {"default": 2.0}, objects.NOW)
    assert (row.name, row.jobs, round(row.gpu_hours, 3), row.cost) == ("vision", 2, 9.867, pytest.approx(19.733, abs=1e-3))
    (row,) = usage_of_jobs(jobs, lambda job: job.team, {"default": None}, objects.NOW)
    assert row.cost is None


def test_the_devices_of_what_trains_now_are_those_of_its_attempt() -> None:
    """The gang has lost one of its two nodes of four ranks."""
    job = seen_job(objects.RUNNING)
    row = top_text([job], objects.NOW).splitlines()[1].split()
    assert (row[3], row[5], row[6]) == ("4", "39800", "9950")
    assert top_text([job], objects.NOW).splitlines()[-1] == "1 training, 4 devices; 0 other jobs"
    assert top_document([job], objects.NOW)["jobs"][0]["devices"] == 4
    unrecorded = copy.deepcopy(objects.RUNNING)
    unrecorded["status"]["attempts"] = []
    assert top_document([seen_job(unrecorded)], objects.NOW)["jobs"][0]["devices"] == 8


def test_jobs_differ_in_their_settings_and_in_what_the_plan_chose() -> None:
    one, other = copy.deepcopy(objects.RUNNING), copy.deepcopy(objects.FAILED)
    other["spec"]["training"] |= {"learningRate": "1e-4", "seed": 7}
    other["spec"]["run"]["retry"] = 4
    one["status"]["plan"] = {"hash": "a", "choices": [{"field": "spec.method.lora.loraAlpha", "value": "32"}]}
    assert differences(seen_job(one), seen_job(other)) == [
        Difference("spec.method.lora.loraAlpha", "32", "not set"),
        Difference("spec.training.learningRate", '"2e-4"', '"1e-4"'),
        Difference("spec.training.seed", "not set", "7"),
    ]


def test_the_pods_of_a_log_are_those_of_one_stage_and_attempt() -> None:
    job = seen_job(objects.RUNNING)
    pods = [
        seen_pod(objects.pod(objects.RUNNING, "preflight", 0, 0, "Succeeded")),
        seen_pod(objects.pod(objects.RUNNING, "train", 0, 1, "Failed")),
        *(seen_pod(objects.pod(objects.RUNNING, "train", 1, index)) for index in (1, 0)),
    ]

    def names(**request: object) -> list[str]:
        return [pod.name.removeprefix("running-") for pod in chosen_pods(job, pods, LogRequest(**request))]

    assert names() == ["train-1-0", "train-1-1"]
    assert names(rank=5) == ["train-1-1"]
    assert names(stage=Role.PREFLIGHT) == ["preflight-0-0"]
    assert names(attempt=0) == ["train-0-1"]
    assert names(failed=True) == ["train-0-1"]
    assert names(stage=Role.MERGE) == []
    assert [pod.name for pod in chosen_pods(seen_job(objects.SUCCEEDED), pods[:1], LogRequest())] == ["running-preflight-0-0"]
    assert [is_of_rank("[rank 1] x", rank) for rank in (None, 1, 11)] == [True, True, False]


def test_a_stage_that_has_not_begun_has_nothing_to_say_yet() -> None:
    for done, phase in ((1, "Fetching"), (3, "Training"), (5, "Merging")):
        assert state(seen_job(objects.job("between", {"conditions": objects.stages(done)}))) == phase


def test_states_say_what_holds_a_job_up() -> None:
    assert [state(seen_job(each)) for each in objects.ALL] == ["Succeeded", "Running", "Failed", "Stalled", "Queued", "Pending"]


def test_bars_and_curves_have_a_fixed_width() -> None:
    assert (bar(0, 4), bar(0.5, 4), bar(7, 4)) == ("[----]", "[##--]", "[####]")
    assert (sparkline([]), sparkline([1, 1]), sparkline([8, 1, 4.5])) == ("", "▁▁", "█▁▅")
    assert sparkline([float(number) for number in range(1000)], 4) == "▁▃▆█"


SECRETS = (
    "hf_abcdefghijklmnopqrstuv",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefghijklmnopqrstuvwx",
    "sk-abcdefghijklmnopqrst",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln",
    "hunter2hunter2",
)


@pytest.mark.parametrize("secret", SECRETS)
def test_what_looks_like_a_token_is_taken_out_of_a_text(secret: str) -> None:
    for text in (
        f"token={secret}",
        f"HF_TOKEN: {secret} next",
        f'"aws_secret_access_key": "{secret}"',
        f"Authorization: Bearer {secret}",
        f"GET https://user:{secret}@host/path",
        f"https://bucket/key?X-Amz-Signature={secret}&x=1",
        f"-----BEGIN RSA PRIVATE KEY-----\n{secret}\n-----END RSA PRIVATE KEY-----",
    ):
        found = redacted_text(text)
        assert secret not in found, text
        assert "(redacted)" in found


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("docker login -u me -p dckr_pat_abcdefghijklmnopqrst", "dckr_pat"),
        ("//registry.example/:_auth npm_abcdefghijklmnopqrstuvwx", "npm_"),
        ("git clone https://abcdefgh12345678@host/repository", "abcdefgh12345678"),
        ("secret_key: 'a few words'", "few words"),
        ('"password": "two words"', "two words"),
        ("run --hf-token abcdefgh --steps 5", "abcdefgh"),
        ("retried with Bearer abcdefgh.ijkl", "abcdefgh"),
        ("DefaultEndpointsProtocol=https;AccountKey=abcd1234==;x", "abcd1234"),
    ],
)
def test_other_forms_of_secrets_are_taken_out_too(text: str, secret: str) -> None:
    found = redacted_text(text)
    assert secret not in found
    assert "(redacted)" in found


def test_the_value_of_a_key_that_names_a_secret_is_taken_out_of_an_object() -> None:
    given = {"annotations": {"team.example/api-token": "few words", "a": "b"}, "password": "hunter2", "token": ""}
    kept = {"secretRef": {"name": "hub"}, "signingKeySecret": "keys", "maxTokens": "5", "tokenizer": "mine"}
    assert redacted({**given, **kept}) == {
        "annotations": {"team.example/api-token": "(redacted)", "a": "b"},
        "password": "(redacted)",
        "token": "",
        **kept,
    }


@pytest.mark.parametrize("part", ["a", "a-", "eyJ", "token", "a://", "--token ", "token='", "bearer "])
def test_a_long_line_of_a_stranger_holds_nothing_up(part: str) -> None:
    begun = time.process_time()
    redacted_text(part * (20_000 // len(part)))
    # A twentieth of a second here; twenty of them if each place looks as far as the end.
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("said", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "soon", ""])
def test_a_time_that_python_does_not_know_counts_as_absent(said: str) -> None:
    assert moment(said) is None


def test_times_are_in_utc() -> None:
    expected = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert moment("2026-01-02T03:04:05Z") == moment("2026-01-02T05:04:05+02:00") == moment("2026-01-02T03:04:05") == expected
    assert str(moment("2026-01-02T05:04:05+02:00")) == "2026-01-02 03:04:05+00:00"


@pytest.mark.parametrize(
    "text",
    [
        "[rank 0] loss 1.25 at step 60",
        "8192 tokens per second",
        "--max-tokens 4096",
        "the bearer of it",
        "pvc://data/train.jsonl",
        "monkey: banana",
    ],
)
def test_what_is_no_token_stays(text: str) -> None:
    assert redacted_text(text) == text


def test_an_object_keeps_its_form_without_values() -> None:
    pod = {
        "kind": "Pod",
        "metadata": {"managedFields": [1], "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "a": "b"}},
        "spec": {
            "containers": [
                {
                    "env": [{"name": "A", "value": "secret"}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "c"}}}, 3],
                    "args": ["--password=hunter2hunter2"],
                }
            ]
        },
    }
    assert redacted(pod) == {
        "kind": "Pod",
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "containers": [
                {
                    "env": [{"name": "A", "value": "(redacted)"}, {"name": "B", "valueFrom": "(redacted)"}, "(redacted)"],
                    "args": ["--password=(redacted)"],
                }
            ]
        },
    }
    secret = {"items": [{"kind": "Secret", "data": {"key": "aHVudGVyMg=="}}]}
    assert redacted(secret) == {"items": [{"kind": "Secret", "data": {"key": "(redacted)"}}]}
