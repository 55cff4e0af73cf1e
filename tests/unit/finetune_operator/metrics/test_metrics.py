from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import project
from finetune_operator.client.answers import AnsweredRequest
from finetune_operator.client.kinds import JOBS, JobKey
from finetune_operator.metrics.health import Health
from finetune_operator.metrics.metrics import MOST_RULES, OTHER_RULES, Metrics
from finetune_operator.queue.workqueue import WorkQueue
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(metrics.registry).decode()
    families = text_string_to_metric_families(text)
    return {(item.name, tuple(sorted(item.labels.items()))): item.value for family in families for item in family.samples}


def requests(found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> dict[tuple[str, ...], float]:
    names = ("verb", "resource", "code", "reason")
    series = {labels: value for (name, labels), value in found.items() if name == "finetune_api_requests_total"}
    return {tuple(dict(labels)[name] for name in names): value for labels, value in series.items()}


@dataclass
class Watched:
    """The watches, as a scrape sees them."""

    heard: dict[str, float]
    num_restarts: int = 0

    def ages(self) -> dict[str, float]:
        return self.heard


def test_series_follow_their_objects() -> None:
    cache, queue, metrics = Cache(Clock()), WorkQueue[JobKey](retry_first=1, retry_longest=1, clock=Clock()), Metrics()
    watches = Watched({"Pod": 2.5})
    metrics.observe_state(cache, queue, Health(Clock()), watches)  # type: ignore[arg-type]
    status = {
        "phase": "Training",
        "conditions": [{"type": "Prepared", "status": "True", "reason": "Completed"}],
        "attempts": [{"number": 0, "outcome": "Failed", "failure": "Collective", "counted": True}, {"number": 1}],
    }
    held = project(JOBS, objects.finetune_job(status=status))
    cache.apply(JOBS, held)
    queue.add(JobKey("team", "tune"))
    metrics.request(AnsweredRequest("PATCH", "finetunejobs/status", "200", ""))
    metrics.request(AnsweredRequest("POST", "jobs", "403", "Forbidden"))
    metrics.request(AnsweredRequest("POST", "jobs", "403", "a webhook's own word"))
    metrics.judged(0.004)
    metrics.waited(0.2)
    metrics.lagged(0.01)
    metrics.reconciled(0.01, "acted")
    metrics.found("wrap-class-name-blank", "error")
    found = samples(metrics)
    assert found["finetune_jobs", (("namespace", "team"), ("phase", "Training"))] == 1
    assert found["finetune_job_conditions", (("condition", "Prepared"), ("reason", "Completed"), ("status", "True"))] == 1
    assert found["finetune_attempts", (("outcome", "Failed"),)] == 1
    assert found["finetune_attempts", (("outcome", "Running"),)] == 1
    assert found["finetune_attempt_failures", (("class", "Collective"), ("counted", "true"))] == 1
    assert found["finetune_queue_keys", (("state", "ready"),)] == 1
    assert requests(found) == {
        ("PATCH", "finetunejobs/status", "200", ""): 1,
        ("POST", "jobs", "403", "Forbidden"): 1,
        ("POST", "jobs", "403", "other"): 1,
    }
    assert found["finetune_pass_cpu_seconds_count", ()] == 1
    assert found["finetune_queue_seconds_bucket", (("le", "0.25"),)] == 1
    assert found["finetune_loop_lag_seconds_sum", ()] == 0.01
    assert found["finetune_reconcile_seconds_count", (("result", "acted"),)] == 1
    assert found["finetune_validation_findings_total", (("rule", "wrap-class-name-blank"), ("severity", "error"))] == 1
    assert found["finetune_watch_age_seconds", (("kind", "Pod"),)] == 2.5
    watches.num_restarts = 3
    assert samples(metrics)["finetune_watch_restarts_total", ()] == 3
    cache.remove(JOBS, held)
    assert not [key for key in samples(metrics) if key[0] in ("finetune_jobs", "finetune_attempts")]


def test_a_pod_that_invents_ids_of_rules_makes_no_more_series_than_there_may_be() -> None:
    metrics = Metrics()
    for number in range(MOST_RULES + 100):
        metrics.found(f"invented-{number}", "error")
    for hostile in ("", "x" * 65, 'a"}\n', "ä"):
        metrics.found(hostile, "warning")
    found = {key: value for key, value in samples(metrics).items() if key[0] == "finetune_validation_findings_total"}
    assert len(found) == MOST_RULES + 2
    assert found["finetune_validation_findings_total", (("rule", OTHER_RULES), ("severity", "error"))] == 100
    assert found["finetune_validation_findings_total", (("rule", OTHER_RULES), ("severity", "warning"))] == 4
