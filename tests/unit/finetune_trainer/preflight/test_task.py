"""What is offered as a base has to be a model that predicts the next token; libraries load much else as one without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from finetune_trainer.inspection.module_use import observe_use
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.model_process import check_model
from finetune_trainer.preflight.small_model import check_small_model
from finetune_trainer.preflight.task import check_task
from tests.support.declared_model import declare_model
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.preflight.test_architecture import SIZES

PLAN = plan_of(tiny_spec(merge={"enabled": False}, data={"packing": False}))
NO_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


def configured(directory: Path, kind: str, **changes: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **NO_TOKENS, **changes}))
    return directory


@pytest.mark.parametrize(
    ("kind", "architecture", "said"),
    [
        ("llama", "LlamaForSequenceClassification", "another task"),
        ("llama", "LlamaForTokenClassification", "another task"),
        ("gpt2", "GPT2ForSequenceClassification", "another task"),
        ("bert", "BertForMaskedLM", "another task"),
        ("roberta", "RobertaForQuestionAnswering", "another task"),
        ("t5", "T5ForConditionalGeneration", "encoder-decoder"),
        ("bart", "BartForConditionalGeneration", "encoder-decoder"),
        ("llava", "LlavaForConditionalGeneration", "no causal language model"),
        ("vit", "ViTForImageClassification", "no causal language model"),
    ],
)
def test_a_model_of_another_task_is_refused_by_its_class(tmp_path: Path, kind: str, architecture: str, said: str) -> None:
    (finding,) = check_task(ModelInspection(PLAN, configured(tmp_path / "model", kind, architectures=[architecture])))
    assert (finding.rule, finding.severity, finding.field) == ("model-of-another-task", "error", "spec.model.source")
    assert finding.value == architecture
    assert said in finding.message
    assert "ForCausalLM" in finding.fix


def test_it_is_refused_by_its_class_also_if_it_cannot_be_built(tmp_path: Path) -> None:
    """Files with two tensors that may be heads let the library be asked about ties, for which it builds the model."""
    kind = "BartForConditionalGeneration"
    sizes = {"hidden_size": 10, "num_attention_heads": 4, "tie_word_embeddings": True}
    directory = configured(tmp_path / "model", "bart", architectures=[kind], vocab_size=8, **sizes)
    heads = {name: torch.zeros(8, 10) for name in ("model.shared.weight", "lm_head.weight")}
    save_file(heads, directory / "model.safetensors", {"format": "pt"})
    (finding,) = check_task(ModelInspection(PLAN, directory))
    assert (finding.rule, finding.value) == ("model-of-another-task", kind)


@pytest.mark.parametrize(
    ("kind", "architectures"),
    [
        ("llama", ["LlamaForCausalLM"]),
        ("llama", ["LLaMAForCausalLM"]),
        ("llama", ["LlamaModel"]),
        ("gpt2", ["GPT2LMHeadModel"]),
        ("gemma3", ["Gemma3ForConditionalGeneration"]),
        ("llama", None),
        ("llama", []),
        ("llama", [7]),
    ],
)
def test_a_causal_language_model_is_none(tmp_path: Path, kind: str, architectures: Any) -> None:
    assert check_task(ModelInspection(PLAN, configured(tmp_path / "model", kind, architectures=architectures))) == []


def test_of_a_model_of_images_and_text_it_is_said_that_text_alone_is_trained(tmp_path: Path) -> None:
    directory = configured(tmp_path / "model", "qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"], text_config=SIZES)
    (finding,) = check_task(ModelInspection(PLAN, directory))
    assert (finding.rule, finding.severity) == ("model-of-more-than-text", "warning")
    assert "Qwen3_5ForCausalLM" in finding.message


@pytest.mark.parametrize("is_decoder", [True, False])
def test_a_model_that_looks_ahead_is_refused_whatever_its_class_is_called(tmp_path: Path, is_decoder: bool) -> None:
    config = AutoConfig.for_model("bert", **SIZES, **NO_TOKENS, is_decoder=is_decoder).to_dict()
    declare_model(tmp_path / "model", config | {"architectures": ["BertLMHeadModel"], "dtype": "bfloat16"})
    _, findings = check_model(PLAN, tmp_path / "model")
    assert [finding.rule for finding in findings if finding.severity == "error"] == ["model-not-causal"] * (not is_decoder)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neox", "bloom", "mamba"])
def test_decoders_do_not_look_ahead(tmp_path: Path, kind: str) -> None:
    config = AutoConfig.for_model(kind, **SIZES, **NO_TOKENS).to_dict()
    declare_model(tmp_path / "model", config | {"dtype": "bfloat16"})
    observed = observe_use(PLAN, tmp_path / "model")
    assert observed is not None
    assert check_small_model(ModelInspection(PLAN, tmp_path / "model", observed=observed)) == []


def test_an_encoder_of_which_transformers_makes_a_causal_model_is_refused(tmp_path: Path) -> None:
    sizes = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 264, "max_position_embeddings": 64}
    config = AutoConfig.for_model("xlm", **sizes).to_dict()
    declare_model(tmp_path / "model", config | {"architectures": ["XLMWithLMHeadModel"], "dtype": "float32"})
    _, findings = check_model(PLAN, tmp_path / "model")
    assert [finding.rule for finding in findings if finding.severity == "error"] == ["model-not-causal"]


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    directory = configured(tmp_path / "model", "llama")
    (directory / "adapter_config.json").write_text("{}")
    (finding,) = check_task(ModelInspection(PLAN, directory))
    assert (finding.rule, finding.value) == ("model-holds-adapter", "adapter_config.json")


@pytest.mark.parametrize(
    ("name", "value"), [("pad_token_id", 264), ("pad_token_id", 5000), ("bos_token_id", 264), ("eos_token_id", [0, 264])]
)
def test_a_special_token_beyond_the_embedding_is_said(tmp_path: Path, name: str, value: Any) -> None:
    (finding,) = check_task(ModelInspection(PLAN, configured(tmp_path / "model", "llama", **{name: value})))
    assert (finding.rule, finding.severity) == ("special-token-beyond-vocabulary", "warning")
    assert name in finding.message
    assert "264 rows" in finding.message


def test_special_tokens_with_rows_are_fine(tmp_path: Path) -> None:
    ids = {"pad_token_id": -1, "eos_token_id": [0, 263], "bos_token_id": 263}
    assert check_task(ModelInspection(PLAN, configured(tmp_path / "model", "llama", **ids))) == []
