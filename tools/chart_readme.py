"""Generates the chart's README: every value with its default and its meaning, from values.yaml and its comments.

`python -m tools.chart_readme` writes it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tools.values_schema import FILE as SCHEMA

CHART = SCHEMA.parent
FILE = CHART / "README.md"
_KEY = re.compile(r"^( *)([A-Za-z]\w*):(?: |$)")
_HEAD = """# finetune-operator

{description}

```sh
helm install finetune charts/finetune-operator --namespace finetune-system --create-namespace --wait
helm test finetune --namespace finetune-system
```

How to install, upgrade and uninstall it, what a profile holds, and who may do what:
[install.md](../../docs/how-to/platform/install.md), [rights.md](../../docs/reference/rights.md),
[security.md](../../docs/explanation/security.md). Kubernetes {kubernetes}.

## Values

| value | default | meaning |
|---|---|---|
"""


def comments(text: str) -> dict[str, str]:
    """Return the comment above each key of the values, by the key's path, such as `image.tag`."""
    by_path: dict[str, str] = {}
    block: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        stripped = line.strip()
        key = _KEY.match(line)
        if stripped.startswith("#"):
            block.append(stripped.lstrip("# "))
        elif key is not None:
            indent = len(key[1])
            path = [*(part for part in path if part[0] < indent), (indent, key[2])]
            by_path[".".join(name for _, name in path)] = " ".join(block)
            block = []
        else:
            block = []
    return by_path


def rows(values: dict[str, Any], schema: dict[str, Any], meaning: dict[str, str], place: str = "") -> list[str]:
    """Return a table row for each value, and for each group of values that has a comment."""
    lines = []
    for name, value in values.items():
        path = f"{place}.{name}".lstrip(".")
        child = schema["properties"][name]
        text = meaning[path].replace("|", "\\|")
        if "properties" in child:
            if text:
                lines.append(f"| **{path}** | | {text} |")
            lines += rows(value, child, meaning, path)
        else:
            lines.append(f"| {path} | `{json.dumps(value)}` | {text} |")
    return lines


def text() -> str:
    """Return the whole page."""
    written = (CHART / "values.yaml").read_text()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    head = _HEAD.format(description=chart["description"], kubernetes=chart["kubeVersion"].removesuffix("-0"))
    table = rows(yaml.safe_load(written), json.loads(SCHEMA.read_text()), comments(written))
    return head + "\n".join(table) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
