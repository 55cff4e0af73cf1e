"""What only the architecture or the stored weights decide: attention, packing, element types, experts. From declared models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaForCausalLM

from finetune_trainer.inspection.module_use import observe_use
from finetune_trainer.model import packed_documents
from finetune_trainer.model.load import attention_of, load_config
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.model_process import check_model
from finetune_trainer.preflight.small_model import check_small_model
from tests.support.declared_model import declare_model
from tests.support.tiny_model import plan_of, tiny_spec

SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
Q = {"targetModules": ["q_proj"]}


def declared(directory: Path, kind: str, stored: str = "bfloat16") -> Path:
    sizes = SIZES | (EXPERTS if kind in ("mixtral", "qwen3_moe", "gpt_oss", "afmoe") else {})
    declare_model(directory, AutoConfig.for_model(kind, **sizes).to_dict() | {"dtype": stored})
    if stored == "float16":
        for file in directory.glob("*.safetensors"):
            # Of the same length, so that no offset changes.
            file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"F16" '))
    return directory


def plan(method: dict[str, Any], fsdp: dict[str, Any] | None = None, ranks: int = 2, **changes: Any) -> Any:
    parallelism = {"processesPerNode": ranks, "fsdp": fsdp or {}}
    spec = tiny_spec(**({"parallelism": parallelism, "merge": {"enabled": False}, "data": {"packing": False}} | changes))
    return plan_of({**spec, "method": method})


def errors(plan: Any, directory: Path) -> dict[str, str]:
    _, findings = check_model(plan, directory)
    return {finding.rule: finding.field for finding in findings if finding.severity == "error"}


@pytest.mark.parametrize(
    ("kind", "method", "fsdp", "decay", "named"),
    [
        ("llama", "Full", {}, "0.1", ("q_proj.weight", "0.input_layernorm.weight", "(model.layers.0)")),
        ("llama", "Full", {}, "0", ()),
        # Each weight is a unit of its own, so that only biases lie next to a weight that decays.
        ("llama", "Full", {"peftWrapPolicy": True}, "0.1", ()),
        ("qwen2", "Full", {"peftWrapPolicy": True}, "0.1", ("q_proj.weight", "q_proj.bias")),
        ("qwen2", "Full", {"peftWrapPolicy": True, "useOrigParams": True}, "0.1", ()),
        # Nothing of OLMo's normalisation is trained, and it has no biases.
        ("olmo", "Full", {}, "0.1", ()),
        ("llama", "LoRA", {}, "0.1", ()),
    ],
)
def test_a_flat_parameter_holds_what_is_treated_alike(
    tmp_path: Path, kind: str, method: str, fsdp: dict[str, Any], decay: str, named: tuple[str, ...]
) -> None:
    made = plan({"type": method}, {"version": 1, "useOrigParams": False} | fsdp, training={"weightDecay": decay})
    _, findings = check_model(made, declared(tmp_path / "model", kind))
    found = [finding for finding in findings if finding.severity == "error"]
    assert [finding.rule for finding in found] == ["fsdp1-flat-parameter-mixed"] * bool(named)
    assert all(name in finding.message for finding in found for name in named)


@pytest.mark.parametrize(
    ("kind", "given", "used"),
    [("gpt_oss", None, "eager"), ("mamba", None, "eager"), ("llama", None, "sdpa"), ("llama", "eager", "eager")],
)
def test_open_attention_is_one_that_the_architecture_has(tmp_path: Path, kind: str, given: str | None, used: str) -> None:
    directory = declared(tmp_path / "model", kind)
    made = plan({"type": "LoRA"}, model={"attention": given} if given else {})
    assert attention_of(made, load_config(made, directory)) == used


@pytest.mark.parametrize(
    ("kind", "reason"), [("gemma2", "no fused attention"), ("mamba", "no fused attention"), ("gpt2", "at random"), ("llama", "")]
)
def test_attention_by_bounds_that_the_architecture_cannot_have_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    directory = declared(tmp_path / "model", kind)
    _, findings = check_model(plan({"type": "LoRA"}, model={"attention": "varlen"}), directory)
    found = [finding for finding in findings if finding.rule == "attention-not-supported"]
    assert [reason in finding.message for finding in found] == [True] * bool(reason)
    assert all({change.field: change.value for change in each.changes} == {"spec.model.attention": None} for each in found)


@pytest.mark.parametrize(
    ("kind", "leaks"),
    [
        *(("llama", False), ("mixtral", False), ("gemma2", False)),
        # Their own code hands no positions to the function that makes their masks.
        *(("gpt_oss", False), ("opt", False), ("falcon", False), ("mpt", False)),
        # Its positions are numbers in the type of the computation, coarser the later a document begins.
        ("bloom", True),
    ],
)
def test_packing_is_refused_where_a_document_sees_the_one_before(tmp_path: Path, kind: str, leaks: bool) -> None:
    directory = declared(tmp_path / "model", kind)
    packed, unpacked = (plan({"type": "LoRA"}, data={"packing": packing}) for packing in (True, False))
    observed = observe_use(packed, directory)
    assert observed is not None
    assert [finding.rule for finding in check_small_model(ModelInspection(packed, directory, observed=observed))] == [
        "packing-leaks"
    ] * leaks
    assert check_small_model(ModelInspection(unpacked, directory, observed=observed)) == []


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
YARN = DYNAMIC | {"rope_type": "yarn", "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA_4 = {"intermediate_size_mlp": 32, "num_local_experts": 2, "attn_temperature_tuning": True}
BY_POSITION: dict[str, tuple[str, dict[str, Any], bool]] = {
    "temperature by the place in the row": ("llama4_text", LLAMA_4 | {"floor_scale": 40, "no_rope_layers": [0, 0]}, True),
    "a temperature that no row reaches": ("llama4_text", LLAMA_4 | {"floor_scale": 64, "no_rope_layers": [0, 0]}, False),
    "chunks by document": ("llama4_text", LLAMA_4 | {"attention_chunk_size": 40, "no_rope_layers": [1, 1]}, False),
    "temperature by positions": ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}}, False),
    "dynamic": ("llama", {"max_position_embeddings": 40, "rope_parameters": DYNAMIC}, False),
}


@pytest.mark.parametrize(("kind", "settings", "leaks"), BY_POSITION.values(), ids=BY_POSITION)
def test_packing_is_refused_where_the_place_in_the_row_counts(
    tmp_path: Path, kind: str, settings: dict[str, Any], leaks: bool
) -> None:
    """Rows of the job have 64 tokens, and those of the small model 16."""
    config = AutoConfig.for_model(kind, **SIZES | {"head_dim": 8} | settings)
    declare_model(tmp_path / "model", config.to_dict() | {"dtype": "float32"})
    packed, unpacked = (
        plan({"type": "LoRA", "lora": Q}, data={"packing": packing, "maxSequenceLength": 64}) for packing in (True, False)
    )
    assert errors(packed, tmp_path / "model") == ({"packing-leaks": "spec.data.packing"} if leaks else {})
    assert errors(unpacked, tmp_path / "model") == {}


def test_a_record_that_depends_on_the_longest_of_its_micro_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without frequencies of their own, records of a micro-batch get those of the longest."""
    config = AutoConfig.for_model("llama", **SIZES, max_position_embeddings=40, rope_parameters=DYNAMIC)
    declare_model(tmp_path / "model", config.to_dict() | {"dtype": "float32"})
    alone, together = (
        plan(
            {"type": "LoRA"},
            training={"maxSteps": 3, "globalBatchSize": 4, "microBatchSize": size},
            data={"packing": False, "maxSequenceLength": 64},
        )
        for size in (1, 2)
    )
    assert errors(together, tmp_path / "model") == {}
    monkeypatch.setattr(packed_documents, "install_rope_by_document", lambda _model: None)
    _, (found,) = check_model(together, tmp_path / "model")
    assert (found.rule, found.severity) == ("micro-batch-leaks", "error")
    assert {change.field: change.value for change in found.changes} == {"spec.training.microBatchSize": 1}
    assert errors(alone, tmp_path / "model") == {}


