"""Times, shares, device hours and differences that are computed from statuses."""

import copy
from datetime import UTC, datetime, timedelta

import pytest

from finetune_cli.commands.cost import usage_of_jobs
from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs.documents import moment
from finetune_cli.jobs.durations import duration_text, parse_duration
from finetune_cli.jobs.pod_logs import LogRequest, chosen_pods, is_of_rank
from finetune_cli.jobs.progress import device_seconds, figures, seconds_left, state
from finetune_cli.jobs.seen import seen_job, seen_pod
from finetune_cli.render.columns import bar, sparkline
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
    [(None, ""), (-3, "0s"), (59.9, "59s"), (61, "1m01s"), (3599, "59m59s"), (3660, "1h01m"), (90_000, "1d1h"), (86_400, "1d0h")],
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


def test_device_hours_are_those_that_status_has_counted_and_what_the_attempt_that_runs_holds_since() -> None:
    since = (objects.NOW - datetime(2026, 3, 1, 10, 31, tzinfo=UTC)).total_seconds()
    assert device_seconds(seen_job(objects.RUNNING), objects.NOW) == 11_520 + 4 * since
    # A queue has interrupted it: what it held until then is counted, and it holds nothing while it waits.
    queued = copy.deepcopy(objects.RUNNING)
    queued["status"] |= {"gpuSecondsUntil": "2026-03-01T11:00:00Z"}
    assert device_seconds(seen_job(queued), objects.NOW) == 11_520 + 4 * (since - 29 * 60)
    next(each for each in queued["status"]["conditions"] if each["type"] == "Trained")["reason"] = "Queued"
    assert device_seconds(seen_job(queued), objects.NOW) == 11_520
    (row,) = usage_of_jobs([seen_job(queued)], lambda job: job.team, {"default": 3.0}, objects.NOW)
    assert (row.gpu_hours, row.productive_hours, row.cost) == (3.2, 2.4, pytest.approx(9.6))


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


def test_bars_and_curves_have_a_fixed_width() -> None:
    assert (bar(0, 4), bar(0.5, 4), bar(7, 4)) == ("[----]", "[##--]", "[####]")
    assert (sparkline([]), sparkline([1, 1]), sparkline([8, 1, 4.5])) == ("", "▁▁", "█▁▅")
    assert sparkline([float(number) for number in range(1000)], 4) == "▁▃▆█"


@pytest.mark.parametrize("said", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "soon", ""])
def test_a_time_that_python_does_not_know_counts_as_absent(said: str) -> None:
    assert moment(said) is None


def test_times_are_in_utc() -> None:
    expected = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert moment("2026-01-02T03:04:05Z") == moment("2026-01-02T05:04:05+02:00") == moment("2026-01-02T03:04:05") == expected
    assert str(moment("2026-01-02T05:04:05+02:00")) == "2026-01-02 03:04:05+00:00"
