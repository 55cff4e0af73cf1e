"""Adapters, packed weights and units where the model does not call a module: found by running it, whatever its architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from finetune_job.finding import Finding
from finetune_job.rules.rule import with_changes
from finetune_trainer.inspection import module_use as observed_use
from finetune_trainer.inspection.module_use import ModuleUse, ModuleUses
from finetune_trainer.preflight.bypassed import base_name, endings
from finetune_trainer.preflight.model_checks import inspect_model
from finetune_trainer.preflight.model_process import check_model
from finetune_trainer.small_models.layers import KeptLayers
from tests.support.declared_model import declare_model
from tests.support.tiny_model import plan_of, tiny_spec

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 264,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
ATTENTION = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "llama": ATTENTION,
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "jamba": ATTENTION | {
        "num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "llama4_text": ATTENTION | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2},
    "bamba": ATTENTION | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
}  # fmt: skip
Spec = dict[str, Any]


@pytest.fixture
def checked(tmp_path: Path) -> Any:
    """`checked(kind, method)`: errors of preflight's look at a declared model, without data packing."""

    def made(kind: str, method: Spec, **changes: Spec) -> list[Finding]:
        directory = tmp_path / kind
        if not directory.exists():
            config = AutoConfig.for_model(kind, **(COMMON | SIZES[kind]))
            declare_model(directory, config.to_dict() | {"dtype": "float32"})
        spec = tiny_spec(**({"merge": {"enabled": False}, "data": {"packing": False}} | changes))
        _, findings = check_model(plan_of(spec | {"method": method}), directory)
        return [finding for finding in findings if finding.severity == "error"]

    return made


def lora(**settings: Any) -> Spec:
    return {"type": "LoRA", "lora": settings}


def fixed(method: Spec, finding: Finding) -> Spec:
    """The method with the finding's own changes applied."""
    assert finding.changes
    changed: Spec = with_changes({"spec": {"method": method}}, finding.changes)["spec"]["method"]
    return changed


def test_that_is_what_happens_in_training() -> None:
    model = get_peft_model(
        AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **(COMMON | SIZES["mamba"]))),
        LoraConfig(target_modules=["in_proj", "dt_proj"], task_type="CAUSAL_LM"),
    )
    model.train()
    torch.autograd.backward(model(input_ids=torch.arange(8)[None], use_cache=False).logits.square().mean())
    without = {name.split(".lora_")[0] for name, each in model.named_parameters() if each.requires_grad and each.grad is None}
    assert {name.rsplit(".", 1)[-1] for name in without} == {"dt_proj"}


def test_a_model_that_calls_its_packed_layers_is_accepted(checked: Any) -> None:
    targets = {"targetModules": ["in_proj", "dt_proj"]}
    assert checked("jamba", {"type": "QLoRA", "lora": targets}) == []
    (found,) = checked("jamba", lora(**targets))
    assert (found.rule, found.value) == ("adapter-bypassed", "dt_proj")


def test_a_packed_module_cannot_be_saved_whole(checked: Any) -> None:
    (found,) = checked("llama", {"type": "QLoRA", "lora": {"targetModules": ["v_proj"], "modulesToSave": ["q_proj"]}})
    assert (found.rule, found.field) == ("saved-module-packed", "spec.method.lora.modulesToSave")
    assert checked("llama", lora(targetModules=["v_proj"], modulesToSave=["q_proj"])) == []
    assert checked("llama", {"type": "QLoRA", "lora": {"targetModules": ["v_proj"], "modulesToSave": ["lm_head"]}}) == []


def test_rows_of_a_head_that_is_not_tied_may_be_named_too(checked: Any) -> None:
    settings = {"tokenIndices": [1, 5], "targetModules": ["embed_tokens", "lm_head"]}
    assert checked("llama", {"type": "TrainableTokens", "settings": settings}) == []


