"""Element types that the library decides, found without a value of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config

from finetune_trainer.model.load import without_values
from finetune_trainer.verify.model_class import model_builder
from finetune_trainer.verify.skeleton import element_types
from tests.unit.finetune_trainer.merge import tiny


@pytest.fixture(autouse=True)
def no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the files the library would read all of them: hundreds of gigabytes of a large model, twice."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the library opened a file of weights")

    monkeypatch.setattr("transformers.modeling_utils.safe_open", refuse)


@pytest.mark.parametrize("shards", ["1GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("is_named", [True, False], ids=["in config.json", "of the weights"])
def test_a_model_has_one_type(is_named: bool, shards: str, tmp_path: Path) -> None:
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.float16, shards)
    if not is_named:
        config = json.loads((base / "config.json").read_text())
        del config["dtype"]
        (base / "config.json").write_text(json.dumps(config))
    found = element_types(base, model_builder(base))
    assert found.of_model is torch.float16
    assert set(found.of_parameters.values()) == {torch.float16}
    assert "model.layers.1.mlp.down_proj.weight" in found.of_parameters


def test_what_the_library_holds_in_float32_is_known(tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float16).save_pretrained(tmp_path)
    found = element_types(tmp_path, model_builder(tmp_path))
    assert found.of_model is torch.float16
    wide = {name for name, dtype in found.of_parameters.items() if dtype is torch.float32}
    assert wide == {"encoder.block.0.layer.1.DenseReluDense.wo.weight", "decoder.block.0.layer.2.DenseReluDense.wo.weight"}


def test_no_values_are_drawn_for_a_model_without_any_unless_its_code_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("values were drawn")

    monkeypatch.setattr(torch.Tensor, "normal_", refuse)
    with without_values(allow_remote_code=False):
        model = AutoModelForCausalLM.from_config(tiny.llama())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    with pytest.raises(AssertionError, match="values were drawn"), without_values(allow_remote_code=True):
        AutoModelForCausalLM.from_config(tiny.llama())
