"""Recording rules and alerts as the chart renders them, judged by the real promtool: each fires after its time, and not before,
and not where all is well.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_job.names import LABEL_JOB
from finetune_operator.cluster.projection import INDEX_LABEL
from tests.support.prometheus import rendered, rendered_rules
from tools.cluster.binaries import ensure_binaries
from tools.cluster.errors import ClusterError
from tools.cluster.processes import run_command

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
JOB = 'namespace="team", name="tune"'
POD = 'namespace="team", pod="tune-train-0-1-x7x7x"'


@dataclass(frozen=True)
class Case:
    """Series as promtool writes them, at one value a minute: one in which it fires, and one in which all is well."""

    alert: str
    fires: tuple[str, ...]
    minutes: int
    """How long it takes to fire."""
    labels: dict[str, str]
    healthy: tuple[str, ...]
    severity: str = "warning"


def values(series: str, text: str) -> str:
    return f"{series} => {text}"


OF_JOB = {"namespace": "team", "name": "tune"}
TRAINING = values(f'finetune_job_status{{{JOB}, state="Training"}}', "1x900")
CASES = (
    # The last step was at minute 5; ten minutes without one, and ten more.
    Case(
        "FineTuneJobStalled",
        (TRAINING, values(f"finetune_job_last_step_timestamp_seconds{{{JOB}}}", "0+60x5 300x900")),
        26,
        OF_JOB,
        (TRAINING, values(f"finetune_job_last_step_timestamp_seconds{{{JOB}}}", "0+60x900")),
    ),
    # Steps of four minutes each: nothing is late before twenty.
    Case(
        "FineTuneJobStalled",
        (
            TRAINING,
            values(f"finetune_job_last_step_timestamp_seconds{{{JOB}}}", "0x900"),
            values(f"finetune_training_step_median_seconds{{{JOB}}}", "240x900"),
        ),
        31,
        OF_JOB,
        (
            TRAINING,
            values(f"finetune_job_last_step_timestamp_seconds{{{JOB}}}", "0x900"),
            values(f'finetune_job_waiting{{{JOB}, reason="Queued"}}', "1x900"),
        ),
    ),
    Case(
        "FineTuneLossNaN",
        (values(f"finetune_training_loss{{{JOB}}}", "2x3" + " NaN" * 20),),
        5,
        OF_JOB,
        (values(f"finetune_training_loss{{{JOB}}}", "2x30"), values(f"finetune_training_gradient_norm{{{JOB}}}", "1x30")),
    ),
    Case(
        "FineTuneLossNaN",
        (values(f"finetune_training_gradient_norm{{{JOB}}}", "1x3" + " Inf" * 20),),
        5,
        OF_JOB,
        (values(f"finetune_training_gradient_norm{{{JOB}}}", "100x30"),),
    ),
    # 4 is more than 1.5 times 2 once the mean of ten minutes has followed.
    Case(
        "FineTuneLossDiverging",
        (values(f"finetune_training_loss{{{JOB}}}", "2x60 4x60"), values(f"finetune_training_step{{{JOB}}}", "100x200")),
        82,
        OF_JOB,
        (values(f"finetune_training_loss{{{JOB}}}", "2x60 2.8x60"), values(f"finetune_training_step{{{JOB}}}", "100x200")),
    ),
    Case(
        "FineTuneCheckpointStale",
        (
            values(f"finetune_training_last_checkpoint_timestamp_seconds{{{JOB}}}", "0x60"),
            values(f"finetune_training_checkpoint_interval_seconds{{{JOB}}}", "600x60"),
        ),
        26,
        OF_JOB,
        (
            values(f"finetune_training_last_checkpoint_timestamp_seconds{{{JOB}}}", "0x19 1200x60"),
            values(f"finetune_training_checkpoint_interval_seconds{{{JOB}}}", "1800x60"),
        ),
    ),
    Case(
        "FineTuneGPUIdle",
        (values(f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{POD}}}", "0.9x5 0.01x60"),),
        35,
        {"namespace": "team", "pod": "tune-train-0-1-x7x7x"},
        (
            values(f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{POD}}}", "0.9x60"),
            values('DCGM_FI_PROF_GR_ENGINE_ACTIVE{namespace="team", pod="notebook"}', "0x60"),
        ),
    ),
    # An exporter whose own labels were renamed.
    Case(
        "FineTuneGPUIdle",
        (
            values(
                'DCGM_FI_PROF_GR_ENGINE_ACTIVE{namespace="gpu", pod="dcgm-1", exported_namespace="team", '
                'exported_pod="tune-train-0-1-x7x7x"}',
                "0.01x60",
            ),
        ),
        16,
        {"namespace": "team", "pod": "tune-train-0-1-x7x7x"},
        (values('DCGM_FI_PROF_GR_ENGINE_ACTIVE{namespace="gpu", pod="dcgm-1", exported_pod="notebook"}', "0x60"),),
    ),
    Case(
        "FineTuneQueueWaitHigh",
        (values(f'finetune_job_waiting{{{JOB}, reason="Queued"}}', "1x300"),),
        241,
        OF_JOB | {"reason": "Queued"},
        (values(f'finetune_job_waiting{{{JOB}, reason="Restarting"}}', "1x300"),),
        "info",
    ),
    Case(
        "FineTunePendingUnschedulable",
        (values(f'finetune_job_waiting{{{JOB}, reason="ImagePullFailed"}}', "1x60"),),
        31,
        OF_JOB | {"reason": "ImagePullFailed"},
        (values(f'finetune_job_waiting{{{JOB}, reason="Queued"}}', "1x60"),),
    ),
    Case(
        "FineTuneRestartLoop",
        (values(f"finetune_job_restarts{{{JOB}}}", "0x60 1x5 2x5 3x5 4x60"),),
        78,
        OF_JOB,
        (values(f"finetune_job_restarts{{{JOB}}}", "0x60 1x60 2x60"),),
    ),
    Case(
        "FineTuneGoodputLow",
        (
            TRAINING,
            values(f"finetune_job_goodput_ratio{{{JOB}}}", "0.5x900"),
            values(f"finetune_job_start_timestamp_seconds{{{JOB}}}", "0x900"),
        ),
        392,
        OF_JOB,
        (
            TRAINING,
            values(f"finetune_job_goodput_ratio{{{JOB}}}", "0.9x900"),
            values(f"finetune_job_start_timestamp_seconds{{{JOB}}}", "0x900"),
        ),
        "info",
    ),
    Case(
        "FineTuneXidError",
        (values(f'DCGM_FI_DEV_XID_ERRORS{{{POD}, gpu="3"}}', "0x5 79x20"),),
        7,
        {"namespace": "team", "pod": "tune-train-0-1-x7x7x", "gpu": "3"},
        (values(f'DCGM_FI_DEV_XID_ERRORS{{{POD}, gpu="3"}}', "0x20"), values('DCGM_FI_DEV_XID_ERRORS{pod="notebook"}', "79x20")),
    ),
    Case(
        "FineTunePVCFilling",
        (
            TRAINING,
            values('kubelet_volume_stats_available_bytes{namespace="team", persistentvolumeclaim="work"}', "5x60"),
            values('kubelet_volume_stats_capacity_bytes{namespace="team", persistentvolumeclaim="work"}', "100x60"),
        ),
        11,
        {"namespace": "team", "persistentvolumeclaim": "work"},
        (
            values(f'finetune_job_status{{{JOB}, state="Succeeded"}}', "1x900"),
            values('kubelet_volume_stats_available_bytes{namespace="team", persistentvolumeclaim="work"}', "5x60"),
            values('kubelet_volume_stats_capacity_bytes{namespace="team", persistentvolumeclaim="work"}', "100x60"),
        ),
    ),
    Case(
        "FineTuneFailureRateHigh",
        (
            values('finetune_jobs_total{namespace="team", result="Failed", reason="Failed"}', "0x5 4x60"),
            values('finetune_jobs_total{namespace="team", result="Succeeded", reason="Completed"}', "0x5 4x60"),
        ),
        12,
        {"namespace": "team", "reason": "Failed"},
        (
            values('finetune_jobs_total{namespace="team", result="Failed", reason="Failed"}', "0x5 4x60"),
            values('finetune_jobs_total{namespace="team", result="Succeeded", reason="Completed"}', "0x5 40x60"),
        ),
    ),
    Case(
        "FineTuneOperatorDown",
        (values('finetune_leading{pod="standby"}', "0x20"),),
        6,
        {},
        (values('finetune_leading{pod="standby"}', "0x20"), values('finetune_leading{pod="leader"}', "1x20")),
        "critical",
    ),
    # A round every 15 s fails, against a server that was away for a minute.
    Case(
        "FineTuneUsageNotCounted",
        (values('finetune_background_failures_total{task="accounts"}', "0+4x60"),),
        9,
        {},
        (
            values('finetune_background_failures_total{task="accounts"}', "0x5 8x60"),
            values('finetune_background_failures_total{task="relist"}', "0+4x60"),
        ),
    ),
    Case(
        "FineTuneReconcileErrors",
        (
            values('finetune_reconcile_seconds_count{result="error"}', "0+30x60"),
            values('finetune_reconcile_seconds_count{result="unchanged"}', "0+60x60"),
        ),
        17,
        {},
        (
            values('finetune_reconcile_seconds_count{result="defect"}', "0+1x60"),
            values('finetune_reconcile_seconds_count{result="unchanged"}', "0+60x60"),
        ),
    ),
)


def test_promtool_accepts_the_rules_and_sees_each_alert_fire_in_its_time_alone(tmp_path: Path) -> None:
    rules = rendered_rules()
    (tmp_path / "full.yaml").write_text(yaml.safe_dump(rules))
    promtool = ensure_binaries().promtool
    assert "SUCCESS: 22 rules found" in run_command(
        promtool, "check", "rules", "--lint=all", "--lint-fatal", tmp_path / "full.yaml"
    )
    # Their texts are not what is tested here, and would have to be written twice.
    bare = json.loads(json.dumps(rules))
    for group in bare["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(bare))
    tests: list[dict[str, Any]] = []
    for case in CASES:
        firing = {"exp_labels": {**case.labels, "severity": case.severity}}
        expected = [(case.minutes, [firing]), (case.minutes - 2, [])]
        tests.append(_test(case.alert, case.fires, expected))
        tests.append(_test(case.alert, case.healthy, [(minute, []) for minute in range(1, case.minutes + 30, 7)]))
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    assert "SUCCESS" in run_command(promtool, "test", "rules", tmp_path / "tests.yaml")
    assert {case.alert for case in CASES} == {rule["alert"] for rule in _alerts(rules)}


def _test(alert: str, series: tuple[str, ...], expected: list[tuple[int, list[dict[str, Any]]]]) -> dict[str, Any]:
    pairs = [one.split(" => ") for one in series]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in pairs],
        "alert_rule_test": [
            {"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": alerts} for minutes, alerts in expected
        ],
    }


def _alerts(rules: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]


def test_recorded_series_are_what_their_names_say(tmp_path: Path) -> None:
    rules = rendered_rules()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    labels = 'team="a", queue="q", gpu="H100", outcome="lost"'
    series = {
        f'finetune_gpu_seconds_total{{namespace="n", profile="p", {labels}}}': "0+60x1440",
        f'finetune_cost_total{{namespace="n", profile="p", {labels}}}': "0+2x1440",
        'finetune_training_tokens_total{namespace="n", name="x"}': "0+600x1440",
        'finetune_training_tokens_total{namespace="n", name="y"}': "0+1200x1440",
        'finetune_job_goodput_ratio{namespace="n", name="x"}': "0.8x1440",
        'finetune_phase_duration_seconds_bucket{namespace="n", queue="q", phase="queue", le="60"}': "0+1x1440",
        'finetune_phase_duration_seconds_bucket{namespace="n", queue="q", phase="queue", le="+Inf"}': "0+1x1440",
        'finetune_time_to_first_step_seconds_bucket{namespace="n", queue="q", le="600"}': "0+1x1440",
        'finetune_time_to_first_step_seconds_bucket{namespace="n", queue="q", le="+Inf"}': "0+1x1440",
        # Of two exporters: one has labels of its own, and they were renamed.
        'DCGM_FI_PROF_GR_ENGINE_ACTIVE{namespace="n", pod="tune-train-0-0-x", gpu="0"}': "0.2x1440",
        'DCGM_FI_PROF_GR_ENGINE_ACTIVE{namespace="n", pod="tune-train-0-0-x", gpu="1"}': "0.9x1440",
        'DCGM_FI_PROF_GR_ENGINE_ACTIVE{namespace="gpu", exported_namespace="n", exported_pod="tune-train-0-1-x"}': "0.5x1440",
    }
    expected = {
        "team:finetune_gpu_hours:increase1d": {labels: 24.0},
        "team:finetune_cost:increase1d": {labels: 2880.0},
        "namespace:finetune_tokens:rate5m": {'namespace="n"': 30.0},
        "job:finetune_goodput:ratio": {'namespace="n", name="x"': 0.8},
        "queue:finetune_queue_wait_seconds:p95": {'queue="q"': 57.0},
        "queue:finetune_time_to_first_step_seconds:p95": {'queue="q"': 570.0},
        "pod:finetune_gpu_active:ratio": {
            'namespace="n", pod="tune-train-0-0-x"': 0.9,
            'namespace="n", pod="tune-train-0-1-x"': 0.5,
        },
    }
    assert set(expected) == {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            {
                "expr": name,
                "eval_time": "24h",
                "exp_samples": [{"labels": f"{name}{{{found}}}", "value": value} for found, value in samples.items()],
            }
            for name, samples in expected.items()
        ],
    }
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "fuzzy_compare": True, "evaluation_interval": "1m", "tests": [test]})
    )
    assert "SUCCESS" in run_command(ensure_binaries().promtool, "test", "rules", tmp_path / "tests.yaml")


def test_every_alert_says_what_to_do_and_where_that_is_explained() -> None:
    sections = re.findall(r"^## (\S+)$", (ROOT / "docs" / "how-to" / "runbooks.md").read_text(), re.MULTILINE)
    alerts = _alerts(rendered_rules("metrics.prometheusRule.runbooks=https://wiki.example/runbooks"))
    assert len(alerts) == 15
    assert [rule["alert"] for rule in alerts] == sections
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == f"https://wiki.example/runbooks#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["description"].endswith(".")
    assert [rule["alert"] for rule in alerts if rule["labels"]["severity"] == "critical"] == ["FineTuneOperatorDown"]


def test_an_alert_can_be_turned_off_or_changed_and_no_other_name_is_taken() -> None:
    changed = rendered_rules(
        "metrics.prometheusRule.alerts.FineTuneGPUIdle.enabled=false",
        "metrics.prometheusRule.alerts.FineTuneXidError.severity=critical",
        "metrics.prometheusRule.alerts.FineTuneXidError.for=3m",
    )
    alerts = {rule["alert"]: rule for rule in _alerts(changed)}
    assert "FineTuneGPUIdle" not in alerts
    assert len(alerts) == 14
    assert (alerts["FineTuneXidError"]["for"], alerts["FineTuneXidError"]["labels"]["severity"]) == ("3m", "critical")
    for wrong in ("FineTuneGPUIdel.enabled=false", "FineTuneGPUIdle.For=1m", "FineTuneGPUIdle.for=soon"):
        with pytest.raises(ClusterError, match="alerts"):
            rendered_rules(f"metrics.prometheusRule.alerts.{wrong}")


def test_nothing_of_this_is_made_unless_it_is_asked_for() -> None:
    kinds = [document["kind"] for document in rendered()]
    assert not {"PrometheusRule", "ServiceMonitor", "PodMonitor", "ConfigMap"} & set(kinds)
    labels = r"metrics.dashboards.labels.grafana_dashboard=yes"
    boards = [one for one in rendered("metrics.dashboards.create=true", labels) if one["kind"] == "ConfigMap"]
    assert [one["metadata"]["labels"]["grafana_dashboard"] for one in boards] == ["yes"] * 3
    assert {json.loads(text)["title"] for one in boards for text in one["data"].values()} == {
        "Fine-tuning: fleet",
        "Fine-tuning: run",
        "Fine-tuning: team",
    }


def test_rank_0_is_scraped_under_the_name_of_its_job_and_no_other_rank_is() -> None:
    (monitor,) = [one for one in rendered("metrics.podMonitor.create=true") if one["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    label, index = "finetune.dev/job", "batch.kubernetes.io/job-completion-index"
    assert (label, index) == (LABEL_JOB, INDEX_LABEL)
    sources = ["__meta_kubernetes_pod_label_" + re.sub(r"[^a-z]", "_", name) for name in (label, index)]
    assert endpoint["relabelings"] == [
        {"sourceLabels": [sources[0]], "targetLabel": "name"},
        {"sourceLabels": [sources[1]], "regex": "0", "action": "keep"},
    ]
