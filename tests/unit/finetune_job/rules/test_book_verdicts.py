"""Manifests with their verdicts next to them: for each rule one that it finds and a neighbour that it leaves alone."""

from typing import Any

import pytest
import yaml

from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec, GpuResource, JobLimits, PublishSettings
from finetune_job.finding import FieldChange, Finding
from finetune_job.rules.book import RULES
from finetune_job.rules.rule import changes_text, yaml_text
from tests.support.cases import table
from tests.unit.finetune_job.rules.manifests import PLAIN, applied, judged, manifest

CPU = FineTuneProfileSpec(trainer_image="trainer@sha256:0")
GPU = FineTuneProfileSpec(trainer_image="trainer@sha256:0", gpu=GpuResource())
LIMITED = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    gpu=GpuResource(),
    limits=JobLimits(nodes=2, gpus=8, storage="100Gi", active_deadline_seconds=3600, max_restarts=1),
)
REHEARSING = FineTuneProfileSpec(trainer_image="trainer@sha256:0", require_rehearsal=True)
TRUSTING = FineTuneProfileSpec(trainer_image="trainer@sha256:0", allow_remote_code=True)
OPEN = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    fetch=FetchSettings(allowed_sources=["hf://", "s3://"]),
    publish=PublishSettings(allowed_destinations=["hf://", "s3://", "oci://"]),
)
CLOSED = FineTuneProfileSpec(trainer_image="trainer@sha256:0")
FENCED = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    fetch=FetchSettings(allowed_sources=["hf://our-org", "hf://datasets/our-org/set/", "s3://ours/a"]),
)
ONE_REPOSITORY = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0", publish=PublishSettings(allowed_destinations=["hf://our-org/tuned"])
)
NO_WAY_OUT = FineTuneProfileSpec(trainer_image="trainer@sha256:0", publish=PublishSettings(allowed_destinations=[]))
GATED = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    publish=PublishSettings(
        allowed_destinations=["hf://our-org", "oci://registry.test:5000/team", "oci://other/a/b:v1", "s3://ours/a"]
    ),
)
IN_CLEAR = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    publish=PublishSettings(
        hub_endpoint="http://hub.test",
        plain_http_registries=["registry.test:5000"],
        allowed_destinations=["hf://", "s3://", "oci://"],
    ),
)
TWO_STORES = OPEN.model_copy(
    update={"publish": PublishSettings(s3_endpoint="https://store.test", allowed_destinations=["s3://"])}
)
TWO_HUBS = OPEN.model_copy(update={"publish": PublishSettings(hub_endpoint="https://hub.test", allowed_destinations=["hf://"])})
WITHIN = {"run.activeDeadlineSeconds": 3600, "run.maxRestarts": 1, "training.globalBatchSize": 720}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_MODEL = {"model.source": "hf://our-org/llama", "model.revision": COMMIT}
BUCKET_DATA = {"data.source": "s3://ours/a/train.jsonl"}


def hub_sets(*sources: str, **more: str) -> dict[str, Any]:
    return {"data.source": None, "data.datasets": [{"source": source, **more} for source in sources]}


F = "parallelism.fsdp."
SETS = hub_sets("pvc://data/a.jsonl", "pvc://data/b")
TWO = {"parallelism.processesPerNode": 2}
UNPARTED = {F + "peftWrapPolicy": False}
V1, V2 = TWO | {F + "version": 1}, TWO | {F + "version": 2}
LOHA, ALONE = {"method.type": "LoHa", "merge.enabled": False}, {"merge.enabled": False}
ORDERED = {"training.reduction": "Ordered"}
MIN_NODES = "parallelism.elastic.minNodes"
ELASTIC = {"parallelism.nodes": 2, MIN_NODES: 1}
DORA, QLORA, FULL = {"method.type": "DoRA"}, {"method.type": "QLoRA"}, {"method.type": "Full"}
SGD = {"training.optimizer": "SGD"}
RATE = "training.learningRate"
EPOCHS = {"training.maxSteps": None, "training.epochs": 1}
HELD_OUT = {"data.validation.source": "pvc://data/held-out.jsonl"}
STOPPING = {"evaluation.earlyStopping.patience": 2}
BF16 = {"model.dtype": "bfloat16"}
NORM, AS_BASE = {"method.lora.modulesToSave": ["norm"]}, {"method.lora.autocastAdapterDtype": False}

TOKENS = {"method.lora.trainableTokenIndices": [3]}
EXPERTS = {"method.lora.targetParameters": ["mlp.experts.down_proj"]}


def settings(method: str, **written: Any) -> dict[str, Any]:
    return {"method.type": method, "method.settings": written}


def lora(**written: Any) -> dict[str, Any]:
    return {"method.lora": written}


TO_HUB, TO_REGISTRY = {"output.destination": "hf://our-org/tuned"}, {"output.destination": "oci://registry.test:5000/team/a/b:v1"}
WRITER = {"output.secretRef.name": "writer"}

