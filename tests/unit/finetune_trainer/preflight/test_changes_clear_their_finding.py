"""The changes of a finding clear it: what `finding.changes` says is a manifest that preflight and the rule book take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, LlamaModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.finding import Finding
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext, with_changes
from finetune_memory.limit import MemoryLimit
from finetune_memory.verdict import judge_memory, memory_finding
from finetune_trainer.data.tokenizer import check_chat_template
from finetune_trainer.preflight import stored_weights
from finetune_trainer.preflight.fit import fit_findings
from finetune_trainer.preflight.model_process import check_model
from finetune_trainer.rehearsal.verdicts import not_done_finding
from tests.support.cases import table
from tests.support.declared_model import declare_model
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.data import test_forms_of_records as forms
from tests.unit.finetune_trainer.preflight.test_adapter_names_of_experts import KINDS
from tests.unit.finetune_trainer.preflight.test_adapter_names_of_experts import SIZES as SIZES_OF_EXPERTS
from tests.unit.finetune_trainer.preflight.test_architecture import declared
from tests.unit.finetune_trainer.preflight.test_bypassed import COMMON, SIZES, _forgets
from tests.unit.finetune_trainer.preflight.test_fit import facts

Spec = dict[str, Any]
Judge = Callable[[Spec], list[Finding]]
FSDP = "parallelism.fsdp."
LORA = "method.lora."
SETTINGS = "method.settings."
CASES: list[tuple[str, str, str, Spec, dict[str, str]]] = table(__file__, "CASES")


def written_spec(written: Spec) -> Spec:
    spec = tiny_spec(parallelism={"processesPerNode": 2}, merge={"enabled": False}, data={"packing": False})
    spec["method"] = {"type": "LoRA"}
    for path, value in written.items():
        *parents, last = path.split(".")
        place = spec
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return spec


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`models(kind, stored)`: a declared model, made once."""
    root = tmp_path_factory.mktemp("declared")

    def made(kind: str, stored: str) -> Path:
        directory = root / f"{kind}-{stored}"
        if directory.exists():
            return directory
        if kind == "mamba" or kind == "llama4_text":
            config = AutoConfig.for_model(kind, **COMMON | SIZES[kind]).to_dict()
        elif kind in KINDS and kind != "mixtral":
            config = AutoConfig.for_model(kind, **SIZES_OF_EXPERTS | KINDS[kind]).to_dict()
        else:
            return declared(directory, kind, stored)
        declare_model(directory, config | {"dtype": stored})
        return directory

    return made


def of_model(directory: Path) -> Judge:
    return lambda spec: check_model(plan_of(spec), directory)[1]


def rule_errors(spec: Spec) -> set[str]:
    found = evaluate(RuleContext(FineTuneJobSpec.model_validate(spec)))
    return {finding.rule for finding in found if finding.severity == "error"}


def errors(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings if finding.severity == "error"}


def assert_cleared(spec: Spec, rule: str, judge: Judge) -> Finding:
    """Assert that the changes of all findings of this id clear them. Returns the first of these findings."""
    before = judge(spec)
    found = [finding for finding in before if finding.rule == rule]
    assert found
    changed = spec
    for finding in found:
        assert finding.changes, finding
        assert not finding.is_proposal
        changed = with_changes({"spec": changed}, finding.changes)["spec"]
        assert changed != spec
    after = judge(changed)
    left = [finding for finding in after if finding.rule == rule]
    assert left == [], [finding.changes for finding in found]
    assert errors(after) <= errors(before), [finding.changes for finding in found]
    assert rule_errors(changed) <= rule_errors(spec), [finding.changes for finding in found]
    return found[0]


@pytest.mark.parametrize(
    ("rule", "kind", "stored", "written", "named"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)]
)
def test_the_changes_of_a_finding_clear_it(
    models: Any, rule: str, kind: str, stored: str, written: Spec, named: dict[str, str]
) -> None:
    found = assert_cleared(written_spec(written), rule, of_model(models(kind, stored)))
    assert {name: getattr(found, name) for name in named} == named