@pytest.mark.parametrize(
    ("tied", "method", "setting", "is_refused"),
    [
        (True, lora(trainableTokenIndices=[1, 5]), "lora.trainableTokenIndices", True),
        (False, lora(trainableTokenIndices=[1, 5]), "lora.trainableTokenIndices", False),
        (True, {"type": "TrainableTokens", "settings": {"tokenIndices": [1, 5]}}, "settings.tokenIndices", True),
        (False, {"type": "TrainableTokens", "settings": {"tokenIndices": [1, 5]}}, "settings.tokenIndices", False),
        (
            False,
            {"type": "TrainableTokens", "settings": {"tokenIndices": [1, 5], "targetModules": ["embed_tokens", "lm_head"]}},
            "settings.tokenIndices",
            True,
        ),
    ],
)
def test_rows_of_a_head_with_a_bias_are_refused(
    checked: Any, tmp_path: Path, tied: bool, method: Spec, setting: str, is_refused: bool
) -> None:
    config = AutoConfig.for_model("phi", **(COMMON | ATTENTION | {"tie_word_embeddings": tied}))
    declare_model(tmp_path / "phi", config.to_dict() | {"dtype": "float32"})
    found = checked("phi", method)
    shown = [(each.rule, each.field, each.value) for each in found]
    assert shown == ([("model-settings-conflict", f"spec.method.{setting}", "lm_head")] if is_refused else [])
    if found and found[0].changes:
        assert checked("phi", fixed(method, found[0])) == []


def test_peft_computes_a_head_whose_rows_it_trains_without_its_bias() -> None:
    config = AutoConfig.for_model("phi", **(COMMON | ATTENTION | {"tie_word_embeddings": True}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    bias = torch.randn(264)
    model.lm_head.bias.data.copy_(bias)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 5])).eval()
        during = adapted(input_ids=tokens).logits
        after = adapted.merge_and_unload()(input_ids=tokens).logits
    torch.testing.assert_close(during, before - bias)
    torch.testing.assert_close(after, before)


