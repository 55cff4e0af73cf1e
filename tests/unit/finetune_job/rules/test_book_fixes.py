"""Severity, field and changes of every rule's finding, written by hand: another fix would clear the finding, too."""

from typing import Any

import pytest

from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.finding import Finding
from finetune_job.rules.book import RULES
from tests.support.cases import table
from tests.unit.finetune_job.rules.manifests import judged, manifest
from tests.unit.finetune_job.rules.test_book_verdicts import (
    ALONE,
    AS_BASE,
    BF16,
    CASES,
    CLOSED,
    DORA,
    ELASTIC,
    EPOCHS,
    EXPERTS,
    FULL,
    HELD_OUT,
    LIMITED,
    LOHA,
    NORM,
    ONE_REPOSITORY,
    OPEN,
    ORDERED,
    QLORA,
    SETS,
    SGD,
    STOPPING,
    TOKENS,
    UNPARTED,
    V1,
    V2,
    WITHIN,
    F,
    hub_sets,
    lora,
    settings,
)

E, W = "error", "warning"
CLASSES = F + "transformerLayerClsToWrap"
PEFTS, ORIGINAL = F + "peftWrapPolicy", F + "useOrigParams"
LORA, PACKED, MADE = "method.lora.", "method.quantization.", "workspace.volumeClaimTemplate"
AUTOCAST, STORAGE = LORA + "autocastAdapterDtype", PACKED + "quantStorage"
ALPHA, RATE = LORA + "loraAlpha", "training.learningRate"
TO = "output.destination"


Written = tuple[str, str, dict[str, Any]]
"""Severity, field, and new values by field."""


def none(field: str, severity: str = E) -> Written:
    """The field is removed."""
    return severity, field, {field: None}


FINDINGS: dict[str, Written] = table(__file__, "FINDINGS")  # fmt: skip
"""Of the first case of each rule in test_book_verdicts.py."""


def told(rule: str, changes: dict[str, Any], profile: FineTuneProfileSpec | None = None) -> Written | None:
    found: list[Finding] = [finding for finding in judged(manifest(changes), profile) if finding.rule == rule]
    if not found:
        return None
    (finding,) = found
    changed = {change.field.removeprefix("spec."): change.value for change in finding.changes}
    return finding.severity, finding.field.removeprefix("spec."), changed


def test_every_rule_is_written_down_here():
    assert {rule.id for rule in RULES} - set(FINDINGS) == set(), "write what the finding of the rule's first case is to say"
    assert set(FINDINGS) - {rule.id for rule in RULES} == set()


@pytest.mark.parametrize("rule", FINDINGS)
def test_the_finding_is_as_written_down(rule):
    bad, profile = next((bad, profile) for identifier, bad, _, profile in CASES if identifier == rule)
    assert [*told(rule, bad, profile)] == FINDINGS[rule]


