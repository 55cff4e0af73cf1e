"""The adapter for serving: PEFT loads what is published, its names follow PEFT's rules, and engines get what they support."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.errors import CheckpointError
from finetune_trainer.model.adapters import adapter_settings, attach, fixed_tensors, stored_names
from finetune_trainer.model.load import build_with_lazy_zeros
from finetune_trainer.release.adapter_check import PEFT_PREFIX, check_adapter, serving_report, tensor_descriptions
from finetune_trainer.weights.errors import MergeError
from tests.support.cases import table
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama

BASE_NAME, COMMIT = "maker/base", "b" * 40
LORA: dict[str, dict[str, Any]] = table(__file__, "LORA")
NOT_SERVED: dict[str, tuple[dict[str, Any], str]] = table(__file__, "NOT_SERVED")
FOR_LLAMA_CPP = table(__file__, "FOR_LLAMA_CPP")
"""It multiplies by lora_alpha over each module's own rank. tests/e2e/test_llama_cpp.py asks it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    # With biases, so that there are some to train.
    return write_tiny_llama(tmp_path_factory.mktemp("base"), attention_bias=True)


def plan_for(method: dict[str, Any]) -> RunPlan:
    plan = plan_of(tiny_spec(method=method, merge={"enabled": False}, parallelism={"processesPerNode": 1}))
    return plan.model_copy(update={"model": plan.model.model_copy(update={"name": BASE_NAME, "revision": COMMIT})})


def written(base: Path, directory: Path, method: dict[str, Any]) -> RunPlan:
    """An adapter as the export writes it, with random values in the place of trained ones."""
    plan = plan_for(method)
    model = attach(build_with_lazy_zeros(plan, base), plan)
    names = stored_names(model)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        names[name]: torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        for name, parameter in model.named_parameters()
        if name in names
    }
    tensors |= {name: tensor.contiguous() for name, tensor in fixed_tensors(model).items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(adapter_settings(model, plan.model.name, plan.model.revision)))
    listed = tensor_descriptions(tensors)
    (directory / "manifest.json").write_text(json.dumps({"files": {}, "tensors": listed}))
    return plan


@pytest.mark.parametrize("method", LORA.values(), ids=LORA)
def test_peft_loads_every_tensor_as_it_is_published(base, tmp_path, method):
    """model/test_adapters_every_method.py shows the same of other methods."""
    plan = written(base, tmp_path, method)
    report = check_adapter(tmp_path, plan, base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert set(loaded) == set(stored)
    assert [name for name in stored if not torch.equal(loaded[name].to(stored[name].dtype), stored[name])] == []
    assert all(name.startswith(PEFT_PREFIX) for name in stored)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == (BASE_NAME, COMMIT)
    assert report.is_served


@pytest.mark.parametrize(("method", "word"), NOT_SERVED.values(), ids=NOT_SERVED.keys())
def test_adapters_that_vllm_cannot_load_or_would_scale_wrongly_are_not_served(base, tmp_path, method, word):
    report = check_adapter(tmp_path, written(base, tmp_path, method), base)
    assert not report.is_served
    assert word in report.text()
    assert report.max_lora_rank is None


@pytest.mark.parametrize(
    ("name", "rank"), [("LoRA", 8), ("same scaling", 8), ("high rank", 64), ("embedding", 8), ("ranks", 16), ("alphas", 8)]
)
def test_the_rank_that_vllm_has_to_be_started_with(base, tmp_path, name, rank):
    report = check_adapter(tmp_path, written(base, tmp_path, LORA[name]), base)
    assert report.text() == f"loads with --max-lora-rank {rank}"
    assert any("embedding" in note for note in report.notes) is (name == "embedding")


@pytest.mark.parametrize(("name", "scale"), [("ranks", "0.888889"), ("alphas", "0.25"), ("same scaling", ""), ("rsLoRA", "")])
def test_scales_that_differ_take_a_vllm_that_knows_them(base, tmp_path, name, scale):
    notes = check_adapter(tmp_path, written(base, tmp_path, LORA[name]), base).notes
    told = [note for note in notes if "use vLLM 0.32 or later" in note]
    assert len(told) == bool(scale)
    assert all(f"the scale {scale} for model.layers.0.self_attn.q_proj and 2 elsewhere" in note for note in told)


def test_a_rank_of_a_pattern_that_no_module_has_counts_for_vllm():
    shapes = {"base_model.model.q_proj.lora_A.weight": (4, 8), "base_model.model.q_proj.lora_B.weight": (8, 4)}
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"k_proj": 100}}
    assert serving_report(settings, shapes).max_lora_rank == 128


