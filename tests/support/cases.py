"""Tables of cases that stand next to their test as data, one row a case."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml


def table(test: str, name: str) -> Any:
    """Return a table of the YAML file that is named like the test, whose `__file__` is given."""
    return _tables(Path(test).with_suffix(".yaml"))[name]


@cache
def _tables(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