@pytest.mark.parametrize(
    ("rule", "written", "expected"),
    [
        ("dora-16-bit-magnitude", DORA | BF16 | V1 | AS_BASE, (W, AUTOCAST, {AUTOCAST: None, PEFTS: True, ORIGINAL: False})),
        ("fsdp1-adapter-dtype", V1 | BF16 | DORA | {ORIGINAL: True, AUTOCAST: True}, (E, PEFTS, {PEFTS: True, ORIGINAL: False})),
        ("float16-adapter", V1 | {"model.dtype": "float16"} | UNPARTED, (E, PEFTS, {PEFTS: None, ORIGINAL: None})),
        ("float16-adapter", V1 | {"model.dtype": "float16"} | UNPARTED | AS_BASE, (E, AUTOCAST, {AUTOCAST: None, PEFTS: None, ORIGINAL: None})),
        ("saved-module-16-bit", QLORA | BF16 | NORM | AS_BASE, none(LORA + "modulesToSave", W)),
        ("fsdp1-adapter-unit", V1 | LOHA | {ORIGINAL: False}, (E, ORIGINAL, {PEFTS: None, ORIGINAL: None})),
        ("quantization-bits", QLORA | {PACKED + "bits": 8, "merge.base": "Dequantized"}, (E, "merge.base", {"merge.base": "Original"})),
        ("quantization-without-qlora", DORA | {"method.quantization": {}}, (E, "method.quantization", {"method.type": "QDoRA"})),
        ("quantization-without-qlora", {"method.type": "LoHa", "method.quantization": {}}, none("method.quantization")),
        ("quantization-bits", {"method.type": "QDoRA"} | {PACKED + "bits": 8}, (E, PACKED + "bits", {PACKED + "bits": 4})),
        ("merge-dequantized-without-qlora", DORA | {"merge.base": "Dequantized"}, (E, "merge.base", {"merge.base": "Original"})),
        ("fsdp1-qlora-integer-storage", V1 | QLORA | BF16 | {STORAGE: "uint8"}, (E, STORAGE, {STORAGE: "bfloat16"})),
        ("no-effect-activation-checkpointing", {F + "activationCheckpointing": True, "training.activationCheckpointing": "Selective"}, none(F + "activationCheckpointing", W)),
        ("wrap-class-name-malformed", {CLASSES: ["a.b.Layer"]}, (E, CLASSES, {CLASSES: ["Layer"]})),
        ("wrap-class-name-blank", V1 | {CLASSES: ["A", " "]}, (E, CLASSES, {CLASSES: ["A"]})),
        ("early-stopping-after-the-end", STOPPING | HELD_OUT | {"evaluation.everySteps": 1, "training.maxSteps": 2}, none("evaluation.earlyStopping", W)),
        ("source-or-datasets", SETS | {"data.source": "pvc://data/a"}, (E, "data.source", {"data.source": None, "data.revision": None})),
        ("assistant-loss-without-chat", {"data.lossOn": "Assistant", "data.format": "Text"}, (E, "data.lossOn", {"data.lossOn": "All"})),
        ("epochs-or-max-steps", {"training.maxSteps": None}, (E, "training.epochs", {"training.epochs": 1})),
        ("workspace-claim-or-template", {f"{MADE}.storage": "1Gi"}, (E, "workspace.claimName", {MADE: None})),
        ("module-adapted-and-saved", lora(targetModules=["q"], modulesToSave=["q", "v"]), (E, LORA + "targetModules", {LORA + "modulesToSave": ["v"]})),
        ("module-adapted-and-excluded", lora(targetModules=["q"], excludeModules=["q", "v"]), (E, LORA + "targetModules", {LORA + "excludeModules": ["v"]})),
        ("orthogonal-odd-rank", lora(initLoraWeights="orthogonal", rankPattern={"q": 3, "v": 4}, targetModules=["q"]), (E, LORA + "rankPattern", {LORA + "rankPattern": {"q": 4, "v": 4}})),
        ("target-parameters-conflict", EXPERTS | DORA | {LORA + "loraDropout": "0.1", LORA + "initLoraWeights": "orthogonal"}, (E, "method.type", {"method.type": "LoRA", LORA + "loraDropout": None, LORA + "initLoraWeights": None})),
        ("target-parameters-all-layers", EXPERTS | {LORA + "layersToTransform": [0], LORA + "excludeModules": ["q"]}, (E, LORA + "layersToTransform", {LORA + "layersToTransform": None, LORA + "excludeModules": None})),
        ("layers-without-targets", settings("LoHa", layersToTransform=[0], layersPattern="h"), (E, "method.settings", {"method.settings.layersToTransform": None, "method.settings.layersPattern": None})),
        ("training-moves-nothing", {RATE: "1e-30"}, none(RATE)),
        ("training-moves-nothing", {"training.adamEpsilon": "1e15"}, none("training.adamEpsilon")),
        ("training-moves-nothing", {RATE: "1e-20", "training.maxGradNorm": "1e-22"}, (E, RATE, {RATE: None, "training.maxGradNorm": None})),
        ("steps-too-large", lora(r=1, loraAlpha=65536) | {RATE: "2e-4"}, none(ALPHA, W)),
        ("steps-too-large", lora(r=1, loraAlpha=65536) | {RATE: "50"}, (W, RATE, {RATE: None, ALPHA: None})),
        ("steps-too-large", lora(r=1, alphaPattern={"q_proj": 65536}) | {RATE: "2e-4"}, none(LORA + "alphaPattern", W)),
        ("steps-too-large", lora(r=64, loraAlpha=8192, rankPattern={"q_proj": 1}) | {RATE: "2e-4"}, none(ALPHA, W)),
        ("steps-too-large", {"method.type": "LoHa", "method.lora": None, "method.settings": {"r": 1, "alpha": 65536}, RATE: "2e-4"}, (W, "method.settings", {"method.settings.alpha": None})),
        # Twice the rank is 8192, which the pattern divides by 1.
        ("steps-too-large", lora(r=4096, rankPattern={"q_proj": 1}), none(LORA + "rankPattern", W)),
        ("steps-too-large", lora(r=2560, rankPattern={"q_proj": 1}), none(LORA + "rankPattern", W)),
        # The alpha that is left is over PEFT's rank of 1 still: 8 x 0.5.
        ("steps-too-large", settings("LoHa", r=1, alpha=65536) | {RATE: "0.5"}, (W, RATE, {RATE: None, "method.settings.alpha": None})),
        # A rate that is left open is one for Adam.
        ("learning-rate-unusual", SGD | {RATE: "101"}, (W, RATE, {RATE: "0.01"})),
        ("learning-rate-unusual", FULL | {RATE: "0.05"}, none(RATE, W)),
        ("learning-rate-unusual", SGD | EPOCHS | {RATE: "1e-6"}, (W, RATE, {RATE: "0.01"})),
        ("dropout-unusual", settings("LoHa", moduleDropout="0.5"), (W, "method.settings", {"method.settings.moduleDropout": None})),
        ("steps-too-large", lora(loraPlusRatio="1000") | {RATE: "2e-3"}, none(RATE, W)),
        ("steps-too-large", lora(loraPlusRatio="10000") | {RATE: "2e-4"}, none(LORA + "loraPlusRatio", W)),
        ("method-not-supported", {"method.type": "TinyLoRA", "method.settings.u": 4}, (E, "method.type", {"method.type": "VeRA", "method.settings": None})),
        # Neither fix may ask for what the other one speaks against.
        ("elastic-needs-ordered-reduction", V2 | ELASTIC | lora(bias="all"), none("parallelism.elastic")),
        ("ordered-reduction-not-possible", V2 | ELASTIC | ORDERED | {"method.type": "VeRA"}, (E, "training.reduction", {"training.reduction": None, "parallelism.elastic": None})),
        ("hub-source-without-revision", hub_sets("hf://datasets/o/a", "pvc://b"), (E, "data.datasets", {"data.datasets": [{"source": "hf://datasets/o/a", "revision": "0" * 40}, {"source": "pvc://b"}]})),
    ],
)  # fmt: skip
def test_other_cases_are_as_written_down(rule, written, expected):
    assert told(rule, written) == expected


