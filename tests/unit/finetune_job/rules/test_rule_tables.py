"""Ranges: what a row refuses, and the condition that it makes for the API server."""

import pytest

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.rules.cel import CONDITIONS
from finetune_job.rules.rule_tables import Bounds, spec_field
from tests.support.cases import table
from tests.unit.finetune_job.rules.manifests import PLAIN, judged, manifest

FIELDS = table(__file__, "FIELDS")


def found(path: str, written: str) -> set[str]:
    return {finding.rule for finding in judged(manifest({path: written}))}


@pytest.mark.parametrize("path", FIELDS)
def test_a_range_refuses_what_is_beyond_it_and_nothing_else(path: str) -> None:
    rule, _, within, beyond = FIELDS[path]
    assert [written for written in within if rule in found(path, written)] == []
    assert [written for written in beyond if rule not in found(path, written)] == []


@pytest.mark.parametrize("path", FIELDS)
def test_the_api_server_judges_the_same_bounds(path: str) -> None:
    rule, comparison, _, _ = FIELDS[path]
    name = path.rpartition(".")[2]
    conditions = [each for each in CONDITIONS if f"{each.at}.{each.field}" == path and each.rule == rule]
    (condition,) = conditions
    assert f"!has(self.{condition.field}) || " in condition.holds
    assert condition.holds.endswith(f"double(self.{condition.field}) {comparison}")
    assert condition.says.startswith(f"{name} must be ")


def test_settings_of_lora_count_for_the_methods_that_take_them() -> None:
    conditions = [each for each in CONDITIONS if each.rule in ("lora-dropout-range", "lora-plus-ratio-range")]
    assert len(conditions) == 2
    for condition in conditions:
        assert condition.holds.startswith("!has(self.lora) || !(self.type in ['LoRA', 'QLoRA', 'DoRA', 'QDoRA']) || ")


def test_bounds_on_both_sides() -> None:
    bounds = Bounds(((">", 0.0), ("<=", 100.0)))
    assert [bounds.hold(written) for written in ("0", "1e-99", "100", "100.1")] == [False, True, True, False]
    assert bounds.cel("self.weight") == "double(self.weight) > 0.0 && double(self.weight) <= 100.0"
    assert str(bounds) == "more than 0 and at most 100"


def test_a_field_is_found_by_its_path() -> None:
    spec = manifest({"training.maxSteps": 7})
    assert spec_field("training.maxSteps").read(FineTuneJobSpec.model_validate(spec)) == 7
    assert spec_field("method.lora.loraDropout").read(FineTuneJobSpec.model_validate(PLAIN)) is None
    assert spec_field("output.adapter").default is True
    for path in ("training.maxStep", "training.maxSteps.more", "method.lora.lora_dropout", ""):
        with pytest.raises(LookupError, match="no field"):
            spec_field(path)
