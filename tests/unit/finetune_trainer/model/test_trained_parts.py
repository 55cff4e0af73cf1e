"""What is trained next to low-rank matrices: rows of embeddings, stacked experts, whole modules, and either side of a tied
weight.

On two ranks and loaded shard by shard, against transformers and PEFT in one process; then as PEFT loads it, and as it is merged.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, MixtralConfig

from finetune_trainer.errors import ConfigError
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.invariants import check_magnitudes, has_learnt
from finetune_trainer.model.wrap_plan import unit_names
from tests.support.cases import table
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama, write_tokenizer
from tests.unit.finetune_trainer.model.adapted_gang import (
    AdapterCase,
    Trained,
    load,
    logits_of,
    save_adapter,
    train_in_gang,
    train_plainly,
)
from tests.unit.finetune_trainer.train.recorded_steps import distance

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = table(__file__, "CASES")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {
        # Without a padding token, whose row of zeros DoRA refuses.
        "tied": write_tiny_llama(root / "tied", tie_word_embeddings=True, pad_token_id=None),
        "untied": write_tiny_llama(root / "untied", pad_token_id=None),
        "experts": write_tiny_mixtral(root / "experts"),
    }


def write_tiny_mixtral(directory: Path) -> Path:
    torch.manual_seed(7)
    config = MixtralConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        eos_token_id=256,
        pad_token_id=256,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, save_original_format=False)
    write_tokenizer(directory)
    return directory


def case_of(bases: dict[str, Path], name: str) -> AdapterCase:
    base, kind, lora, fsdp = CASES[name]
    return AdapterCase(bases[base], {"type": kind, "lora": {"r": 4, **lora}}, fsdp)


@pytest.fixture(scope="module")
def found(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return train_in_gang({name: case_of(bases, name) for name in CASES}, tmp_path_factory.mktemp("gang"))


@pytest.mark.parametrize("name", CASES)
def test_gradients_adapter_and_merge_are_those_of_peft_alone(
    bases: dict[str, Path], found: dict[str, Trained], tmp_path: Path, name: str
) -> None:
    case = case_of(bases, name)
    plain, expected = train_plainly(load(case.base), case)
    for gradients, wanted in zip(found[name].gradients, expected.gradients, strict=True):
        assert gradients.keys() == wanted.keys()
        for parameter, gradient in wanted.items():
            assert distance(gradients[parameter], gradient) <= 3e-6, parameter
    adapter = save_adapter(case, found[name], tmp_path / "adapter")
    logits = logits_of(PeftModel.from_pretrained(load(case.base), adapter))
    assert torch.allclose(logits, logits_of(plain), atol=1e-5, rtol=0)
    merge_adapter(MergeOptions(case.base, (adapter,), tmp_path / "merged", None, 10**9))
    assert torch.allclose(logits_of(load(tmp_path / "merged")), logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("target", ["embed_tokens", "q_proj"])
def test_an_adapter_that_learns_is_seen_wherever_its_zeros_stand(bases: dict[str, Path], target: str) -> None:
    """Of a linear layer's adapter B starts at zero, of an embedding's A."""
    method = {"type": "LoRA", "lora": {"r": 4, "targetModules": [target]}}
    adapted = attach(load(bases["untied"]), plan_of({**tiny_spec(), "method": method}))
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert not has_learnt(trained.items())
    adapted(input_ids=torch.tensor([[3, 9, 44]]), labels=torch.tensor([[3, 9, 44]])).loss.backward()
    torch.optim.SGD(trained.values(), lr=1.0).step()
    assert has_learnt(trained.items())


@pytest.mark.parametrize(
    ("base", "kind", "named", "reason"),
    [("tied", "LoRA", "Embedding", "shares a weight with"), ("untied", "DoRA", "Linear", "weights without a call")],
)
def test_a_class_whose_modules_cannot_be_units_is_refused(
    bases: dict[str, Path], base: str, kind: str, named: str, reason: str
) -> None:
    case = AdapterCase(bases[base], {"type": kind, "lora": {"r": 4}}, {"transformerLayerClsToWrap": [named]})
    model = attach(load(case.base), case.plan())
    with pytest.raises(ConfigError, match=reason):
        unit_names(model, case.plan().parallelism.fsdp)


def test_pefts_policy_leaves_weights_that_are_tied_to_each_other_in_one_unit(bases: dict[str, Path]) -> None:
    names = {}
    for base in ("tied", "untied"):
        case = AdapterCase(bases[base], {"type": "Full"}, {"version": 1, "peftWrapPolicy": True})
        names[base] = set(unit_names(load(case.base), case.plan().parallelism.fsdp))
    assert names["untied"] - names["tied"] == {"model.embed_tokens", "lm_head"}
    assert "model.norm" in names["tied"]


@pytest.mark.parametrize("init", ["ZeroB", "orthogonal"])
def test_dora_on_a_row_of_zeros_is_refused(tmp_path: Path, init: str) -> None:
    """B @ A of orthogonal factors is zero, too; what float32 leaves of it in the row is rounding."""
    lora = {"targetModules": ["lm_head"], "initLoraWeights": init}
    case = AdapterCase(write_tiny_llama(tmp_path / "base", tie_word_embeddings=True), {"type": "DoRA", "lora": lora})
    with pytest.raises(ConfigError, match=r"lm_head has a row of zeros \(number 256\)"):
        check_magnitudes(attach(load(case.base), case.plan()))


def test_dora_on_orthogonal_factors_that_were_rounded_to_16_bits_is_not(tmp_path: Path) -> None:
    """Their product is far above the rounding of the float32 that norms are computed in: gradients are those of PEFT alone."""
    lora = {"targetModules": ["lm_head"], "initLoraWeights": "orthogonal"}
    case = AdapterCase(write_tiny_llama(tmp_path / "base", tie_word_embeddings=True), {"type": "DoRA", "lora": lora})
    check_magnitudes(attach(load(case.base).bfloat16(), case.plan()))
