"""Regular expressions of manifests are compiled here, in a process with bounds, and nowhere before."""

import pytest

from finetune_job.failures import FailureClass, Outcome
from finetune_trainer.preflight import job_steps
from finetune_trainer.preflight.expressions import uncompiled_expressions
from finetune_trainer.processes import sandbox
from finetune_trainer.roles import preflight
from finetune_trainer.roles.preflight import run

HOSTILE = "(?i:" + "[\u0080-\uffff]" * 55 + ")"
"""330 characters, within every bound; together such keys take a minute."""
HOSTILE_KEYS = {f"{HOSTILE}{number}": 4 for number in range(60)}


@pytest.mark.parametrize(
    ("method", "rule", "field"),
    [
        ({"type": "LoRA", "lora": {"rankPattern": {"[z-a]": 4}}}, "adapter-pattern-malformed", "spec.method.lora.rankPattern"),
        ({"type": "LoHa", "settings": {"alphaPattern": {"[z-a]": 4}}}, "adapter-pattern-malformed", "spec.method.settings"),
        ({"type": "LoHa", "settings": {"targetModules": "a{2,1}"}}, "module-expression-malformed", "spec.method.settings"),
        ({"type": "LoHa", "settings": {"excludeModules": "x{99999999999}"}},
         "module-expression-malformed", "spec.method.settings"),
    ],
)  # fmt: skip
def test_what_does_not_compile_is_refused_by_the_rules_id_and_the_model_is_left_alone(context, monkeypatch, method, rule, field):
    monkeypatch.setattr(preflight, "check_model", None)
    monkeypatch.setattr(job_steps, "start_check", None)
    monkeypatch.setattr(job_steps, "torch_is_here", lambda: False)
    result = run(context({"method": method}))
    assert result.outcome is Outcome.REFUSED
    assert result.failure is FailureClass.USER_CONFIG
    assert [(finding.rule, finding.field) for finding in result.findings] == [(rule, field)]


def test_what_compiles_is_not_spoken_of(context):
    for method in (
        {"type": "LoRA", "lora": {"rankPattern": {r"layers\.\d+\.q_proj": 4}}},
        {"type": "LoHa", "settings": {"targetModules": r".*\.q_proj"}},
        {"type": "Full"},
    ):
        assert uncompiled_expressions(context({"method": method}).plan.method) == []


def test_what_takes_too_long_to_compile_is_a_finding(context, monkeypatch):
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 1)
    (finding,) = uncompiled_expressions(context({"method": {"type": "LoRA", "lora": {"rankPattern": HOSTILE_KEYS}}}).plan.method)
    assert (finding.rule, finding.field) == ("adapter-pattern-malformed", "spec.method.lora.rankPattern")
    assert "takes more than 1 s of CPU time" in finding.message
    assert "simpler expressions" in finding.fix
