"""The table of failures: kept as JSON in bench/results, and from there in docs/how-to/results.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.e2e.failures.case import Case, Outcome

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "bench/results/failures.json"
PAGE = ROOT / "docs/how-to/results.md"
_BEGIN = "<!-- The table below is written by `python -m tests.e2e.failures`. -->"
_END = "<!-- End of the table. -->"
_HEAD = ("case", "what happens", "failed attempts: class", "counted", "status says", "final state", "next trained step")


def recorded() -> dict[str, Outcome]:
    """Outcomes of the latest runs, by case."""
    if not RECORD.exists():
        return {}
    return {name: Outcome.from_record(one) for name, one in json.loads(RECORD.read_text()).items()}


def record(outcomes: Mapping[str, Outcome], cases: Sequence[Case]) -> None:
    """Keep outcomes next to those of earlier runs, and write the table again."""
    known = {**recorded(), **outcomes}
    kept = {case.name: known[case.name] for case in cases if case.name in known}
    RECORD.write_text(json.dumps({name: asdict(one) for name, one in kept.items()}, indent=2) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), table(kept, cases)))


def with_table(page: str, text: str) -> str:
    """The page with its table replaced.

    Raises:
        ValueError: the page has no place for it.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"no place for the table: the page needs the lines {_BEGIN!r} and {_END!r}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def table(outcomes: Mapping[str, Outcome], cases: Sequence[Case]) -> str:
    """The table in Markdown, in the order of the cases."""
    rows = [_HEAD, ("---",) * len(_HEAD), *(_row(case, outcomes[case.name]) for case in cases if case.name in outcomes)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(case: Case, outcome: Outcome) -> tuple[str, ...]:
    seconds = "none" if outcome.seconds is None else f"{outcome.seconds:.0f} s" + (" after the fix" if case.fixed else "")
    said = f"{outcome.says} after {outcome.seconds_until_said:.0f} s" if outcome.seconds_until_said is not None else ""
    return (
        case.name,
        case.what,
        ", ".join(one.failure for one in outcome.failures) or "none",
        ", ".join("yes" if one.counted else "no" for one in outcome.failures),
        said,
        outcome.final,
        seconds,
    )
