"""The book as a whole: evidence that exists, fields that exist, and fixes that always lead to an accepted job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec, PublishSettings
from finetune_job.rules.book import RULES, Rule, read_rules, rule_by_id
from finetune_job.rules.rule import CHECKS
from finetune_job.rules.versions import FSDP_FIELDS
from tests.support.examples import examples
from tests.unit.finetune_job.rules.manifests import applied, judged, manifest
from tools.pages.rules import page

ROOT = Path(__file__).parents[4]


def test_ids_are_unique_and_found():
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(rule_by_id(rule.id) is rule for rule in RULES)
    assert rule_by_id("no-such-rule") is None


def test_every_topic_is_one_module_of_the_book():
    topics = (
        *("wrapping", "dtypes", "quantization", "method_configuration", "experts"),
        *(
            "tokens",
            "data",
            "optimizer",
            "launch",
            "elastic",
            "versions",
            "merging",
            "evaluation",
            "outputs",
            "workspace",
            "sources",
        ),
    )
    assert tuple(dict.fromkeys(rule.topic for rule in RULES)) == topics


ROW = {"title": "t", "reads": ["training.epochs"], "test": "tests/pitfalls/test_x.py::test_y", "observed": "an error"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"titel": "t"}, "Extra inputs are not permitted"),
        ({"title": None}, "title"),
        ({"severity": "notice"}, "severity"),
        ({"observed": ""}, "either test and observed, or not_reproduced"),
        ({"not_reproduced": "no GPU"}, "either test and observed, or not_reproduced"),
        ({"range": {"within": {"!=": 1.0}, "write": "1"}}, "a bound is one of"),
        ({"range": {"within": {"<": 1.0}, "write": "1"}}, "either a function with its id, or a range"),
    ],
)
def test_a_row_that_is_not_complete_is_refused(change: dict[str, Any], problem: str):
    Rule(id="a", topic="data", check=lambda _: None, **ROW)
    with pytest.raises(ValueError, match=problem):
        Rule(id="a", topic="data", check=lambda _: None, **(ROW | change))


def test_a_function_without_a_row_and_a_row_without_a_function_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CHECKS, "no-such-row", lambda _: None)
    with pytest.raises(ValueError, match="no row describes no-such-row"):
        list(read_rules())
    monkeypatch.delitem(CHECKS, "no-such-row")
    monkeypatch.delitem(CHECKS, "merge-while-sharded")
    with pytest.raises(ValueError, match="merge-while-sharded: a rule has either a function"):
        list(read_rules())


def test_fields_that_rules_read_exist():
    schema = FineTuneJobSpec.model_json_schema(by_alias=True)

    def exists(path: str) -> bool:
        place: dict[str, Any] = schema
        for part in path.removeprefix("spec.").split("."):
            options = [place, *place.get("anyOf", [])]
            options = [schema["$defs"][each["$ref"].rsplit("/", 1)[-1]] if "$ref" in each else each for each in options]
            place = next((each["properties"][part] for each in options if part in each.get("properties", {})), {})
            if not place:
                return False
        return True

    assert [field for rule in RULES for field in rule.reads if not exists(field)] == []


def test_the_table_of_fsdp_fields_matches_the_models_fields():
    for row in FSDP_FIELDS:
        field = FineTuneJobSpec.model_fields["parallelism"].default.fsdp.__class__.model_fields[row.attribute]
        assert field.alias == row.name


def test_the_page_is_generated_from_these_rules():
    assert (ROOT / "docs/reference/rules.md").read_text() == page(), "run: make generate"
    for rule in RULES:
        assert f"### {rule.id}\n" in page()


def optional(path: str, *values: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(st.just({}), st.sampled_from(values).map(lambda value: {path: value}))


F = "parallelism.fsdp."
DTYPES = ("bfloat16", "float16", "float32")
SETTINGS = [
    optional("method.type", "LoRA", "QLoRA", "DoRA", "Full", "LoHa", "VeRA", "XLoRA", "OFT", "TrainableTokens"),
    optional(
        "method.settings",
        *(
            {},
            {"r": 8},
            {"r": 0, "R": 4, "alpha": "8"},
            {"moduleDropout": "0.5", "layersPattern": "h"},
            {"targetModules": ["q", ""]},
        ),
        *({"layersToTransform": [0], "layersPattern": "h"}, {"rankPattern": {"(": 4, "q": 0}}, {"targetModules": "("}),
    ),
    optional("method.lora.trainableTokenIndices", [3], [3, 3]),
    optional("method.lora.targetParameters", ["experts.down_proj"]),
    optional("method.lora.excludeModules", ["q"], ["v "]),
    optional("method.lora.initLoraWeights", "orthogonal", "pissa", "loftq"),
    optional("method.lora.layersToTransform", [0]),
    optional("method.lora.loraPlusRatio", "0.5", "16"),
    optional("merge.enabled", False),
    optional("method.lora.loraDropout", "0", "0.5", "1", "7"),
    optional("method.lora.bias", "none", "all"),
    optional("method.lora.targetModules", ["all-linear"], ["all-linear", "q"], [], ["q "], ["q", "lm_head"], ["lm_head"], [","]),
    optional("method.lora.modulesToSave", [], ["lm_head"], [""], ["lm_head", " q"]),
    optional("method.lora.rankPattern", {"(": 3}, {"q": 3}),
    optional("method.lora.alphaPattern", {"": 3}, {"q": 3}),
    optional("method.lora.useRslora", True),
    optional("method.lora.loraAlpha", 1, 16, 65536),
    optional("method.lora.r", 1, 4, 5, 4096),
    optional("method.lora.autocastAdapterDtype", True, False),
    optional("method.quantization.bits", 4, 5, 8),
    optional("method.quantization.quantStorage", "uint8", *DTYPES),
    optional("method.quantization.computeDtype", *DTYPES),
    optional("model.dtype", *DTYPES),
    optional("model.allowRemoteCode", True),
    optional("training.epochs", 1),
    optional("training.maxSteps", None, 5),
    optional("training.globalBatchSize", 1, 7, 64, 999_983, 1_000_000),
    optional("training.microBatchSize", 1, 3, 8, 65_536),
    optional("training.precision", "bf16", "fp32"),
    optional("training.activationCheckpointing", "Full"),
    optional("training.warmupRatio", "0", "1"),
    optional("training.learningRate", "0", "1e-4"),
    optional("parallelism.nodes", 1, 3, 4096),
    optional("parallelism.processesPerNode", 1, 2, 7, 64),
    optional(F + "version", 1, 2),
    optional(F + "autoWrapPolicy", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    optional(F + "transformerLayerClsToWrap", [], [""], ["A, B"], ["A", ""], ["a.b.C"], ["..."], ["A"]),
    optional(F + "minNumParams", 10),
    optional(F + "peftWrapPolicy", True, False),
    optional(F + "useOrigParams", True, False),
    optional(F + "syncModuleStates", True, False),
    optional(F + "reshardAfterForward", True, False),
    optional(F + "stateDictType", "FULL_STATE_DICT", "LOCAL_STATE_DICT"),
    optional(F + "offloadParams", True),
    optional(F + "activationCheckpointing", True),
    optional(F + "mixedPrecision.paramDtype", *DTYPES),
    optional("workspace.claimName", None, "w"),
    optional("workspace.volumeClaimTemplate", {"storage": "1Gi"}),
    optional("workspace.retain", "Delete"),
    optional(
        "output.destination",
        *("pvc://models/base", "pvc://models/base/x", "pvc://data/train.jsonl/x", "pvc://w"),
        *("hf://org/model", "hf://ORG/Model", "hf://other/model", "oci://registry/a/b:v1", "oci://registry/a/b"),
        *("s3://models/llama", "s3://models", "s3://sets/x", "s3://sets/train.jsonl/finetune-output"),
    ),
    optional("output.adapter", False),
    optional("output.secretRef", {"name": "writer"}),
    optional("output.private", True, False),
    optional("merge.dtype", "float16"),
    optional("merge.base", "Quantized", "Trained"),
    optional("merge.verify.minTop1Agreement", "2"),
    optional("training.scheduler", "Constant", "WarmupStableDecay"),
    optional("training.decayRatio", "0.1", "2"),
    optional("training.minLearningRateRatio", "0.1", "2"),
    optional("evaluation.everySteps", 3),
    optional("evaluation.earlyStopping", {"patience": 2}),
    optional("evaluation.loadBestModelAtEnd", True),
    optional("data.validation.source", "pvc://data/held-out.jsonl", "pvc://results"),
    optional("model.source", "hf://org/model", "hf://datasets/org/set/train", "hf://org/model/sub", "s3://models/llama"),
    optional("model.revision", "0123456789abcdef0123456789abcdef01234567"),
    optional("data.source", None, "hf://org/set", "hf://datasets/org/set", "s3://sets/train.jsonl", "pvc://w", "pvc://models/"),
    optional("data.revision", "0123456789abcdef0123456789abcdef01234567"),
    optional("fetch.hubTokenSecretRef", {"name": "hub"}),
    optional("fetch.s3SecretRef", {"name": "keys"}),
    optional("data.datasets", [{"source": "pvc://data/a.csv", "weight": "0"}, {"source": "pvc://data/b", "weight": "3"}]),
    optional("data.format", "Text", "Chat"),
    optional("data.lossOn", "Completion", "Assistant"),
    optional("data.chatTemplate", "{{ messages }}"),
]
MANIFESTS = st.tuples(*SETTINGS).map(lambda parts: manifest({path: value for part in parts for path, value in part.items()}))
PROFILES = st.sampled_from(
    [
        None,
        FineTuneProfileSpec(trainer_image="trainer"),
        FineTuneProfileSpec(trainer_image="trainer", fetch=FetchSettings(allowed_sources=["hf://org"])),
        FineTuneProfileSpec(trainer_image="trainer", publish=PublishSettings(allowed_destinations=["hf://org", "s3://models/x"])),
        FineTuneProfileSpec(
            trainer_image="trainer",
            fetch=FetchSettings(s3_endpoint="http://store"),
            publish=PublishSettings(hub_endpoint="http://hub", plain_http_registries=["registry"]),
        ),
    ]
)


@settings(max_examples=examples(75, 300), deadline=None)
@given(MANIFESTS, PROFILES)
def test_the_changes_of_any_finding_clear_it_and_the_first_fix_again_and_again_ends_without_findings(spec, profile):
    found = judged(spec, profile)
    for finding in found[1:]:
        after = judged(applied(spec, finding.changes), profile)
        assert finding.rule not in {each.rule for each in after}, finding
    for _ in range(60):
        if not found:
            return
        first = found[0]
        spec = applied(spec, first.changes)
        found = judged(spec, profile)
        assert first.rule not in {each.rule for each in found}, first
    raise AssertionError(f"the fixes go in circles: {[finding.rule for finding in found]}")