@pytest.mark.parametrize(
    ("rule", "written", "patched"),
    [
        ("trained-without-gradient", {}, (LlamaMLP, "forward", _forgets)),
        ("trained-without-gradient", {LORA + "targetModules": ["q_proj"], LORA + "modulesToSave": ["gate_proj", "lm_head"]}, (LlamaMLP, "forward", _forgets)),
        ("trained-without-gradient", {LORA + "targetModules": ["q_proj"], LORA + "modulesToSave": ["gate_proj"]}, (LlamaMLP, "forward", _forgets)),
        ("trained-without-gradient", {"method.type": "LoHa", SETTINGS + "targetModules": ["q_proj"], SETTINGS + "modulesToSave": ["gate_proj"]}, (LlamaMLP, "forward", _forgets)),
        ("trained-in-two-types", {LORA + "targetModules": ["q_proj"], LORA + "modulesToSave": ["input_layernorm"], LORA + "autocastAdapterDtype": False}, (LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"input_layernorm"})),
        ("decomposition-too-long", {LORA + "initLoraWeights": "pissa"}, (stored_weights, "LONGEST_DECOMPOSITION_SECONDS", 0.0)),
    ],
)  # fmt: skip
def test_the_changes_clear_what_another_model_would_show(
    models: Any, monkeypatch: pytest.MonkeyPatch, rule: str, written: Spec, patched: tuple[Any, str, Any]
) -> None:
    directory = models("llama", "bfloat16")
    monkeypatch.setattr(*patched)
    assert_cleared(written_spec(written), rule, of_model(directory))


@pytest.mark.parametrize("elastic", [False, True])
def test_a_model_that_cannot_be_sharded_is_trained_on_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    built = LlamaModel.__init__

    def with_a_number(self: Any, *args: Any, **settings: Any) -> None:
        built(self, *args, **settings)
        self.scale = nn.Parameter(torch.tensor(1.0))

    monkeypatch.setattr(LlamaModel, "__init__", with_a_number)
    spec = written_spec({"parallelism.nodes": 2})
    if elastic:
        spec["parallelism"]["elastic"] = {"minNodes": 2}
        spec["training"]["reduction"] = "Ordered"
    assert_cleared(spec, "parameter-not-shardable", of_model(declared(tmp_path / "model", "llama")))


def test_biases_without_a_gradient_are_left_as_they_are(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2MLP, "forward", lambda _self, states: states)
    spec = written_spec({LORA + "targetModules": ["c_attn"], LORA + "bias": "all"})
    assert_cleared(spec, "trained-without-gradient", of_model(models("gpt2", "bfloat16")))


LEAN = {
    "method.type": "Full",
    "training.microBatchSize": 1,
    "training.precision": "bf16",
    "training.activationCheckpointing": "Full",
    "data.maxSequenceLength": 16,
}
ACCESS = "spec.workspace.volumeClaimTemplate.accessMode"


@pytest.mark.parametrize(
    ("rule", "is_device", "written", "changed"),
    [
        ("memory-estimate-exceeds-gpu", True, {}, "spec.training.microBatchSize"),
        ("memory-estimate-exceeds-pod", False, {}, "spec.training.microBatchSize"),
        ("memory-estimate-exceeds-pod", False, LEAN | {"workspace": {"volumeClaimTemplate": {"storage": "1Gi"}}}, ACCESS),
        ("memory-estimate-exceeds-pod", False, LEAN, "spec.parallelism.nodes"),
    ],
)
def test_the_changes_fit_the_memory_of_a_pod(models: Any, rule: str, is_device: bool, written: Spec, changed: str) -> None:
    directory = models("llama", "bfloat16")
    batch = {"training.microBatchSize": 8, "training.globalBatchSize": 16, "data.maxSequenceLength": 1024}
    # Nothing that is chosen by what there is room for.
    chosen = {FSDP + "reshardAfterForward": True, "training.activationCheckpointing": "None", "model.attention": "sdpa"}
    spec = written_spec(batch | chosen | written)
    structure, _ = check_model(plan_of(spec), directory)
    assert structure is not None
    shape = structure.shape
    assert shape is not None
    needed = judge_memory(plan_of(spec), shape, "bfloat16", MemoryLimit(1 << 40, is_device, "test")).estimate.total

    def judge(spec: Spec) -> list[Finding]:
        found = memory_finding(judge_memory(plan_of(spec), shape, "bfloat16", MemoryLimit(needed - 1, is_device, "test")))
        return [] if found is None else [found]

    (finding,) = judge(spec)
    assert changed in {change.field for change in finding.changes}
    is_told = "several nodes would then mount the claim workspace, so it must be ReadWriteMany" in finding.fix
    assert is_told == (changed == "spec.parallelism.nodes")
    assert_cleared(spec, rule, judge)