@pytest.mark.parametrize(("name", "converts"), FOR_LLAMA_CPP.items())
def test_what_llama_cpp_would_compute_otherwise_is_not_converted(base, tmp_path, name, converts):
    method = LORA.get(name) or NOT_SERVED[name][0]
    assert check_adapter(tmp_path, written(base, tmp_path, method), base).is_for_llama_cpp is converts


def test_a_scale_that_happens_to_be_that_of_the_rank_is_right_for_llama_cpp():
    shapes = {"base_model.model.q_proj.lora_A.weight": (1, 8), "base_model.model.q_proj.lora_B.weight": (8, 1)}
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 8, "use_rslora": True, "alpha_pattern": {"k_proj": 2}}
    assert serving_report(settings, shapes).is_for_llama_cpp


def test_vllm_parses_the_names_as_module_and_factor():
    """Its parser takes the base's prefix off the front, and the factor's name off the end."""
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    good = {
        "base_model.model.model.layers.0.q_proj.lora_A.weight": (4, 8),
        "base_model.model.model.layers.0.q_proj.lora_B.weight": (8, 4),
    }
    assert serving_report(settings, good).is_served
    for wrong in (
        "model.layers.0.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.q_proj.lora_A.default.weight",
        "base_model.model.model.layers.0.q_proj.lora_B.bias",
        "base_model.model.model.embed_tokens.trainable_tokens_delta",
        "base_model.model.lm_head.weight",
    ):
        assert wrong in serving_report(settings, good | {wrong: (4, 8)}).text()
    lonely = {name: shape for name, shape in good.items() if "lora_A" in name}
    assert "has only one of lora_A and lora_B" in serving_report(settings, lonely).text()


@pytest.mark.parametrize("damage", ["missing", "added", "shape", "dtype", "prefix", "base", "revision", "cut"])
def test_an_adapter_that_is_not_what_was_trained_is_refused(base, tmp_path, damage):
    plan = written(base, tmp_path, LORA["LoRA"])
    path, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors = load_file(path)
    name = min(tensors)
    if damage == "missing":
        del tensors[name]
    elif damage == "added":
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(4, 32)
    elif damage == "shape":
        tensors[name] = tensors[name].T.contiguous()
    elif damage == "dtype":
        tensors[name] = tensors[name].half()
    elif damage in {"base", "revision"}:
        settings = json.loads(config.read_text())
        settings["base_model_name_or_path" if damage == "base" else "revision"] = "another"
        config.write_text(json.dumps(settings))
    elif damage == "prefix":
        tensors = {entry.removeprefix(PEFT_PREFIX): tensor for entry, tensor in tensors.items()}
        save_file(tensors, path)
        (tmp_path / "manifest.json").write_text(json.dumps({"tensors": tensor_descriptions(tensors)}))
    if damage in {"missing", "added", "shape", "dtype"}:
        save_file(tensors, path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises((CheckpointError, MergeError)) as caught:
        check_adapter(tmp_path, plan, base)
    assert "adapter_" in str(caught.value)


def test_an_adapter_of_a_release_that_did_not_ask_config_json_is_right(base, tmp_path):
    """It was trained before the operator was upgraded, and is merged afterwards."""
    plan = written(base, tmp_path / "adapter", LORA["LoRA"])
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"name": "pvc://models/base"})})
    named = Path(shutil.copytree(base, tmp_path / "base"))
    (named / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | {"_name_or_path": "a/b"}))
    config = tmp_path / "adapter/adapter_config.json"
    settings = json.loads(config.read_text())
    for name in ("pvc://models/base", "a/b"):
        config.write_text(json.dumps(settings | {"base_model_name_or_path": name}))
        assert check_adapter(tmp_path / "adapter", plan, named).is_served
    config.write_text(json.dumps(settings | {"base_model_name_or_path": "c/d"}))
    with pytest.raises(CheckpointError, match="is 'c/d', but plan and base say 'a/b' or 'pvc://models/base'"):
        check_adapter(tmp_path / "adapter", plan, named)