@pytest.mark.parametrize(
    ("kind", "settings", "is_mentioned"),
    [("mixtral", {"output_router_logits": True}, True), ("mixtral", {}, False), ("llama", {}, False), ("opt", {}, False)],
)
def test_a_term_of_the_models_own_loss_is_mentioned(
    tmp_path: Path, kind: str, settings: dict[str, bool], is_mentioned: bool
) -> None:
    config = AutoConfig.for_model(kind, **SIZES | EXPERTS | settings).to_dict()
    declare_model(tmp_path / "model", config | {"dtype": "float32"})
    _, findings = check_model(plan({"type": "LoRA", "lora": Q}), tmp_path / "model")
    assert [finding.severity for finding in findings if finding.rule == "loss-of-the-model-unused"] == ["warning"] * is_mentioned


PEFTS = ["attention_mask", "inputs_embeds", "labels", "output_attentions", "output_hidden_states", "return_dict"]


@pytest.mark.parametrize(
    ("accepted", "method", "missing"),
    [
        (["position_ids", "use_cache"], "Full", []),
        (["position_ids", "use_cache"], "LoRA", PEFTS),
        (["position_ids", "use_cache", *PEFTS], "LoRA", []),
        (["position_ids", "use_cache", *set(PEFTS) - {"inputs_embeds"}], "LoRA", ["inputs_embeds"]),
        (["use_cache", *PEFTS], "Full", ["position_ids"]),
        (["**others"], "LoRA", []),
    ],
)
def test_code_that_accepts_too_few_arguments_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: list[str], method: str, missing: list[str]
) -> None:
    """As the code that comes with some models."""
    named = ", ".join(name if name.startswith("*") else f"{name}=None" for name in accepted)
    given = ", ".join(name if name.startswith("*") else f"{name}={name}" for name in accepted)
    scope: dict[str, Any] = {"plain": LlamaForCausalLM.forward}
    exec(f"def forward(self, input_ids=None, {named}): return plain(self, input_ids, {given})", scope)
    monkeypatch.setattr(LlamaForCausalLM, "forward", scope["forward"])
    _, findings = check_model(plan({"type": method}), declared(tmp_path / "model", "llama"))
    refused = [finding for finding in findings if finding.severity == "error"]
    assert [finding.rule for finding in refused] == ["forward-without-argument"] * bool(missing)
    for finding in refused:
        assert f"does not accept {', '.join(missing)}, with which" in finding.message
        assert ("spec.method.type: Full" in finding.fix) is (method == "LoRA")