PROFILES = {
    None: None,
    "CLOSED": CLOSED,
    "CPU": CPU,
    "FENCED": FENCED,
    "GATED": GATED,
    "IN_CLEAR": IN_CLEAR,
    "LIMITED": LIMITED,
    "NO_WAY_OUT": NO_WAY_OUT,
    "ONE_REPOSITORY": ONE_REPOSITORY,
    "REHEARSING": REHEARSING,
}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], FineTuneProfileSpec | None]] = [
    (rule, bad, good, PROFILES[profile]) for rule, bad, good, profile in table(__file__, "CASES")
]


def ids(spec: dict[str, Any], profile: FineTuneProfileSpec | None) -> set[str]:
    return {finding.rule for finding in judged(spec, profile)}


@pytest.mark.parametrize(("rule", "bad", "good", "profile"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)])
def test_the_rule_finds_one_and_leaves_its_neighbour(rule, bad, good, profile):
    assert rule in ids(manifest(bad), profile)
    assert rule not in ids(manifest(good), profile)


@pytest.mark.parametrize(("rule", "bad", "good", "profile"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)])
def test_the_fix_clears_the_finding_and_brings_no_new_error(rule, bad, good, profile):
    before = judged(manifest(bad), profile)
    finding = next(finding for finding in before if finding.rule == rule)
    assert finding.changes
    after = judged(applied(manifest(bad), finding.changes), profile)
    assert rule not in {each.rule for each in after}
    known = {each.rule for each in before}
    assert not [each for each in after if each.severity == "error" and each.rule not in known]


def test_every_rule_has_a_case():
    assert {case[0] for case in CASES} == {rule.id for rule in RULES}


def test_a_finding_names_field_value_reason_and_fix():
    for rule, bad, _, profile in CASES:
        finding = next(finding for finding in judged(manifest(bad), profile) if finding.rule == rule)
        book = next(each for each in RULES if each.id == rule)
        assert finding.field in book.reads
        assert finding.severity == book.severity
        assert finding.value
        assert finding.message
        assert finding.fix


def test_the_plain_manifest_is_accepted_without_a_word():
    for profile in (None, CPU, GPU, TRUSTING):
        for method in ("LoRA", "QLoRA", "DoRA", "Full"):
            for version in (1, 2):
                assert not judged(
                    applied(PLAIN, []) | {"method": {"type": method}, "parallelism": {"fsdp": {"version": version}}}, profile
                )


def test_profiles_that_allow_are_respected():
    assert not judged(manifest(HUB_MODEL | BUCKET_DATA), OPEN)
    assert not judged(manifest(HUB_MODEL | BUCKET_DATA), FENCED)
    assert not judged(manifest(HUB_MODEL | BUCKET_DATA), None)
    assert not judged(manifest({}), CLOSED)
    assert not judged(manifest({}), NO_WAY_OUT)
    for destination in (TO_HUB, TO_REGISTRY, {"output.destination": "s3://ours/a"}):
        assert not judged(manifest(destination | WRITER), GATED)
    assert not judged(manifest(TO_HUB), IN_CLEAR)
    assert not judged(manifest(TO_HUB), None)
    assert not judged(manifest(BUCKET_DATA | {"output.destination": "s3://ours/a"}), TWO_STORES)
    assert not judged(manifest(HUB_MODEL | {"output.destination": "hf://our-org/llama"}), TWO_HUBS)
    assert not judged(manifest({"model.allowRemoteCode": True}), TRUSTING)
    assert not judged(manifest({"model.allowRemoteCode": True}), None)
    assert not judged(manifest({F + "offloadParams": True}), GPU)


def test_copies_of_sources_have_places_of_their_own():
    """Held-out records at the place of those that are trained on would be the same; a key may have letters that no path has."""
    sources = (
        "s3://one/train.jsonl",
        "s3://two/train.jsonl",
        "s3://two/train.jsonl/",
        "pvc://data/train-1.jsonl",
        "s3://two/day=1",
    )
    spec = manifest(
        hub_sets(*sources) | {"data.validation.source": "hf://datasets/o/a/train.jsonl", "data.validation.revision": COMMIT}
    )
    (finding,) = judged(spec, CLOSED)
    data = applied(spec, finding.changes)["data"]
    places = ("train.jsonl", "train-2.jsonl", "train-2.jsonl", "train-1.jsonl", "day-1")
    assert [dataset["source"] for dataset in data["datasets"]] == [f"pvc://data/{place}" for place in places]
    assert data["validation"] == {"source": "pvc://data/train-3.jsonl"}
    assert not judged(applied(spec, finding.changes), CLOSED)


def found(changes: dict[str, Any], rule: str) -> Finding:
    return next(finding for finding in judged(manifest(changes)) if finding.rule == rule)


def test_a_finding_names_what_is_written_and_all_that_its_changes_change():
    float16 = V1 | {"model.dtype": "float16", F + "peftWrapPolicy": False}
    assert found(float16, "float16-adapter").field == f"spec.{F}peftWrapPolicy"
    assert found(float16 | AS_BASE, "float16-adapter").field == "spec.method.lora.autocastAdapterDtype"
    wrong = EXPERTS | DORA | {"method.lora.loraDropout": "0.1", "method.lora.initLoraWeights": "orthogonal"}
    conflict = found(wrong, "target-parameters-conflict")
    for change in conflict.changes:
        assert change.field.removeprefix("spec.") in conflict.fix
    assert found(settings("LoHa", r="8"), "method-setting-type").value == 'r: "8"'


