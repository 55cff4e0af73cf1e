"""Recording rules and alerts as the chart renders them, judged by the real promtool: each fires after its time, and not before,
and not where all is well.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_job.names import LABEL_JOB
from finetune_operator.cache.projection import INDEX_LABEL
from tests.support.cases import table
from tests.support.prometheus import rendered, rendered_rules
from tools.cluster.binaries import ensure_binaries
from tools.cluster.errors import ClusterError
from tools.cluster.processes import run_command

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
CASES: list[dict[str, Any]] = table(__file__, "CASES")


def test_promtool_accepts_the_rules_and_sees_each_alert_fire_in_its_time_alone(tmp_path: Path) -> None:
    rules = rendered_rules()
    (tmp_path / "full.yaml").write_text(yaml.safe_dump(rules))
    promtool = ensure_binaries().promtool
    assert "SUCCESS: 21 rules found" in run_command(
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
        firing = {"exp_labels": {**case["labels"], "severity": case.get("severity", "warning")}}
        minutes = case["minutes"]
        tests.append(_test(case["alert"], case["fires"], {minutes: [firing], minutes - 2: []}))
        tests.append(_test(case["alert"], case["healthy"], {minute: [] for minute in range(1, minutes + 30, 7)}))
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    assert "SUCCESS" in run_command(promtool, "test", "rules", tmp_path / "tests.yaml")
    assert {case["alert"] for case in CASES} == {rule["alert"] for rule in _alerts(rules)}


def _test(alert: str, series: list[dict[str, str]], expected: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """A test of promtool: the alerts that are expected after so many minutes."""
    evaluated = [{"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": alerts} for minutes, alerts in expected.items()]
    return {"interval": "1m", "input_series": series, "alert_rule_test": evaluated}


def _alerts(rules: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]


def test_recorded_series_are_what_their_names_say(tmp_path: Path) -> None:
    rules = rendered_rules()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    labels = 'namespace="n", team="a", queue="q", profile="p", gpu="H100", outcome="lost"'
    series = {
        # One job has run for the whole day, and one was deleted after six hours.
        f'finetune_job_gpu_seconds{{name="x", uid="1", {labels}}}': "0+60x1440",
        f'finetune_job_gpu_seconds{{name="y", uid="2", {labels}}}': "0+60x360 stale",
        'finetune_profile_gpu_hour_price{profile="p"}': "9x10 2x1440",
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
        # `delta` prolongs what was seen by half a minute at the end of a series.
        "team:finetune_gpu_hours:delta1d": {labels: 30 + 1 / 120},
        "team:finetune_cost:delta1d": {labels: 60 + 1 / 60},
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
    assert len(alerts) == 14
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
    assert len(alerts) == 13
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