@pytest.mark.parametrize(
    ("kinds", "found"),
    [(["attention"] * 2, {}), (["mamba", "attention"], {"packing-with-recurrent-layers": "spec.data.packing"})],
)
def test_a_hybrid_of_attention_alone_is_packed(tmp_path: Path, kinds: list[str], found: dict[str, str]) -> None:
    """Granite 4 has checkpoints without a single Mamba layer, of a class that transformers marks as one with a state."""
    sizes = SIZES | {"shared_intermediate_size": 64, "num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": kinds}
    states = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "position_embedding_type": "rope"}
    declare_model(tmp_path / "model", {"model_type": "granitemoehybrid", **sizes, **states, "dtype": "bfloat16"})
    refused = errors(plan({"type": "LoRA"}, data={"packing": True}), tmp_path / "model")
    assert {rule: field for rule, field in refused.items() if rule != "packing-leaks"} == found
    assert ("packing-leaks" in refused) <= bool(found)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_peft_takes_for_linear_layers_need_version_2(tmp_path: Path, kind: str) -> None:
    directory = declared(tmp_path / "model", kind)
    first = {"version": 1}
    assert errors(plan({"type": "LoRA"}, first), directory) == {"stacked-experts-under-fsdp1": "spec.method.lora.targetModules"}
    assert errors(plan({"type": "LoRA", "lora": Q}, first), directory) == {}
    assert errors(plan({"type": "LoRA"}, first, ranks=1), directory) == {}
    assert errors(plan({"type": "LoRA"}), directory) == {}
    assert errors(plan({"type": "LoRA", "lora": {"loraDropout": "0.1"}}), directory) == {
        "model-settings-conflict": "spec.method.lora.targetModules"
    }


