"""A base whose config.json ties the output head to the embeddings, and whose files hold other values of the head.

transformers loads both as they are stored, so they are trained, merged and verified like that.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune_job.failures import Outcome
from finetune_trainer.context import RunContext
from finetune_trainer.model.load import build_on_meta, load_base_model
from finetune_trainer.model.load_shards import unloaded_base_model
from finetune_trainer.roles.merge import merge
from finetune_trainer.roles.preflight import run
from tests.support.forked_ranks import run_gang
from tests.support.tiny_model import plan_of, run_context, tiny_spec, write_tiny_llama
from tools import quickstart

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CPU = torch.device("cpu")


def two_heads(directory: Path) -> Path:
    write_tiny_llama(directory, torch.float32, tie_word_embeddings=False)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    return directory


def job(root: Path, **changes: Any) -> RunContext:
    for claim in ("models", "data", "results", "workspace"):
        (root / claim).mkdir(parents=True)
    two_heads(root / "models/tiny")
    for name in ("train", "validation"):
        pairs = [{"prompt": f"{name} {number}", "completion": f"A {number}"} for number in range(40)]
        quickstart.write_json_lines(root / "data" / f"{name}.jsonl", pairs)
    context = run_context(root, tiny_spec(preflight={"rehearsal": "Skip"}) | changes)
    shutil.rmtree(context.workspace.prepared)  # preflight prepares the records
    return context


def test_it_is_loaded_as_transformers_does(tmp_path: Path) -> None:
    directory, plan = two_heads(tmp_path / "base"), plan_of(tiny_spec())
    expected = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert not torch.equal(expected[HEAD], expected[EMBEDDING])
    unloaded = unloaded_base_model(plan, directory, CPU)
    assert unloaded is not None
    for model in (unloaded.module, load_base_model(plan, directory, CPU), build_on_meta(plan, directory)):
        assert model.lm_head.weight is not model.model.embed_tokens.weight
        assert model.config.tie_word_embeddings is False
    assert unloaded.headers[HEAD].name == HEAD
    # A head that is stored, and is the same, is tied.
    weights = AutoModelForCausalLM.from_pretrained(directory)
    weights.lm_head.weight.data.copy_(weights.model.embed_tokens.weight.data)
    weights.save_pretrained(directory)
    assert build_on_meta(plan, directory).config.tie_word_embeddings is True


def test_everybody_takes_copies_in_two_element_types_for_two_heads(tmp_path: Path) -> None:
    """As merge and verification do, which compare what is stored; transformers compares what it has converted."""
    directory, plan = two_heads(tmp_path / "base"), plan_of(tiny_spec())
    weights = directory / "model.safetensors"
    stored = load_file(weights)
    embedding = stored[EMBEDDING].bfloat16()
    save_file(stored | {EMBEDDING: embedding.float(), HEAD: embedding}, weights, {"format": "pt"})
    unloaded = unloaded_base_model(plan, directory, CPU)
    assert unloaded is not None
    for model in (unloaded.module, load_base_model(plan, directory, CPU), build_on_meta(plan, directory)):
        assert model.lm_head.weight is not model.model.embed_tokens.weight
        assert model.config.tie_word_embeddings is False


def test_a_full_fine_tuning_keeps_the_head(tmp_path: Path) -> None:
    slow = tiny_spec()["training"] | {"learningRate": "1e-5"}
    context = job(tmp_path, method={"type": "Full"}, training=slow)
    assert run(context).outcome is Outcome.SUCCEEDED
    before = AutoModelForCausalLM.from_pretrained(context.source_model).state_dict()
    assert set(run_gang(context)) == {0}
    assert merge(context).outcome is Outcome.SUCCEEDED
    after = AutoModelForCausalLM.from_pretrained(context.output.merged).state_dict()
    for name in (HEAD, EMBEDDING):
        assert not torch.equal(after[name], before[name])
        assert torch.allclose(after[name], before[name], atol=1e-3)


@pytest.mark.parametrize(
    "method",
    [{"type": "LoRA", "lora": {"trainableTokenIndices": [65]}}, {"type": "TrainableTokens", "settings": {"tokenIndices": [65]}}],
)
def test_rows_are_not_trained_of_a_base_that_peft_takes_for_tied(tmp_path: Path, method: dict[str, Any]) -> None:
    context = job(tmp_path, method=method)
    findings = {finding.rule: finding for finding in run(context).findings}
    found = findings["token-rows-with-two-heads"]
    assert (found.severity, found.value) == ("error", "tie_word_embeddings: true")
    # What PEFT does where nobody refuses it.
    base = AutoModelForCausalLM.from_pretrained(context.source_model)
    base.config.tie_word_embeddings = False
    trained = get_peft_model(base, LoraConfig(target_modules=["q_proj"], trainable_token_indices=[65]))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "tokens_delta" in name:
                parameter.add_(1.0)
    trained.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[65, 66]])
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(context.source_model), tmp_path / "adapter")
    assert not torch.allclose(loaded(input_ids=ids).logits, trained(input_ids=ids).logits)
    # The fix.
    config = context.source_model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    assert "token-rows-with-two-heads" not in {finding.rule for finding in run(context).findings}
