"""Thresholds of the verification that rounding alone would break."""

from finetune_job.failures import Outcome
from finetune_trainer.roles.preflight import run


def test_thresholds_below_what_rounding_does_are_a_warning(context):
    result = run(context({"merge.verify": {"maxKlDivergence": "1e-18", "minTop1Agreement": "1"}}))
    assert result.outcome is Outcome.SUCCEEDED
    assert [(finding.rule, finding.severity, finding.field) for finding in result.findings] == [
        ("verification-within-rounding", "warning", "spec.merge.verify.maxKlDivergence"),
        ("verification-within-rounding", "warning", "spec.merge.verify.minTop1Agreement"),
    ]


def test_thresholds_that_a_right_merge_keeps_are_accepted(context):
    assert run(context({"merge.verify": {"maxKlDivergence": "0.1", "minTop1Agreement": "0.5"}})).findings == []