def test_lora_with_a_quantised_base_is_meant_as_qlora():
    """Dropping the quantisation would need four times the memory; of other methods nobody knows which half was meant."""
    written = {"method.quantization": {"bits": 8, "quantType": "fp4"}}
    (finding,) = judged(manifest(TWO | written))
    method = applied(manifest(TWO | written), finding.changes)["method"]
    assert (method["type"], method["quantization"]) == ("QLoRA", {"bits": 4, "quantType": "fp4"})
    (finding,) = judged(manifest(TWO | DORA | written))
    method = applied(manifest(TWO | DORA | written), finding.changes)["method"]
    assert (method["type"], method["quantization"]) == ("QDoRA", {"bits": 4, "quantType": "fp4"})
    other = {"method.type": "LoHa", **written}
    (finding,) = judged(manifest(other))
    assert applied(manifest(other), finding.changes)["method"] == {"type": "LoHa"}


def test_qdora_has_the_rules_of_qlora_and_of_dora():
    """One rank, too: PEFT loses the scales of 8 bits when it takes norms."""
    packed = {"method.type": "QDoRA"}
    alone = packed | ALONE
    assert judged(manifest(alone | {"method.quantization": {"quantType": "fp4"}, "merge.base": "Dequantized"})) == ()
    for wrong, rule in (
        (alone | {"method.quantization": {"bits": 8}}, "quantization-bits"),
        (TWO | packed | {"method.quantization": {"bits": 8}}, "quantization-bits"),
        (V1 | packed | {"method.quantization": {"quantStorage": "uint8"}}, "fsdp1-qlora-integer-storage"),
        (V1 | packed | {F + "useOrigParams": True, F + "peftWrapPolicy": True}, "fsdp1-dora-orig-params"),
        (packed | {"method.lora": {"targetParameters": ["mlp.experts.down_proj"]}}, "target-parameters-conflict"),
    ):
        found = [each for each in judged(manifest(wrong)) if each.severity == "error"]
        assert [each.rule for each in found] == [rule]
        fixed = applied(manifest(wrong), found[0].changes)["method"]["type"]
        assert fixed == ("QLoRA" if rule == "target-parameters-conflict" else "QDoRA")


def test_a_text_of_modules_to_save_is_mended_to_a_list():
    """PEFT's LNTuning declares a text and looks for each of its letters; as a list it is what was meant."""
    spec = manifest(settings("LNTuning", modulesToSave="lm_head"))
    (finding,) = judged(spec)
    assert finding.rule == "method-setting-range"
    assert applied(spec, finding.changes)["method"]["settings"] == {"modulesToSave": ["lm_head"]}
    assert not judged(applied(spec, finding.changes))


@pytest.mark.parametrize("text", ["--5", "-", "9" * 4000, "\u0663", "1_0", " 5"])
def test_a_text_that_is_no_whole_number_is_not_taken_for_one(text):
    """`int` raises for some of these, which would end the pass, and reads others as nobody meant them."""
    spec = manifest(settings("LoHa", r=text))
    (finding,) = judged(spec)
    assert finding.rule == "method-setting-type"
    assert applied(spec, finding.changes)["method"]["settings"] == {}


def test_changes_are_told_as_a_manifest_writes_them():
    values = {"a": "1", "b": "2e-4", "c": "true", "d": COMMIT, "e": "LoRA", "f": 1, "g": ["1", 2], "h": {"k": None}, "i": None}
    told = changes_text(FieldChange(field=name, value=value) for name, value in values.items())
    assert told == f'a: "1", b: "2e-4", c: "true", d: "{COMMIT}", e: LoRA, f: 1, g: ["1", 2], h: {{k: null}}, i removed'


@pytest.mark.parametrize("text", ["1", "-2.5e-4", "0x1F", "12:30:45", "2024-01-01", "1_000", ".inf", "-.5", "Off", "~", ""])
def test_a_text_that_yaml_would_read_as_something_else_has_quotes(text):
    assert yaml_text(text) == f'"{text}"'
    assert yaml.safe_load(yaml_text(text)) == text


@pytest.mark.parametrize("text", ["LoRA", "100Gi", "8h", "pvc://models/base", "q_proj", "1.5 hours"])
def test_another_text_has_none(text):
    assert yaml_text(text) == text
    assert yaml.safe_load(text) == text


def test_errors_come_first():
    found = judged(manifest({F + "useOrigParams": True, "training.epochs": 1, F + "transformerLayerClsToWrap": []}))
    assert [finding.severity for finding in found] == ["error", "error", "warning"]


def test_every_finding_is_reported():
    found = judged(
        manifest(V1 | DORA | {F + "transformerLayerClsToWrap": [""], F + "useOrigParams": True, F + "peftWrapPolicy": True})
    )
    assert {finding.rule for finding in found} == {"wrap-class-name-blank", "fsdp1-dora-orig-params"}
