"""Write the chart's Grafana dashboards: `python -m tools.dashboards`.

tools/dashboards.yaml has the queries of each panel. The data source is a variable, so the files fit every installation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

DIRECTORY = Path(__file__).resolve().parents[1] / "charts" / "finetune-operator" / "files" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
Part = dict[str, Any]
DASHBOARDS: dict[str, Part] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
"""The dashboards by the names of their files."""


def document(name: str) -> Part:
    """Return a dashboard as Grafana imports it."""
    dashboard = DASHBOARDS[name]
    panels: list[Part] = []
    x, y = 0, 0
    for number, panel in enumerate(dashboard["panels"], 1):
        width, height = (4, 4) if "stat" in panel else (8, 8)
        if x + width > COLUMNS or (panels and panels[-1]["gridPos"]["h"] != height):
            x, y = 0, y + panels[-1]["gridPos"]["h"]
        panels.append(_panel(number, panel, {"x": x, "y": y, "w": width, "h": height}))
        x += width
    # A dashboard may show the costs of several teams at once.
    many = {"multi": True, "includeAll": True, "allValue": ".*"} if name == "team" else {}
    variables = [
        {"name": variable, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "sort": 1, **many}
        for variable, query in dashboard.get("variables", {}).items()
    ]
    annotations = [
        {"name": annotation, "datasource": SOURCE, "expr": query, "enable": True, "iconColor": "orange"}
        for annotation, query in dashboard.get("annotations", {}).items()
    ]
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": dashboard["title"],
        "tags": ["finetune"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "annotations": {"list": annotations},
        "panels": panels,
    }


def _panel(number: int, panel: Part, place: dict[str, int]) -> Part:
    is_stat = "stat" in panel
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend or "__auto", "instant": is_stat}
        for index, (legend, expression) in enumerate(_queries(panel).items())
    ]
    return {
        "id": number,
        "type": "stat" if is_stat else "timeseries",
        "title": panel["title"],
        **({"description": panel["text"]} if "text" in panel else {}),
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel["unit"]}, "overrides": []},
        **({"options": {"textMode": "name"}} if panel["title"] == "Phase" else {}),
        "targets": targets,
    }


def _queries(panel: Part) -> dict[str, str]:
    """Return the expressions of a panel by their legends."""
    queries: dict[str, str] = panel.get("queries") or {panel.get("legend", ""): panel["stat"]}
    return queries


def text(name: str) -> str:
    """Return the JSON of a dashboard, with one line for each panel."""
    content = document(name)
    panels = ",\n".join(json.dumps(panel) for panel in content.pop("panels"))
    head = json.dumps(content)[:-1]
    return f'{head}, "panels": [\n{panels}\n]}}\n'


def queries(name: str) -> list[tuple[str, str]]:
    """Return title and expression of every query of a dashboard."""
    dashboard = DASHBOARDS[name]
    of_panels = [(panel["title"], expression) for panel in dashboard["panels"] for expression in _queries(panel).values()]
    return [*of_panels, *dashboard.get("annotations", {}).items()]


if __name__ == "__main__":
    for dashboard_name in DASHBOARDS:
        (DIRECTORY / f"{dashboard_name}.json").write_text(text(dashboard_name))
