"""The chart's Grafana dashboards: what each panel asks, and the JSON that Grafana reads.

`python -m tools.dashboards` writes the files. The data source is a variable, and nothing in them names one installation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parents[1] / "charts" / "finetune-operator" / "files" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8


@dataclass(frozen=True)
class Panel:
    """A graph, or one number if `kind` is stat. `queries`: expression and legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    text: str = ""


@dataclass(frozen=True)
class Dashboard:
    """A page of panels. `variables`: name, and the query of its values."""

    name: str
    title: str
    variables: tuple[tuple[str, str], ...]
    panels: tuple[Panel, ...]
    annotations: tuple[tuple[str, str], ...] = ()


def _stat(title: str, unit: str, query: str, text: str = "") -> Panel:
    return Panel(title, unit, ((query, ""),), "stat", 4, text)


_JOB = 'namespace="$namespace", name="$job"'
_OF_TRAINING_PODS = 'namespace="$namespace", pod=~"$job-train-[0-9]+-.+"'
_QUEUED = 'finetune_phase_duration_seconds_bucket{phase="queue"}'
_STARTED = 'finetune_phase_duration_seconds_bucket{phase=~"startup|pull"}'
_PEAK = "max by (namespace, name) (finetune_training_peak_memory_bytes)"
_OF_ESTIMATE = f"{_PEAK} / on (namespace, name) finetune_job_memory_estimate_bytes"
FLEET = Dashboard(
    "fleet",
    "Fine-tuning: fleet",
    (),
    (
        _stat("Training", "short", 'sum(finetune_jobs{phase="Training"}) or vector(0)'),
        _stat("Waiting", "short", "count(finetune_job_waiting) or vector(0)"),
        _stat("Failed jobs, 24 h", "short", 'sum(increase(finetune_jobs_total{result="Failed"}[1d])) or vector(0)'),
        _stat("GPUs held", "short", "sum(finetune_job_gpus) or vector(0)"),
        _stat("GPUs active", "short", "sum(pod:finetune_gpu_active:ratio)", "By the DCGM exporter."),
        _stat("Operators that lead", "short", "sum(finetune_leading)"),
        Panel("Jobs by phase", "short", (("sum by (phase) (finetune_jobs)", "{{phase}}"),)),
        Panel("What jobs wait for", "short", (("count by (reason) (finetune_job_waiting)", "{{reason}}"),)),
        Panel(
            "GPUs held by queue",
            "short",
            (("sum by (queue) (finetune_job_gpus * on (namespace, name) group_left (queue) finetune_job_info)", "{{queue}}"),),
        ),
        Panel(
            "Wait in the queue, median and p95",
            "s",
            (
                (
                    f"histogram_quantile(0.5, sum by (queue, le) (rate({_QUEUED}[1d])))",
                    "{{queue}} median",
                ),
                ("queue:finetune_queue_wait_seconds:p95", "{{queue}} p95"),
            ),
            text="Of jobs that have ended.",
        ),
        Panel(
            "From a node to running: volumes and network, and the pull of the image, p95",
            "s",
            (
                (
                    f"histogram_quantile(0.95, sum by (phase, le) (rate({_STARTED}[1d])))",
                    "{{phase}}",
                ),
            ),
            text="Of jobs that have ended.",
        ),
        Panel("Time to the first step, p95", "s", (("queue:finetune_time_to_first_step_seconds:p95", "{{queue}}"),)),
        Panel(
            "Ends of jobs by reason",
            "short",
            (("sum by (result, reason) (increase(finetune_jobs_total[1h])) > 0", "{{result}} {{reason}}"),),
        ),
        Panel("Restarts by class", "short", (("sum by (class) (increase(finetune_restarts_total[1h])) > 0", "{{class}}"),)),
        Panel(
            "Goodput",
            "percentunit",
            (
                ("avg(job:finetune_goodput:ratio)", "mean"),
                ("min(job:finetune_goodput:ratio)", "lowest"),
            ),
        ),
        Panel("Tokens per second", "short", (("namespace:finetune_tokens:rate5m", "{{namespace}}"),)),
        Panel("Operator: passes", "short", (("sum by (result) (rate(finetune_reconcile_seconds_count[5m]))", "{{result}}"),)),
        Panel(
            "Operator: loop lag and queue, p95",
            "s",
            (
                ("histogram_quantile(0.95, sum by (le) (rate(finetune_loop_lag_seconds_bucket[5m])))", "loop lag"),
                ("histogram_quantile(0.95, sum by (le) (rate(finetune_queue_seconds_bucket[5m])))", "work queue"),
            ),
        ),
        Panel("Operator: age of the watches", "s", (("max by (kind) (finetune_watch_age_seconds)", "{{kind}}"),)),
    ),
)
RUN = Dashboard(
    "run",
    "Fine-tuning: run",
    (
        ("namespace", "label_values(finetune_job_info, namespace)"),
        ("job", 'label_values(finetune_job_info{namespace="$namespace"}, name)'),
    ),
    (
        Panel("Phase", "short", ((f"finetune_job_status{{{_JOB}}}", "{{state}}"),), "stat", 4),
        _stat("Progress", "percentunit", f"finetune_job_progress_ratio{{{_JOB}}}"),
        _stat("Time left", "s", f"max(finetune_training_remaining_seconds{{{_JOB}}})"),
        _stat("Age of the last checkpoint", "s", f"time() - max(finetune_training_last_checkpoint_timestamp_seconds{{{_JOB}}})"),
        _stat("Goodput", "percentunit", f"finetune_job_goodput_ratio{{{_JOB}}}"),
        _stat("Restarts", "short", f"finetune_job_restarts{{{_JOB}}}"),
        Panel(
            "Loss",
            "short",
            (
                (f"finetune_training_loss{{{_JOB}}}", "training"),
                (f"finetune_training_eval_loss{{{_JOB}}}", "held out"),
            ),
        ),
        Panel("Gradient norm", "short", ((f"finetune_training_gradient_norm{{{_JOB}}}", "norm"),)),
        Panel("Learning rate", "short", ((f"finetune_training_learning_rate{{{_JOB}}}", "rate"),)),
        Panel(
            "Tokens per second and device", "short", ((f"finetune_training_tokens_per_second_per_device{{{_JOB}}}", "tokens/s"),)
        ),
        Panel(
            "MFU", "percentunit", ((f"finetune_training_mfu_ratio{{{_JOB}}}", "MFU"),), text="Where the device's peak is known."
        ),
        Panel(
            "Step time",
            "s",
            (
                (f"finetune_training_step_median_seconds{{{_JOB}}}", "median"),
                (f"finetune_training_step_p95_seconds{{{_JOB}}}", "p95"),
            ),
        ),
        Panel("Slowest rank over the median rank", "short", ((f"finetune_training_straggler_ratio{{{_JOB}}}", "ratio"),)),
        Panel(
            "Memory of the fullest rank",
            "bytes",
            (
                (f"finetune_training_peak_memory_bytes{{{_JOB}}}", "peak"),
                (f"finetune_job_memory_estimate_bytes{{{_JOB}}}", "estimate"),
            ),
            text="The estimate is preflight's, from the real model.",
        ),
        Panel(
            "Time that brought no step",
            "s",
            ((f"sum by (cause) (finetune_training_badput_seconds_total{{{_JOB}}})", "{{cause}}"),),
        ),
        Panel(
            "GPUs: activity",
            "percentunit",
            ((f"pod:finetune_gpu_active:ratio{{{_OF_TRAINING_PODS}}}", "{{pod}}"),),
            text="By the DCGM exporter.",
        ),
        Panel(
            "GPUs: memory in use",
            "decmbytes",
            ((f"max by (pod) (DCGM_FI_DEV_FB_USED{{{_OF_TRAINING_PODS}}})", "{{pod}}"),),
            text="By the DCGM exporter, whose monitor honors its labels.",
        ),
        Panel("Waiting", "short", ((f"finetune_job_waiting{{{_JOB}}} or vector(0)", "{{reason}}"),)),
    ),
    (("Restarts", f"changes(finetune_job_restarts{{{_JOB}}}[2m]) > 0"),),
)
_JOIN = "* on (namespace, name) group_left (team) finetune_job_info"
_TEAM = 'team=~"$team"'
TEAM = Dashboard(
    "team",
    "Fine-tuning: team",
    (("team", "label_values(finetune_job_info, team)"),),
    (
        _stat("GPU hours, 30 days", "h", f"sum(increase(finetune_gpu_seconds_total{{{_TEAM}}}[30d])) / 3600"),
        _stat(
            "Cost, 30 days", "short", f"sum(increase(finetune_cost_total{{{_TEAM}}}[30d]))", "In the currency of the profiles."
        ),
        _stat(
            "Lost GPU hours, 30 days", "h", f'sum(increase(finetune_gpu_seconds_total{{{_TEAM}, outcome="lost"}}[30d])) / 3600'
        ),
        _stat("Jobs succeeded, 30 days", "short", f'sum(increase(finetune_jobs_total{{{_TEAM}, result="Succeeded"}}[30d]))'),
        _stat("Jobs failed, 30 days", "short", f'sum(increase(finetune_jobs_total{{{_TEAM}, result="Failed"}}[30d]))'),
        _stat(
            "GPUs held",
            "short",
            (f"sum(finetune_job_gpus {_JOIN}{{{_TEAM}}}) or vector(0)"),
        ),
        Panel("GPU hours a day by team", "h", ((f"sum by (team) (team:finetune_gpu_hours:increase1d{{{_TEAM}}})", "{{team}}"),)),
        Panel("Cost a day by team", "short", ((f"sum by (team) (team:finetune_cost:increase1d{{{_TEAM}}})", "{{team}}"),)),
        Panel(
            "GPU hours a day by what came of them",
            "h",
            ((f"sum by (outcome) (team:finetune_gpu_hours:increase1d{{{_TEAM}}})", "{{outcome}}"),),
        ),
        Panel(
            "GPU hours a day by GPU and queue",
            "h",
            ((f"sum by (gpu, queue) (team:finetune_gpu_hours:increase1d{{{_TEAM}}})", "{{gpu}} {{queue}}"),),
        ),
        Panel(
            "Ends of jobs by method",
            "short",
            ((f"sum by (method, result) (increase(finetune_jobs_total{{{_TEAM}}}[1d])) > 0", "{{method}} {{result}}"),),
        ),
        Panel(
            "Restarts by class",
            "short",
            ((f"sum by (class) (increase(finetune_restarts_total{{{_TEAM}}}[1d])) > 0", "{{class}}"),),
        ),
        Panel(
            "Jobs by phase",
            "short",
            (
                (
                    f"count by (state) (finetune_job_status {_JOIN}{{{_TEAM}}})",
                    "{{state}}",
                ),
            ),
        ),
        Panel(
            "Peak memory over its estimate",
            "percentunit",
            (
                (
                    f"avg by (method) ({_OF_ESTIMATE} * on (namespace, name) group_left (method) finetune_job_info{{{_TEAM}}})",
                    "{{method}}",
                ),
            ),
            text="Of jobs that train now. Above 1 the estimate was too low.",
        ),
        Panel("Base models of jobs", "short", ((f"count by (model) (finetune_job_info{{{_TEAM}}})", "{{model}}"),)),
        Panel(
            "Goodput",
            "percentunit",
            (
                (
                    f"avg by (team) (job:finetune_goodput:ratio {_JOIN}{{{_TEAM}}})",
                    "{{team}}",
                ),
            ),
        ),
    ),
)
DASHBOARDS = (FLEET, RUN, TEAM)


