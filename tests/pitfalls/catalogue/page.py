"""The page docs/reference/pitfalls.md from the entries."""

from collections import Counter
from importlib.metadata import version
from pathlib import PurePosixPath

from finetune_job.rules.book import rule_by_id
from tests.pitfalls.catalogue.entry import Avoided, Changed, Entry, NotApplicable, NotReproduced, Refused, Reproduced, entries

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "trl", "bitsandbytes")
_HEAD = """# Pitfalls and decisions

Documented ways in which settings of PEFT, FSDP, quantisation, checkpointing, tokenisation and merging fail late or silently, and
what this product does about each. Generated with `python -m tests.pitfalls.catalogue > docs/reference/pitfalls.md`; the rules
themselves are in [rules.md](rules.md).

What the libraries do was observed on {versions}, on CPU ranks with gloo.

| decision | entries | meaning |
|---|---|---|
| refused | {refused} | a rule, preflight or the schema refuses the job and names the fix |
| warned | {warned} | accepted; a rule says what happens, here or with other trainers |
| avoided | {avoided} | accepted, and harmless here; the named tests show it |
| not applicable | {absent} | no job can come to it |

| evidence | entries | meaning |
|---|---|---|
| reproduced | {reproduced} | the named tests show the libraries doing what was reported |
| changed | {changed} | the named tests show the libraries doing something else by now |
| not run | {not_run} | needs a GPU, another version, or a path that this product does not have; the reason is given |
"""


def decision(entry: Entry) -> str:
    """refused, warned, avoided or not applicable."""
    match entry.decision:
        case Refused(rules=rules, preflight=preflight, schema=schema):
            severities = {rule.severity for name in rules if (rule := rule_by_id(name)) is not None}
            return "refused" if preflight or schema or "error" in severities else "warned"
        case Avoided():
            return "avoided"
        case NotApplicable():
            return "not applicable"


def page() -> str:
    """The whole page."""
    table = entries()
    decided = Counter(decision(entry) for entry in table)
    observed = Counter(entry.evidence.kind for entry in table)
    head = _HEAD.format(
        versions=", ".join(f"{library} {version(library)}" for library in LIBRARIES),
        refused=decided["refused"],
        warned=decided["warned"],
        avoided=decided["avoided"],
        absent=decided["not applicable"],
        reproduced=observed["reproduced"],
        changed=observed["changed"],
        not_run=observed["not-run"],
    )
    lines = [
        head,
        "| # | pitfall | decision | shows as | settings | what the libraries do | evidence | sources |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(entry) for entry in table)]) + "\n"


def _row(entry: Entry) -> str:
    cells = (
        str(entry.number),
        entry.name,
        f"**{decision(entry)}**: {_decision(entry)}",
        entry.severity,
        entry.trigger,
        entry.result,
        _evidence(entry),
        "; ".join(entry.sources) or "measured",
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _evidence(entry: Entry) -> str:
    match entry.evidence:
        case Reproduced(tests=tests):
            return f"reproduced: {_tests(tests)}"
        case Changed(now=now, tests=tests):
            return f"changed: {now.rstrip('.')} ({_tests(tests)})"
        case NotReproduced(reason=reason):
            return f"not run: {reason}"


def _decision(entry: Entry) -> str:
    match entry.decision:
        case Refused(rules=rules, preflight=preflight, schema=schema, tests=tests):
            parts = [f"[{name}](rules.md#{name})" for name in rules]
            parts += [f"preflight's `{name}`" for name in preflight]
            parts += [f"the schema: {schema}"] if schema else []
            parts += [_tests(tests)] if tests else []
            return "; ".join(parts)
        case Avoided(how=how, tests=tests):
            return f"{how.rstrip('.')} ({_tests(tests)})"
        case NotApplicable(reason=reason):
            return reason


def _tests(tests: tuple[str, ...]) -> str:
    """Links, because whole names would make the table three screens wide."""
    return ", ".join(_link(*test.split("::", 1)) for test in tests)


def _link(file: str, *function: str) -> str:
    title = f' "{function[0]}"' if function else ""
    return f"[{PurePosixPath(file).stem}](../../{file}{title})"
