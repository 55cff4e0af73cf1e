"""Adapters that are loaded, loaded twice, named badly or saved from elsewhere: what PEFT says, if anything."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.pitfalls.one_process import VOCABULARY, llama, tokens


def config(**settings) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=4, **{"target_modules": ["q_proj"], **settings})


def trained_adapter(directory: Path, **settings) -> Path:
    model = get_peft_model(llama(), config(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(directory)
    return directory


def trainable(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def said(body) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        body()
    return "\n".join(str(each.message) for each in found)


def test_an_adapter_is_loaded_frozen(tmp_path):
    adapter = trained_adapter(tmp_path)
    assert trainable(PeftModel.from_pretrained(llama(), adapter)) == 0
    assert trainable(PeftModel.from_pretrained(llama(), adapter, is_trainable=True)) > 0
    assert trainable(get_peft_model(llama(), config(inference_mode=True))) == 0


def test_a_second_adapter_is_attached_with_a_warning():
    model = get_peft_model(llama(), config())
    assert "second time" in said(lambda: get_peft_model(model, config()))


def test_unknown_fields_are_dropped_with_a_warning(tmp_path):
    adapter = trained_adapter(tmp_path)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "a_feature_of_tomorrow": True}))
    assert "Unexpected keyword arguments" in said(lambda: PeftModel.from_pretrained(llama(), adapter))


def test_a_grown_vocabulary_does_not_load_into_the_base_as_it_was(tmp_path):
    base = llama()
    base.resize_token_embeddings(VOCABULARY + 8)
    get_peft_model(base, config(modules_to_save=["embed_tokens"])).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(llama(), tmp_path)
    grown = llama()
    grown.resize_token_embeddings(VOCABULARY + 8)
    assert PeftModel.from_pretrained(grown, tmp_path)


def test_a_prompt_is_not_trained_on(tmp_path):
    get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Cannot set a prompt learning adapter to trainable"):
        PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)


def test_a_prompt_from_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer_name_or_path"):
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, prompt_tuning_init="TEXT", prompt_tuning_init_text="a")


def test_two_adapters_cannot_both_train_biases():
    model = get_peft_model(llama(), config(bias="all"))
    with pytest.raises(ValueError, match="bias"):
        model.add_adapter("other", config(bias="all"))


def test_an_adapter_named_like_its_own_prefix():
    assert "prefix" in said(lambda: get_peft_model(llama(), config(), adapter_name="lora"))


def test_a_compiled_models_names_do_not_fit(tmp_path):
    model = get_peft_model(llama(), config())
    compiled = torch.compile(model)
    compiled.save_pretrained(tmp_path / "names", state_dict=compiled.state_dict())
    with safe_open(tmp_path / "names" / "adapter_model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if name.startswith("base_model.model.model")]  # noqa: SIM118 - no mapping
    model.save_pretrained(tmp_path / "inferred")
    with safe_open(tmp_path / "inferred" / "adapter_model.safetensors", "pt") as file:
        assert len(list(file.keys())) == 4


def test_projections_can_be_left_out_of_a_vera_adapter(tmp_path):
    for saved in (True, False):
        settings = VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], save_projection=saved)
        get_peft_model(llama(), settings).save_pretrained(tmp_path / str(saved))
        with safe_open(tmp_path / str(saved) / "adapter_model.safetensors", "pt") as file:
            assert any("vera_A" in name for name in file.keys()) is saved  # noqa: SIM118 - no mapping


def test_the_svd_of_two_adapters_is_made_in_16_bits_too():
    model = get_peft_model(llama(), config())
    model.add_adapter("other", config())
    model.base_model.model.half()
    model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "sum", combination_type="svd")
    assert "sum" in model.peft_config


def test_shared_tensors_are_no_safetensors(tmp_path):
    weight = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"one": weight, "other": weight}, tmp_path / "x.safetensors")


def test_a_head_that_was_tied_is_untied_by_the_merge():
    model = get_peft_model(llama(tie_word_embeddings=True), config(modules_to_save=["lm_head"]))
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "modules_to_save" in name).add_(1.0)
    merged = model.merge_and_unload()
    assert not torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)


def test_transposed_layers_are_recognised():
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY))
    settings = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=False)
    assert "fan_in_fan_out" in said(lambda: get_peft_model(gpt, settings))


def test_trained_biases_stay_when_the_adapter_is_off():
    model = get_peft_model(llama(attention_bias=True), config(bias="lora_only"))
    plain = llama(attention_bias=True)(input_ids=tokens()).logits
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("q_proj.base_layer.bias") and p.requires_grad).add_(1.0)
        with model.disable_adapter():
            assert not torch.allclose(model(input_ids=tokens()).logits, plain)