def document(dashboard: Dashboard) -> dict[str, Any]:
    """As Grafana imports it."""
    panels: list[dict[str, Any]] = []
    x, y = 0, 0
    for number, panel in enumerate(dashboard.panels):
        height = 4 if panel.kind == "stat" else HEIGHT
        if x + panel.width > COLUMNS or (panels and panels[-1]["gridPos"]["h"] != height):
            x, y = 0, y + panels[-1]["gridPos"]["h"]
        panels.append(_panel(number + 1, panel, {"x": x, "y": y, "w": panel.width, "h": height}))
        x += panel.width
    return {
        "title": dashboard.title,
        "tags": ["finetune"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                *(_variable(name, query, is_many=dashboard is TEAM) for name, query in dashboard.variables),
            ]
        },
        "annotations": {
            "list": [
                {"name": name, "datasource": SOURCE, "expr": query, "enable": True, "iconColor": "orange"}
                for name, query in dashboard.annotations
            ]
        },
        "panels": panels,
    }


def _variable(name: str, query: str, *, is_many: bool) -> dict[str, Any]:
    many = {"multi": True, "includeAll": True, "allValue": ".*"} if is_many else {}
    return {"name": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "sort": 1, **many}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend or "__auto", "instant": panel.kind == "stat"}
        for index, (expression, legend) in enumerate(panel.queries)
    ]
    options = {"textMode": "name"} if panel.title == "Phase" else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.text} if panel.text else {}),
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        **({"options": options} if options else {}),
        "targets": targets,
    }


def text(dashboard: Dashboard) -> str:
    """The file of a dashboard: a line for each panel."""
    content = document(dashboard)
    panels = ",\n".join(json.dumps(panel) for panel in content.pop("panels"))
    head = json.dumps(content)[:-1]
    return f'{head}, "panels": [\n{panels}\n]}}\n'


def queries(dashboard: Dashboard) -> list[tuple[str, str]]:
    """Title and expression of everything that it asks."""
    asked = [(panel.title, expression) for panel in dashboard.panels for expression, _ in panel.queries]
    return [*asked, *dashboard.annotations]


if __name__ == "__main__":
    for each in DASHBOARDS:
        (DIRECTORY / f"{each.name}.json").write_text(text(each))