def test_targets_that_peft_cannot_choose_are_asked_for(tmp_path: Path) -> None:
    directory = declared(tmp_path / "model", "olmo2")
    assert errors(plan({"type": "IA3"}), directory) == {"model-settings-conflict": "spec.method.settings.targetModules"}
    named = {"targetModules": ["k_proj", "v_proj", "down_proj"], "feedforwardModules": ["down_proj"]}
    assert errors(plan({"type": "IA3", "settings": named}), directory) == {}


@pytest.mark.parametrize(
    ("kind", "lora"), [("nemotron", {"trainableTokenIndices": [5]}), ("granitemoe", {"targetModules": ["lm_head"]})]
)
def test_embeddings_of_types_that_the_merge_has_no_table_for_are_merged(tmp_path: Path, kind: str, lora: dict[str, Any]) -> None:
    directory = declared(tmp_path / "model", kind)
    assert errors(plan({"type": "LoRA", "lora": lora}, merge={"enabled": True}), directory) == {}


AS_BASE = Q | {"autocastAdapterDtype": False}
COMPUTE = {"mixedPrecision": {"paramDtype": "bfloat16"}}
SAVED = Q | {"modulesToSave": ["norm"]}


@pytest.mark.parametrize(
    ("stored", "wanted", "made"),
    [
        ("float16", {"trained-in-float16"}, plan({"type": "LoRA", "lora": AS_BASE})),
        ("float16", set(), plan({"type": "LoRA", "lora": SAVED})),
        ("float16", set(), plan({"type": "LoRA", "lora": AS_BASE}, training={"optimizer": "SGD"})),
        ("bfloat16", set(), plan({"type": "LoRA", "lora": AS_BASE})),
        ("bfloat16", set(), plan({"type": "LoRA", "lora": SAVED})),
        ("bfloat16", set(), plan({"type": "LoRA", "lora": SAVED}, {"version": 1})),
        ("float16", set(), plan({"type": "LoRA", "lora": Q}, COMPUTE, ranks=1)),
        ("float16", set(), plan({"type": "LoRA", "lora": Q}, {"version": 1} | COMPUTE)),
        ("float16", set(), plan({"type": "LoRA", "lora": Q}, COMPUTE)),
        ("bfloat16", set(), plan({"type": "LoRA", "lora": Q}, COMPUTE, ranks=1)),
        (
            "bfloat16",
            {"qlora-storage-not-param-dtype"},
            plan({"type": "QLoRA", "lora": SAVED, "quantization": {"quantStorage": "float32"}}),
        ),
        ("bfloat16", set(), plan({"type": "QLoRA", "lora": SAVED})),
    ],
)
def test_element_types_that_the_stored_weights_decide(tmp_path: Path, stored: str, wanted: set[str], made: Any) -> None:
    assert set(errors(made, declared(tmp_path / "model", "llama", stored))) == wanted


def test_a_method_that_an_earlier_release_supported_is_refused(tmp_path: Path) -> None:
    """A plan that such a release froze names it."""
    _, findings = check_model(plan({"type": "FourierFT"}, ranks=1), declared(tmp_path, "llama"))
    (conflict,) = (finding for finding in findings if finding.severity == "error")
    assert (conflict.rule, conflict.field) == ("model-settings-conflict", "spec.method.type")
    assert conflict.message.startswith("FourierFT is not supported: it draws a permutation of every weight matrix")
