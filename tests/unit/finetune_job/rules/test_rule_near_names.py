"""The names of unknown settings are compared with the known ones once for all rules: it is the slowest thing that rules do."""

from typing import Any

import pytest

from finetune_job.rules import rule
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from tests.support.builders import a_job


def test_wrong_settings_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    peft_fields = rule.peft_fields

    def counted(*asked: Any) -> Any:
        calls.append(asked)
        return peft_fields(*asked)

    monkeypatch.setattr(rule, "peft_fields", counted)
    job = a_job().spec("method", {"type": "OFT", "settings": {"targetModule": "x"}})
    findings = evaluate(RuleContext(job.parse().spec, job.profile))
    assert "method-setting-unknown" in {finding.rule for finding in findings}
    assert len(calls) == 1