def test_a_job_that_cannot_be_compiled_is_not(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert_cleared(written_spec({"training.compile": True}), "compile-without-compiler", of_model(models("llama", "bfloat16")))


EPOCHS = {"training.epochs": 2, "training.maxSteps": None, "training.globalBatchSize": 8}
EVERY = "evaluation.everySteps"


@pytest.mark.parametrize(
    ("rule", "written", "max_row"),
    [
        # 2 epochs of 100 sequences, 8 to a step: 25 steps.
        ("evaluations-beyond-the-end", EPOCHS | {EVERY: 25, "evaluation.loadBestModelAtEnd": True}, None),
        ("evaluations-beyond-the-end", EPOCHS | {EVERY: 9, "evaluation.earlyStopping": {"patience": 2}}, None),
        ("evaluations-beyond-the-end", EPOCHS | {EVERY: 9, "evaluation.earlyStopping": {"patience": 40}}, None),
        ("sequence-beyond-positions", {"data.packing": True}, 16),
    ],
)
def test_the_changes_make_counts_fit(rule: str, written: Spec, max_row: int | None) -> None:
    def judge(spec: Spec) -> list[Finding]:
        splits = {"train": facts(), "validation": facts()}
        return fit_findings(plan_of(spec), splits, 10, 10, None, max_row=max_row)

    spec = written_spec(written)
    spec["training"] = {name: value for name, value in spec["training"].items() if value is not None}
    assert_cleared(spec, rule, judge)


@pytest.mark.parametrize(("micro", "batch"), [(None, 10), (3, 6)])
def test_a_smaller_batch_that_the_text_names_splits_over_the_ranks(micro: int | None, batch: int) -> None:
    """11 sequences, 2 ranks: 10 is the most, and 6 in micro-batches of 3."""
    spec = written_spec({"training.globalBatchSize": 12})
    if micro is None:
        del spec["training"]["microBatchSize"]
    else:
        spec["training"]["microBatchSize"] = micro
    (found,) = fit_findings(plan_of(spec), {"train": facts(num_sequences=11)}, 10, 10, None)
    assert found.rule == "fewer-sequences-than-batch"
    assert f"set spec.training.globalBatchSize to {batch}," in found.fix
    spec["training"]["globalBatchSize"] = batch
    assert fit_findings(plan_of(spec), {"train": facts(num_sequences=11)}, 10, 10, None) == []
    assert rule_errors(spec) == set()


def test_a_split_that_there_is_not_is_left_out_or_the_one_that_there_is(tmp_path: Path) -> None:
    root = forms.claim(tmp_path, "a", lambda path: path.mkdir())
    forms.write(root / "data/a/x.jsonl", [{"text": "x"}])
    spec = forms.spec_of("a", {"format": "Text", "split": "train"})
    assert_cleared(spec, "data-split-missing", lambda spec: forms.found_in(root, spec))
    forms.claim(tmp_path, "b", lambda path: path.mkdir())
    forms.write(root / "data/b/test-00000-of-00001.jsonl", [{"text": "x"}])
    spec = forms.spec_of("b", {"format": "Text", "split": "train"})
    assert_cleared(spec, "data-split-missing", lambda spec: forms.found_in(root, spec))


def test_a_tokenizer_without_a_template_gets_the_one_that_its_tokens_are_for(tmp_path: Path) -> None:
    def judge(spec: Spec) -> list[Finding]:
        return check_chat_template(forms.resolved(spec), forms.TOKENIZER, tmp_path)

    assert_cleared(forms.spec_of("a.jsonl", {"format": "Chat"}), "chat-template-unusable", judge)


@pytest.mark.parametrize("num_records", [1, 3, 4, 7])
def test_the_weight_that_the_text_names_leaves_a_record(tmp_path: Path, num_records: int) -> None:
    root = forms.claim(tmp_path, "a.jsonl", [{"text": f"t {number}"} for number in range(num_records)])
    forms.write(root / "data/b.jsonl", [{"text": "other"}])
    sets = [{"source": "pvc://data/b.jsonl"}, {"source": "pvc://data/a.jsonl", "weight": "0.01"}]
    spec = forms.manifest({"data": {"format": "Text", "datasets": sets}})
    (found,) = forms.found_in(root, spec)
    assert found.rule == "data-weight-without-records"
    sets[1]["weight"] = found.fix.removeprefix("set the weight to ").partition(" ")[0]
    assert forms.found_in(root, forms.manifest({"data": {"format": "Text", "datasets": sets}})) == []


def test_a_rehearsal_that_cannot_be_done_is_skipped(tmp_path: Path) -> None:
    def judge(spec: Spec) -> list[Finding]:
        is_skipped = spec.get("preflight", {}).get("rehearsal") == "Skip"
        return [] if is_skipped else [not_done_finding("no memory", tmp_path)]

    assert_cleared(written_spec({}), "rehearsal-not-done", judge)
