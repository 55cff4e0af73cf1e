"""The record of sweeps: what is kept of all outcomes, and the committed summary."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.sweep.methods import ATTEMPTS, ROWS, VERSIONS, case_of

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ROOT / "build" / "sweep" / "outcomes.jsonl"
"""One line for each case that was run since the sources last changed, the newest of a case last."""
SUMMARY = ROOT / "bench" / "results" / "sweep.json"
TABLE = ROOT / "bench" / "results" / "methods.json"
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")


def entries(digest: str | None) -> dict[str, dict[str, Any]]:
    """By case, the newest outcome; `digest`: only those of these sources."""
    return {entry["id"]: entry for entry in _lines() if digest in (None, entry["sources"])}


def _lines() -> Iterator[dict[str, Any]]:
    if OUTCOMES.is_file():
        for line in OUTCOMES.read_text().splitlines():
            yield json.loads(line)


def second_looks(looks: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How often a second look came to what: "false accept -> accepted" and so on."""
    first: dict[str, str] = {}
    found: Counter[str] = Counter()
    for entry in looks:
        if entry.get("look", 1) == 1:
            first[entry["id"]] = entry["kind"]
        elif entry["id"] in first:
            found[f"{first[entry['id']]} -> {entry['kind']}"] += 1
    return dict(sorted(found.items()))


def second_looks_text(first: dict[str, str], kinds: dict[str, str]) -> str:
    """The line of the summary. `first`: what cases that were run twice came to at first; `kinds`: at last."""
    otherwise = [f"{case} ({kind}, then {kinds[case]})" for case, kind in first.items() if kinds[case] != kind]
    return f"second looks {len(first)}, of which {len(otherwise)} came out otherwise" + "".join(
        f"\n    {each}" for each in otherwise
    )


def write_summary(digest: str, seeds: Iterable[int]) -> Path:
    """Counts of all distinct cases that were run with these sources."""
    found = entries(digest)
    kinds = Counter(entry["kind"] for entry in found.values())
    summary = {
        **_origin(digest),
        "seeds": sorted(set(seeds)),
        "distinct_combinations": len(found),
        "kinds": dict(sorted(kinds.items())),
        "outcomes": dict(sorted(Counter(entry["outcome"] for entry in found.values()).items())),
        "second_looks": second_looks(entry for entry in _lines() if entry["sources"] == digest),
        "refusals": dict(
            sorted(Counter(identifier for entry in found.values() for identifier in entry["refused_by"] or ()).items())
        ),
        "seconds_per_combination": round(sum(entry["seconds"] for entry in found.values()) / max(len(found), 1), 2),
    }
    return _written(SUMMARY, summary)


def write_table(digest: str) -> Path:
    """The rows of the table of methods, as they came out with these sources."""
    found = entries(digest)
    return _written(TABLE, {**_origin(digest), "methods": {row.title: _answers(row, found) for row in ROWS}})


def _origin(digest: str) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "libraries": {name: version(name) for name in LIBRARIES},
        "sources_sha256": digest,
    }


def _written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _answers(row: Any, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """By version of FSDP, the first attempt that works, or why the first one is refused."""
    answers = {}
    for number in VERSIONS:
        tried = [(attempt, case_of(row, number, attempt)) for attempt in ATTEMPTS]
        known = [(attempt, found[case.id]) for attempt, case in tried if case is not None and case.id in found]
        working = [(attempt, entry) for attempt, entry in known if entry["kind"] == "accepted"]
        if working:
            attempt, entry = working[0]
            answers[number] = {"case": entry["id"], "works": attempt.condition or "yes"}
        elif known:
            _, entry = known[0]
            answers[number] = {"case": entry["id"], "refused": entry["reason"] or entry["observed"]}
    return answers