@pytest.mark.parametrize(
    ("written", "changes"),
    [
        ({"data.source": "pvc://data/a.jsonl"}, {"data.format": "Chat"}),
        # Chat would be refused for a table, and a .txt file has one format.
        ({"data.source": "pvc://data/a.csv"}, {"data.mapping.content": None}),
        ({"data.source": "pvc://data/a.TXT"}, {"data.mapping.content": None}),
        ({"data.validation": {"source": "pvc://data/a.csv"}}, {"data.mapping.content": None}),
        ({"data.source": "pvc://data/a.csv", "data.mapping": {"text": "t"}}, {"data.format": "Text"}),
        # Each row is a chat then.
        ({"data.source": "pvc://data/a.csv", "data.mapping": {"prompt": "q", "completion": "a", "system": "s"}}, {"data.format": "Chat"}),
        ({"data.source": "pvc://data/a.txt", "data.mapping": {"text": "t"}}, {"data.format": "Text"}),
    ],
)  # fmt: skip
def test_a_mapping_asks_for_no_format_that_its_files_cannot_hold(written, changes):
    assert told("mapping-without-effect", {"data.mapping": {"content": "words"}} | written) == (E, "data.mapping", changes)


BATCH, MICRO, RANKS = "training.globalBatchSize", "training.microBatchSize", "parallelism.processesPerNode"


@pytest.mark.parametrize(
    ("written", "changes"),
    [
        # 2 ranks of 4 sequences: multiples of 8.
        ({BATCH: 12, RANKS: 2, MICRO: 4}, {BATCH: 16}),
        # 15,625 times 64 is the limit of the field itself.
        ({BATCH: 999_999, RANKS: 64}, {BATCH: 1_000_000}),
        # 58,824 times 17 is above it, 58,823 times is 999,991.
        ({BATCH: 999_999, RANKS: 17}, {BATCH: 999_991}),
        # 4,096 ranks of 65,536 sequences have no multiple below the limit.
        ({BATCH: 10, RANKS: 64, "parallelism.nodes": 64, MICRO: 65_536}, {MICRO: None, BATCH: 4096}),
    ],
)
def test_a_global_batch_becomes_the_next_multiple_that_the_field_can_hold(written, changes):
    assert told("global-batch-not-divisible", written) == (E, BATCH, changes)


@pytest.mark.parametrize(
    ("rule", "found", "silent"),
    table(__file__, "test_the_boundary_is_where_the_formula_puts_it"),
)  # fmt: skip
def test_the_boundary_is_where_the_formula_puts_it(rule, found, silent):
    assert told(rule, found) is not None
    assert told(rule, silent) is None


@pytest.mark.parametrize(
    ("profile", "written", "changes"),
    [
        (CLOSED, {"data.source": "s3://ours/day=1.jsonl"}, {"data.source": "pvc://data/day-1.jsonl"}),
        (CLOSED, {"model.source": "s3://ours/b/llama"}, {"model.source": "pvc://models/llama"}),
    ],
)
def test_a_source_that_is_not_allowed_is_to_be_copied_to_a_claim(profile, written, changes):
    (field,) = changes
    assert told("source-not-allowed", written, profile) == (E, field, changes)
    assert told("source-not-allowed", written, OPEN) is None
    assert told("source-not-allowed", written) is None


