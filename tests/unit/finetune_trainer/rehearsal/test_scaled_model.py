"""The twin of any configuration is small, can be built and computed, and keeps what matters."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune_trainer.model.load import load_base_model, load_config
from finetune_trainer.rehearsal.scaled_model import RehearsalPaths, make_scaled_model
from finetune_trainer.small_models.layers import choose_layers
from finetune_trainer.small_models.search import find_small_model
from finetune_trainer.small_models.shrink import shrink
from tests.support.declared_model import declare_model
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.rehearsal.configurations import SIZES, configuration

MOST_PARAMETERS = 6_000_000
WITHOUT_SDPA = {"bloom", "gemma2-9b", "gpt-oss", "gpt-neo", "mamba", "mamba2"}
"""Their code in transformers has no attention through torch's function."""


@pytest.mark.parametrize("name", SIZES)
def test_a_twin_computes_and_is_small(name: str) -> None:
    torch.set_num_threads(1)
    config = configuration(name)
    attention = "eager" if name in WITHOUT_SDPA else "sdpa"
    plan = plan_of(tiny_spec(model={"attention": attention}))
    shrunken, twin = find_small_model(plan, config, config.to_dict())
    assert sum(parameter.numel() for parameter in twin.parameters()) < MOST_PARAMETERS
    assert shrunken.changes, "nothing was shrunk"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert type(twin) is type(model)
    assert twin.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert {type(module) for module in twin.modules()} == {type(module) for module in model.modules()}, "a kind of module is lost"
    assert leaves(twin) == leaves(model), "a kind of parameter is lost"
    unpacked = [
        f"{name} {tuple(module.weight.shape)}"
        for name, module in twin.named_modules()
        if isinstance(module, torch.nn.Linear) and module.weight.numel() % 64 and is_packed(model, name, module)
    ]
    assert not unpacked, "bitsandbytes packs 64 values at a time"


def leaves(model: torch.nn.Module) -> set[str]:
    """Names of parameters without numbers of layers and experts."""
    return {".".join(part for part in name.split(".") if not part.isdigit()) for name, _ in model.named_parameters()}


def is_packed(model: torch.nn.Module, name: str, module: torch.nn.Linear) -> bool:
    """Whether a module of the model with that ending has a size that packs."""
    ending = name.rpartition(".")[2]
    sizes = [
        each.weight.numel() for own, each in model.named_modules() if isinstance(each, torch.nn.Linear) and own.endswith(ending)
    ]
    return bool(sizes) and all(size % 64 == 0 for size in sizes)


def llama(**changes: Any) -> dict[str, Any]:
    return {**configuration("llama-70b").to_dict(), **changes}


@pytest.mark.parametrize(("heads", "key_value"), [(64, 64), (64, 8), (64, 1), (28, 4), (71, 1), (12, 2), (6, 6)])
def test_grouped_heads_stay_grouped(heads: int, key_value: int) -> None:
    config = shrink(llama(num_attention_heads=heads, num_key_value_heads=key_value, hidden_size=heads * 128)).config
    small, small_key_value = config["num_attention_heads"], config["num_key_value_heads"]
    assert small % small_key_value == 0
    assert (small > small_key_value) == (heads > key_value)
    assert (small_key_value == 1) == (key_value == 1)
    assert config["hidden_size"] == small * config["head_dim"]
    assert config["hidden_size"] % 64 == 0


def test_every_kind_of_layer_stays_and_numbers_follow() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = {**llama(), "num_hidden_layers": 48, "layer_types": kinds * 8, "mlp_only_layers": [11]}
    layers = choose_layers(config)
    assert layers is not None
    assert layers.kept == (0, 5, 11)
    small = shrink(config).config
    assert small["num_hidden_layers"] == 3
    assert small["layer_types"] == ["sliding_attention", "full_attention", "full_attention"]
    assert small["mlp_only_layers"] == [2]
    assert [layers.kept_layer_of(number) for number in (0, 4, 5, 11, 47, 48)] == [0, 0, 1, 2, 1, None]


