"""Each way in which an id could pass the catalogue's test unseen is followed, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.finetune_job.catalogue.sources import Source, collect, findings_made_by_hand, parsed


def modules(**sources: str) -> dict[str, Source]:
    """Modules of one folder by name."""
    return {name: parsed(Path(f"package/{name}.py"), text) for name, text in sources.items()}


@pytest.mark.parametrize(
    "source",
    [
        'make_finding("one-id", field="f")',
        'book.make_finding("one-id")',
        'make_finding(identifier="one-id")',
        'NAME: Final = "one-id"\nmake_finding(NAME)',
        'if (name := "one-id"):\n    make_finding(name)',
        'async def found(name):\n    return make_finding(name)\nasync def all():\n    await found("one-id")',
        'def found(*, name):\n    return make_finding(name)\nfound(name="one-id")',
        'class Checks:\n    def _found(self, name):\n        return make_finding(name)\nChecks()._found("one-id")',
        'class Row:\n    rule: str\ndef found(row):\n    return make_finding(row.rule)\nRow("one-id")',
    ],
)
def test_an_id_is_followed(source: str) -> None:
    assert set(collect(modules(checks=source))) == {"one-id"}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('NAME = "one-id"\nNAME = "another-id"\nmake_finding(NAME)', "NAME has several values"),
        ('from book import make_finding as make\nmake("one-id")', "imported under another name"),
        ('partial(make_finding, "one-id")()', "make_finding is not called here"),
        ('make = book.make_finding\nmake("one-id")', "make_finding is not called here"),
        ("def found(name):\n    return make_finding(name)\nmap(found, ['one-id'])", "found is not called here"),
        ("make_finding('-'.join(words))", "write the id as a text"),
        (
            "class Row:\n    rule: str\nclass Other:\n    rule: str\ndef found(row):\n    make_finding(row.rule)\nfound(x)",
            r"classes next to it with a field rule: \['Row', 'Other'\]",
        ),
    ],
)
def test_an_id_that_cannot_be_followed_is_refused(source: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        collect(modules(checks=source))


@pytest.mark.parametrize(
    "source",
    [
        'Finding(rule="one-id")',
        'finding.Finding(rule="one-id")',
        "from finding import Finding as Found",
        'found.model_copy(update={"rule": "one-id"})',
        'Finding.model_validate({"rule": "one-id"})',
        'Finding.model_construct(rule="one-id")',
    ],
)
def test_a_finding_made_by_hand_is_seen(source: str) -> None:
    assert findings_made_by_hand(modules(checks=source)) == ["package/checks.py:1"]


def test_what_a_child_process_has_found_may_be_read() -> None:
    assert findings_made_by_hand(modules(look="from finding import Finding\nFinding.model_validate(told)")) == []
