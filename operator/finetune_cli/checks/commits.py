"""Asks the Hub for the commits of repositories that a manifest names without one, and puts them into the findings."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from typing import Any

from finetune_cli.corrections.wrong_field import value_at
from finetune_job.api.base import HUB_DATASETS, HubPath, parse_source
from finetune_job.finding import Finding
from finetune_job.rules.rule import with_changes
from finetune_job.rules.sources import NO_COMMIT

SECONDS = 5
"""Time limit of a request."""
_HUB = "https://huggingface.co"


def with_commits(finding: Finding, content: Any) -> Finding:
    """Replace the placeholder commits in a finding's changes; if the Hub does not return all commits, change nothing."""
    if NO_COMMIT not in str(finding.changes):
        return finding
    changed, commits = with_changes(content, finding.changes), []
    for wanted, written in zip(_sources(changed), _sources(content), strict=False):
        if wanted.get("revision") == NO_COMMIT:
            name = written.get("revision") or str(written.get("source")).partition("@")[2]
            commit = _commit(str(wanted.get("source")), str(name))
            if commit is None:
                return finding
            wanted["revision"] = commit
            commits.append(f"{commit} ({name or 'the newest commit'} of {wanted['source']})")
    changes = [
        change.model_copy(update={"value": value_at(changed, tuple(change.field.split(".")))}) for change in finding.changes
    ]
    fix = f"write the commit: {', '.join(commits)}"
    return finding.model_copy(update={"changes": tuple(changes), "fix": fix, "is_proposal": None})


def _sources(content: Any) -> list[dict[str, Any]]:
    """Return the mappings of a manifest that may name a repository, always in the same order; missing ones are empty."""
    datasets = value_at(content, ("spec", "data", "datasets"))
    places = [("model",), ("data",), ("data", "validation")]
    sources = [value_at(content, ("spec", *place)) for place in places] + (datasets if isinstance(datasets, list) else [])
    return [source if isinstance(source, dict) else {} for source in sources]


@lru_cache
def _commit(source: str, name: str) -> str | None:
    """Return the commit of a branch or tag, or of the default branch if `name` is empty; None if the Hub returns none."""
    from urllib.parse import quote

    import urllib3

    place = None
    with suppress(ValueError):  # The rules report an address that is malformed.
        place = parse_source(source)
    if not isinstance(place, HubPath) or os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return None
    kind, at = HUB_DATASETS if place.is_dataset else "models/", f"/revision/{quote(name, safe='')}" if name else ""
    address = f"{os.environ.get('HF_ENDPOINT', _HUB).rstrip('/')}/api/{kind}{place.repository}{at}"
    with suppress(urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError, RecursionError):
        answer = urllib3.request("GET", address, timeout=SECONDS, retries=urllib3.Retry(3, connect=0, read=0))
        commit = str(answer.json().get("sha"))
        return commit if len(commit) == len(NO_COMMIT) and commit.isalnum() else None
    return None