def test_a_fused_kernel_counts_where_its_package_is_installed(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = lora(targetModules=["in_proj", "out_proj"])
    assert checked("bamba", method) == []
    monkeypatch.setattr(observed_use, "find_spec", lambda name: name)
    (found,) = checked("bamba", method)
    assert found.rule == "adapter-bypassed"
    assert "mamba_ssm." in found.message
    assert found.value == "out_proj"
    assert checked("bamba", fixed(method, found)) == []


def _reads(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight)


def _reads_and_calls(self: Any, x: torch.Tensor) -> torch.Tensor:
    inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    result: torch.Tensor = self.down_proj(inner) + functional.linear(inner, self.down_proj.weight)
    return result


def _never_calls(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.up_proj(x)[..., : x.shape[-1]] + self.gate_proj(x)[..., : x.shape[-1]]
    return result


def _forgets(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = self.act_fn(self.gate_proj(x))
    result: torch.Tensor = self.down_proj(gate * self.up_proj(x))
    return result


def _calls_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.down_proj.forward(self.act_fn(self.gate_proj.forward(x)) * self.up_proj(x))
    return result


@pytest.mark.parametrize(
    ("forward", "rule", "value", "said"),
    [
        (_reads, "adapter-bypassed", "down_proj", "LlamaMLP never calls them"),
        (_reads_and_calls, "adapter-bypassed", "down_proj", "besides calling them"),
        (_never_calls, "trained-without-gradient", "down_proj", "no pass over text calls them"),
        (_forgets, "trained-without-gradient", "gate_proj", "the loss does not depend on them"),
    ],
)
def test_no_list_of_architectures_is_needed(
    checked: Any, monkeypatch: pytest.MonkeyPatch, forward: Any, rule: str, value: str, said: str
) -> None:
    assert checked("llama", {"type": "LoRA"}) == []
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    (found,) = checked("llama", {"type": "LoRA"})
    assert (found.rule, found.value, found.field) == (rule, value, "spec.method.lora.targetModules")
    assert said in found.message
    assert checked("llama", fixed({"type": "LoRA"}, found)) == []
    saved = [(each.rule, each.field) for each in checked("llama", lora(targetModules=["q_proj"], modulesToSave=[value]))]
    whole = [(each.rule, each.field) for each in checked("llama", {"type": "Full"})]
    # What reads the weight of a trained copy reads the trained one, and full fine-tuning has one weight alone.
    is_idle = rule == "trained-without-gradient"
    assert saved == ([(rule, "spec.method.lora.modulesToSave")] if is_idle else [])
    assert whole == ([(rule, "spec.method.type")] if is_idle else [])


def test_calling_forward_past_the_hooks_is_calling(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", _calls_forward)
    assert checked("llama", {"type": "LoRA"}) == []


def test_no_verdict_where_the_model_cannot_be_run(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("only on a GPU")

    monkeypatch.setattr(LlamaMLP, "forward", fails)
    assert checked("llama", {"type": "LoRA"}) == []


def test_names_of_the_model_and_its_twin() -> None:
    good, idle = ModuleUse(True, True), ModuleUse(False, False)
    observed = {
        "layers.0.experts.0.up": idle, "layers.0.experts.1.up": good, "layers.0.attention": good, "layers.1.attention": idle,
        "tower.0.up": idle,
    }  # fmt: skip
    kinds = ("full", "full", "full", "shared")
    uses = ModuleUses(observed, KeptLayers((0, 3), kinds))
    # An expert that no token of the small batch went to is an expert all the same.
    assert uses.of("layers.2.experts.57.up") == good
    assert uses.of("layers.1.attention") == good
    assert uses.of("layers.3.attention") == idle
    assert uses.of("tower.9.up") == idle
    assert uses.of("elsewhere") is None


def test_shortest_names_that_mean_no_other_module() -> None:
    among = ["a.0.q", "a.1.q", "b.0.q", "a.0.v", "b.0.v"]
    assert endings(["a.0.v", "b.0.v"], among) == ["v"]
    assert endings(["b.0.q"], among) == ["b.0.q"]
    assert base_name("base_model.model.a.0.q.base_layer") == "a.0.q"
    assert base_name("base_model.model.norm.modules_to_save.default") == "norm"


OF_IMAGES = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": COMMON | ATTENTION | {"head_dim": 16, "sliding_window": 16},
    "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4}
    | {"image_size": 28, "patch_size": 14},
    "mm_tokens_per_image": 4,
    "image_token_index": 263,
    "dtype": "float32",
}
TEXT = [f"model.language_model.layers.{number}.{part}" for number in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")]


@pytest.mark.parametrize(
    ("method", "count"),
    [
        (lora(), 14),
        (lora(targetModules=["all-linear"]), 14),
        (lora(targetModules=["q_proj", "up_proj"]), 4),
        ({"type": "LoHa"}, 14),
        ({"type": "LoHa", "settings": {"targetModules": ["q_proj", "up_proj"]}}, 4),
    ],
)
def test_the_tower_of_images_gets_no_adapters_that_no_text_reaches(tmp_path: Path, method: Spec, count: int) -> None:
    declare_model(tmp_path / "model", OF_IMAGES)
    plan = plan_of(tiny_spec(merge={"enabled": False}, data={"packing": False}) | {"method": method})
    seen = inspect_model(plan, tmp_path / "model")
    assert not seen.findings
    adapted = [base_name(name) for name, module in seen.trained.model.named_modules() if isinstance(module, BaseTunerLayer)]
    assert len(adapted) == count
    assert set(TEXT) <= set(adapted)
    assert all(name.startswith("model.language_model.") for name in adapted)


def test_a_name_that_text_never_reaches_is_refused_with_the_whole_fix(tmp_path: Path) -> None:
    declare_model(tmp_path / "model", OF_IMAGES)
    spec = tiny_spec(merge={"enabled": False}, data={"packing": False})
    (found,) = check_model(plan_of(spec | {"method": lora(targetModules=["q_proj", "fc1"])}), tmp_path / "model")[1]
    assert (found.rule, found.value) == ("trained-without-gradient", "fc1")
    assert found.fix == "set spec.method.lora.targetModules: [q_proj]"
    excluded = lora(targetModules=["q_proj"], excludeModules=["0.self_attn.q_proj"])
    (found,) = check_model(plan_of(spec | {"method": excluded}), tmp_path / "model")[1]
    assert found.fix.count("self_attn.q_proj") == 12
    assert "..." not in found.fix
