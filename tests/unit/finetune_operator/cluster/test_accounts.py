"""What is counted of jobs. That counts are exact whatever dies is shown by tests/simulation/test_counters.py."""

from __future__ import annotations

from unittest.mock import patch

from finetune_operator.cluster import accounts
from finetune_operator.cluster.kinds import JOBS
from finetune_operator.cluster.projection import project
from finetune_operator.decide.observed import JobView
from tests.unit.finetune_operator.cluster import objects
from tests.unit.finetune_operator.cluster.usage_scene import LABELS, STARTED, Scene, cancel, job, run, status_of


def test_running_jobs_are_counted_up_to_ten_seconds_ago_and_what_holds_nothing_costs_no_write() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.count_until(15)
        assert scene.writes() == 1, "the account is opened"
        await scene.count_until(19)
        assert scene.writes() == 1
        await scene.count_until(80)
        await scene.count_until(80)
        assert scene.writes() == 2
        # Not productive and not lost yet.
        assert scene.accounts.totals()[LABELS].gpu_seconds == {}
        scene.show_job(9, {**STARTED, "progress": {"checkpointStep": 5}})
        await scene.count_until(110)
        assert scene.accounts.totals()[LABELS].gpu_seconds == {"productive": 4 * 90}

    run(scenario)


def test_a_deleted_job_is_counted_until_now_and_its_totals_stay() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.count_until(60)
        scene.now = 70
        scene.cache.remove(JOBS, project(JOBS, objects.finetune_job(20, STARTED)))
        await scene.count_until(71)
        assert scene.accounts.totals()[LABELS].gpu_seconds == {"lost": 4 * 60}
        scene.accounts = scene.another_life()
        assert scene.accounts.totals() == {}
        await scene.count_until(500)
        assert scene.accounts.totals()[LABELS].gpu_seconds == {"lost": 4 * 60}

    run(scenario)


def test_a_defect_of_an_account_does_not_hold_up_its_job() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.count_until(15)
        with patch.object(accounts, "with_decision", side_effect=ValueError("a defect")):
            await scene.accounts.decided(job(status_of()), status_of(True))
        assert scene.writes() == 1

    run(scenario)


def test_teams_that_a_user_invents_do_not_add_up_for_ever() -> None:
    """Also not over restarts, which read what is in use."""

    async def scenario(scene: Scene) -> None:
        await scene.count_until(100)
        for number in range(40):
            if number == 20:
                scene.accounts = scene.another_life()
            document = objects.finetune_job(50 + number, STARTED, parallelism={"nodes": 1, "processesPerNode": 4})
            document["metadata"] |= {
                "name": f"job-{number}",
                "uid": f"uid-{number}",
                "labels": {"finetune.dev/team": f"t{number}"},
            }
            scene.take(JOBS, document)
            view = JobView("team", f"job-{number}", f"uid-{number}", 1, "2", spec=None, status=status_of())
            await scene.accounts.decided(view, status_of(succeeded=True))
        teams = [labels.team for labels in scene.accounts.totals()]
        assert len(teams) == 33
        assert teams.count("other") == 1
        assert {"red", "t0", "t30"} <= set(teams)

    run(scenario)


def test_profiles_that_a_user_invents_are_none() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.count_until(100)
        for number in range(100):
            await cancel(scene, number)
        found = {labels.profile for labels in scene.accounts.totals()}
        assert found == {"default", "other"}
        assert len(scene.accounts.totals()) == 2

    run(scenario)
