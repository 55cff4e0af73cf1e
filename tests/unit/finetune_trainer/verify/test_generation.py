"""Continuations through streamed weights are those of the libraries' own generation, at a price that is known before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedConfig

from finetune_trainer.verify import streaming
from finetune_trainer.verify.generation import Budget, Continued, TooLargeError, continuations
from tests.unit.finetune_trainer.merge import tiny

PROMPTS = [[1, 5, 9, 200, 17], [2, 3]]
BUDGET = Budget(most_tokens=6, least_tokens=2, most_bytes=1 << 30)
LINEAR = {"target_modules": ["q_proj", "v_proj", "down_proj"]}


def generated(model: Any, stop: int | None = None) -> list[list[int]]:
    """By transformers, one prompt at a time."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": stop, "pad_token_id": 0}
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (tiny.llama(), LINEAR),
        (tiny.llama(), {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
        (tiny.gpt2(), {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        (tiny.qwen2(), LINEAR),
    ],
    ids=["llama", "embeddings", "gpt2", "qwen2"],
)
def test_answers_are_those_of_the_libraries(
    config: PreTrainedConfig, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MAX_WHOLE_BYTES", 0)
    base = tiny.save_base(tmp_path / "base", config, torch.float32)
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(**{"r": 8, "lora_alpha": 64, **settings}))
    model = AutoModelForCausalLM.from_pretrained(base)
    of_base = generated(model)
    of_tuned = generated(PeftModel.from_pretrained(model, str(adapter)))
    num_tokens, found = continuations(Continued(base, adapter, None), PROMPTS, (), BUDGET)
    assert num_tokens == 6
    assert found == list(zip(of_base, of_tuned, strict=True))
    assert of_base != of_tuned


def test_a_wholly_trained_model_is_read_for_itself_and_an_answer_ends_at_a_stop_token(tmp_path: Path) -> None:
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.float32)
    torch.manual_seed(3)
    tuned = tiny.save_base(tmp_path / "tuned", tiny.llama(), torch.float32)
    expected = generated(AutoModelForCausalLM.from_pretrained(tuned))
    stop = expected[0][2]
    _, found = continuations(Continued(base, None, tuned), PROMPTS, {stop}, BUDGET)
    assert [answer for _, answer in found] == generated(AutoModelForCausalLM.from_pretrained(tuned), stop)
    assert found[0][1] == expected[0][: expected[0].index(stop) + 1]


def test_a_model_too_large_for_the_budget_gives_fewer_tokens_or_none(tmp_path: Path) -> None:
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.float32)
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    models = Continued(base, tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(r=4, **LINEAR)), None)
    num_tokens, found = continuations(models, PROMPTS, (), Budget(6, 2, 7 * size))
    assert num_tokens == 3
    assert {len(answer) for pair in found for answer in pair} == {3}
    with pytest.raises(TooLargeError, match="would be read for each token"):
        continuations(models, PROMPTS, (), Budget(6, 2, 4 * size - 1))


def test_the_tuned_model_stands_for_an_adapter_that_there_is_not(tmp_path: Path) -> None:
    base = tiny.save_base(tmp_path / "base", tiny.llama(), torch.float32)
    with pytest.raises(ValueError, match="neither an adapter nor a tuned model"):
        continuations(Continued(base, None, None), PROMPTS, (), BUDGET)
    _, found = continuations(Continued(base, None, base), PROMPTS, (), BUDGET)
    assert [first == second for first, second in found] == [True, True]