def test_an_adapter_whose_repository_is_not_allowed_is_left_out():
    to_hub = {TO: "hf://our-org/tuned", "output.secretRef.name": "writer"}
    expected = (E, "output.adapter", {"output.adapter": False})
    assert told("destination-not-allowed", to_hub, ONE_REPOSITORY) == expected


def test_what_is_silent_beside_its_neighbour():
    # Without a profile nobody knows of GPUs; rows have the embedding's own type; segments of prefixes count; Full has no adapter;
    # version 1 leaves 16 bits to autocast; a value beyond its range has one finding.
    assert told("offload-without-gpu", {F + "offloadParams": True}) is None
    assert told("fsdp1-trainable-tokens", V1 | TOKENS | BF16 | AS_BASE) is None
    assert told("fsdp1-trainable-tokens", V1 | TOKENS | BF16) is not None
    near = {"data.source": "s3://ours/tuned-data", TO: "s3://ours/tuned"}
    assert told("output-overlaps-bucket-input", near) is None
    assert told("output-adapter-is-the-result", FULL | ALONE | {"output.adapter": False}) is None
    packed = QLORA | BF16 | {F + "mixedPrecision.paramDtype": "float32", STORAGE: "bfloat16"}
    assert told("qlora-storage-not-param-dtype", V1 | packed) is None
    assert told("qlora-storage-not-param-dtype", V2 | packed) is not None
    assert told("method-settings-conflict", settings("OFT", r=-1)) is None
    assert told("method-setting-range", settings("OFT", r=-1)) is not None


def test_long_templates_are_shown_shortened():
    for length, shown in ((60, "x" * 60), (61, "x" * 57 + "...")):
        (finding,) = judged(manifest({"data.chatTemplate": "{{" + "x" * (length - 2)}))
        assert finding.value == "{{" + shown[2:]


@pytest.mark.parametrize(
    ("nodes", "each", "changes"),
    [
        (2, 5, {"parallelism.nodes": 1}),
        (2, 8, {"parallelism.nodes": 1}),
        # Not even one node of so many fits.
        (1, 9, {"parallelism.nodes": 1, "parallelism.processesPerNode": 8}),
    ],
)
def test_fewer_nodes_fit_a_limit_of_devices_before_fewer_ranks_on_each(nodes: int, each: int, changes: dict[str, Any]) -> None:
    """The profile allows 8."""
    written = {"parallelism.nodes": nodes, "parallelism.processesPerNode": each, "training.globalBatchSize": 720}
    assert told("profile-limit-exceeded", WITHIN | written, LIMITED) == (E, "parallelism.nodes", changes)


@pytest.mark.parametrize(
    ("rule", "written", "said"),
    [
        ("learning-rate-unusual", {RATE: "0.02"}, 'write a usual rate, "1e-5" to "1e-3" for adapters, such as "2e-4"'),
        ("learning-rate-unusual", EPOCHS | {RATE: "1e-12"}, 'write a usual rate, "1e-5" to "1e-3" for adapters, such as "2e-4"'),
        ("learning-rate-unusual", FULL | {RATE: "1e-2"}, 'write a usual rate, "1e-6" to "1e-4" for Full, such as "2e-5"'),
        ("learning-rate-unusual", SGD | {RATE: "101"}, 'write a usual rate, "0.01" to "1" for SGD, such as "0.01"'),
        ("training-moves-nothing", FULL | {RATE: "1e-18"}, 'a rate such as "2e-5"'),
        ("training-moves-nothing", {RATE: "1e-18"}, 'a rate such as "2e-4"'),
        ("training-moves-nothing", SGD | {RATE: "1e-18"}, 'a rate such as "0.01"'),
        ("steps-too-large", FULL | {RATE: "0.5"}, 'a rate from "1e-6" to "1e-4" for Full'),
        ("learning-rate-zero", {RATE: "0"}, '"2e-4" for adapters, "2e-5" for Full, "0.01" for SGD'),
    ],
)
def test_a_proposed_rate_is_one_of_the_usual_rates_that_are_named(rule, written, said):
    (finding,) = [each for each in judged(manifest(written)) if each.rule == rule]
    assert said in finding.fix


def test_what_only_adapters_have_is_not_proposed_for_a_full_fine_tuning() -> None:
    (finding,) = [each for each in judged(manifest(FULL | {RATE: "0.5"})) if each.rule == "steps-too-large"]
    assert "lora" not in finding.message + finding.fix
