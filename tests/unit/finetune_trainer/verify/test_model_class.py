"""The class that a merge is verified with: the one in which PEFT finds the adapter's modules."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig, PromptTuningConfig
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_trainer.roles import merge_command
from finetune_trainer.verify.model_class import UnverifiableModelError, model_builder
from tests.unit.finetune_trainer.merge import tiny

TEXT = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TARGETS = r".*layers.*\.(q_proj|v_proj|gate_proj)"


def qwen35() -> PreTrainedModel:
    text = {**TEXT, "num_hidden_layers": 4, "head_dim": 16, "eos_token_id": 2, "tie_word_embeddings": False}
    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text | linear, vision_config=vision, tie_word_embeddings=False)
    return Qwen3_5ForConditionalGeneration(config)


def qwen25vl() -> PreTrainedModel:
    text = {
        **TEXT,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def merge(base: Path, adapter: Path, output: Path, *more: str) -> int:
    return merge_command.main(["--base", str(base), "--adapter", str(adapter), "--output", str(output), *more])


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole model", "text model"])
def test_class_of_an_adapter_of_a_model_of_text_and_images(tmp_path: Path, is_whole: bool) -> None:
    torch.manual_seed(3)
    whole = qwen35()
    whole.save_pretrained(tmp_path / "base")
    auto = type(whole) if is_whole else AutoModelForCausalLM
    adapter = tiny.save_adapter(tmp_path / "adapter", tmp_path / "base", LoraConfig(r=4, target_modules=TARGETS), auto=auto)
    with torch.device("meta"):
        built = model_builder(tmp_path / "base", [adapter])(whole.config)
    assert type(built).__name__ == ("Qwen3_5ForConditionalGeneration" if is_whole else "Qwen3_5ForCausalLM")
    assert merge(tmp_path / "base", adapter, tmp_path / "merged") == 0
    report = json.loads((tmp_path / "merged.verification.json").read_text())
    assert report["passed"] is True
    assert report["logits"]["effect_mean_kl"] > 1e-4, "PEFT has put the adapter into the model"


def test_model_without_a_class_for_text_is_verified_with_its_own(tmp_path: Path) -> None:
    torch.manual_seed(3)
    qwen25vl().save_pretrained(tmp_path / "base")
    settings = LoraConfig(r=4, target_modules=TARGETS)
    adapter = tiny.save_adapter(tmp_path / "adapter", tmp_path / "base", settings, auto=Qwen2_5_VLForConditionalGeneration)
    assert merge(tmp_path / "base", adapter, tmp_path / "merged") == 0
    report = json.loads((tmp_path / "merged.verification.json").read_text())
    assert report["passed"] is True
    assert report["logits"]["effect_mean_kl"] > 1e-4


def test_model_that_cannot_be_verified_is_refused_before_the_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.bfloat16)
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(r=4, target_modules=["q_proj"]))
    config = json.loads((base / "config.json").read_text())
    own_code = {"model_type": "my_llama", "auto_map": {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.My"}}
    (base / "config.json").write_text(json.dumps(config | own_code))
    (base / "code.py").write_text("raise SystemExit('foreign code has run')")
    assert merge(base, adapter, tmp_path / "merged") == EXIT_CODES[FailureClass.USER_MODEL]
    out, err = capsys.readouterr()
    assert out == "", "nothing was merged"
    assert "its code (auto_map in config.json) is not run" in err
    assert "--no-verify" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    assert merge(base, adapter, tmp_path / "merged", "--no-verify") == 0


def test_adapter_of_which_no_class_has_a_module_is_refused(tmp_path: Path) -> None:
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.bfloat16)
    other = tiny.save_base(tmp_path / "other", tiny.gpt2(), torch.bfloat16)
    adapter = tiny.save_adapter(tmp_path / "adapter", other, LoraConfig(r=4, target_modules=["c_attn"]))
    with pytest.raises(UnverifiableModelError, match=r"LlamaForCausalLM has no module for transformer\.h\.0\.attn\.c_attn"):
        model_builder(base, [adapter])


@pytest.mark.parametrize(
    "settings", [LoraConfig(r=4, target_modules=["query"]), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)]
)
def test_classifier_and_virtual_tokens_are_refused_before_the_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: PeftConfig
) -> None:
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    classifier = BertForSequenceClassification(BertConfig(vocab_size=320, **sizes))
    is_prompt = isinstance(settings, PromptTuningConfig)
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.bfloat16) if is_prompt else tmp_path / "base"
    if is_prompt:
        adapter = tiny.save_adapter(tmp_path / "adapter", base, settings)
    else:
        classifier.save_pretrained(base)
        adapter = tiny.save_adapter(tmp_path / "adapter", base, settings, auto=BertForSequenceClassification)
    assert merge(base, adapter, tmp_path / "merged") != 0
    out, err = capsys.readouterr()
    assert out == "", "nothing was merged"
    assert ("virtual tokens" if is_prompt else "its files do not hold cls.predictions.bias of BertLMHeadModel") in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