def test_layers_that_come_every_so_often_are_reached() -> None:
    config = {**configuration("qwen3-moe-235b").to_dict(), "decoder_sparse_step": 4, "mlp_only_layers": []}
    assert shrink(config).config["num_hidden_layers"] == 4


def test_layers_that_are_all_kept_keep_their_numbers() -> None:
    layers = shrink(llama()).layers
    assert layers is not None
    assert layers.count < 80
    shrunken = shrink(llama(), kept=["num_hidden_layers"])
    assert (shrunken.config["num_hidden_layers"], shrunken.layers) == (80, None)
    cut = shrink(
        {**llama(), "vision_config": {"num_hidden_layers": 24, "hidden_size": 64}}, kept=["vision_config.num_hidden_layers"]
    )
    assert cut.layers is not None, "the text part has fewer"


def test_leading_dense_layers_are_counted_anew() -> None:
    small = shrink({**configuration("deepseek-v3").to_dict(), "first_k_dense_replace": 3, "mlp_layer_types": None}).config
    assert small["first_k_dense_replace"] == 1
    assert small["num_hidden_layers"] == 2
    assert small["num_experts_per_tok"] == configuration("deepseek-v3").num_experts_per_tok


def test_tokens_that_are_named_get_rows_of_their_own() -> None:
    named = [7, 127999, 90000, 128009]
    shrunken = shrink(llama(), named)
    tokens = shrunken.tokens
    twins = [tokens.kept_token_of(token) for token in [*named, 128000, 128001]]
    assert len(set(twins)) == 6
    assert all(0 <= token < tokens.size for token in twins)
    assert tokens.size % 64 == 128256 % 64
    assert shrunken.config["eos_token_id"] == [tokens.kept_token_of(128001), tokens.kept_token_of(128009)]
    assert twins[0] == 7


def test_what_is_no_size_stays() -> None:
    before = llama(attention_bias=True, mlp_bias=True, hidden_act="gelu", rms_norm_eps=1e-3, tie_word_embeddings=True)
    after = shrink(before).config
    sized = {change.field for change in shrink(before).changes}
    assert {name: value for name, value in after.items() if name not in sized} == {
        name: value for name, value in before.items() if name not in sized
    }
    assert {"attention_bias", "mlp_bias", "hidden_act", "rope_parameters", "dtype"} & sized == set()


def test_shrinking_again_changes_nothing() -> None:
    for name in SIZES:
        once = shrink(configuration(name).to_dict())
        again = Counter(change.field for change in shrink(once.config).changes)
        assert not again, name


def test_a_configuration_with_unknown_names_is_given_its_sizes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest twin of this one cannot be built, so the search has to go on."""
    config = configuration("zamba")
    with pytest.raises(ValueError, match="tie"):
        AutoModelForCausalLM.from_config(type(config).from_dict(shrink(config.to_dict()).config))
    shrunken, twin = find_small_model(plan_of(tiny_spec()), config, config.to_dict())
    assert isinstance(shrunken.layers and shrunken.layers.count, int)
    assert sum(parameter.numel() for parameter in twin.parameters()) < MOST_PARAMETERS


def test_the_twin_of_a_text_part_is_found_where_transformers_knows_it_by_the_whole_alone(tmp_path: Path) -> None:
    """Llama 3.2 Vision: its text part's own configuration names no causal language model."""
    text = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    text |= {
        "num_key_value_heads": 2,
        "cross_attention_layers": [3],
        "vocab_size": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    declare_model(tmp_path / "model", {"model_type": "mllama", "text_config": text, "vision_config": {}, "dtype": "bfloat16"})
    (tmp_path / "places").mkdir()
    places = RehearsalPaths(tmp_path / "places")
    twin = make_scaled_model(
        plan_of(tiny_spec(method={"type": "LoRA", "lora": {"targetModules": ["o_proj"]}})), tmp_path / "model", places
    )
    assert load_config(twin.plan, places.model).model_type == "mllama"
    made = load_base_model(twin.plan, places.model, torch.device("cpu"))
    assert type(made).__name__ == "MllamaForCausalLM"
    assert made.config.hidden_size < text["hidden_size"]
