"""`python -m tools.pages.coming_from > docs/reference/coming-from.md`: list settings of other tools and our equivalents.

The right column is the answer of `finetune validate` to a manifest with such a setting.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from finetune_cli.corrections.foreign import answer, answer_to

_PAGE: Mapping[str, Any] = tomllib.loads(files("tools.pages").joinpath("coming_from.toml").read_text())
TOOLS: Mapping[str, Mapping[str, Any]] = _PAGE["tools"]
"""Tool -> its setting -> a value as people write it."""
SAME_NAME: Mapping[str, str] = _PAGE["same_name"]
WRITTEN: Mapping[str, Any] = _PAGE["written"]


def right_column(name: str, value: Any) -> str:
    """Return our answer to a setting of another tool."""
    same = SAME_NAME.get(name)
    if same is not None:
        instead = answer_to(same, str(value))
        return f"spec.{same}" if instead is None else f"spec.{same}: {instead['write']}: {instead['why']}"
    equivalent = answer(name, value, WRITTEN)
    if equivalent is None:
        raise KeyError(f"no answer is known for {name}")
    return equivalent.fix.removeprefix("write ")


def page() -> str:
    """Return the whole page in Markdown."""
    lines = [_PAGE["head"]]
    for tool, settings in TOOLS.items():
        lines += [f"## {tool}\n", "| theirs | here |", "|---|---|"]
        for name, value in settings.items():
            shown = (
                str(value).lower() if isinstance(value, bool) else f"[{', '.join(value)}]" if isinstance(value, list) else value
            )
            lines.append(f"| `{name}: {shown}` | {right_column(name, value)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
