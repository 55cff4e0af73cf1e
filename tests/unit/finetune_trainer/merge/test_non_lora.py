"""Adapters of methods outside LoRA's family merge with PEFT's bits, or the merge is refused with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from finetune_job.api.method import MethodType
from finetune_job.method_settings import peft_fields
from finetune_job.methods import METHODS, Family, supported
from finetune_trainer.merge.merge_adapter import MergeOptions, MergeReport, merge_adapter
from finetune_trainer.merge.non_lora import CHANGED_PARAMETERS
from finetune_trainer.model.adapters import config_class
from finetune_trainer.weights.errors import AdapterTensorError, MergeError, UnsupportedAdapterError
from tests.support import method_settings
from tests.unit.finetune_trainer.merge import tiny

SETTINGS: dict[str, dict[str, Any]] = {**method_settings.SETTINGS, "TrainableTokens": {"tokenIndices": [3, 300, 4]}}
MERGED = [kind.value for kind in supported(Family.OTHER)]
ON_CONV1D = ["VeRA", "IA3", "LNTuning"]
"""Methods for which PEFT also has layers for GPT-2's projections."""
BASES: dict[str, Callable[[], PreTrainedConfig]] = {"llama": lambda: tiny.llama(attention_bias=True), "gpt2": tiny.gpt2}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def base(model: str, dtype: str) -> Path:
        if (model, dtype) not in made:
            made[model, dtype] = tiny.save_base(
                tmp_path_factory.mktemp("base") / "model", BASES[model](), getattr(torch, dtype), "150KB"
            )
        return made[model, dtype]

    return base


def save_adapter(directory: Path, base: Path, kind: MethodType, settings: dict[str, Any] | None = None, **peft: Any) -> Path:
    """Save an adapter whose trainable tensors differ from their initial values, as after training."""
    values, wrong = peft_fields(kind, SETTINGS.get(kind.value, {}) if settings is None else settings)
    assert wrong == []
    torch.manual_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), config_class(kind)(task_type="CAUSAL_LM", **(values | peft))
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, dtype=torch.float32).to(parameter.dtype))
    return tiny.save_peft(model, directory)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def merge(base: Path, adapter: Path, output: Path, dtype: str | None = None) -> tuple[MergeReport, dict[str, torch.Tensor]]:
    report = merge_adapter(MergeOptions(base=base, adapters=(adapter,), output=output, dtype=dtype, max_shard_bytes=400_000))
    return report, stored(output)


def assert_pefts_bits(tmp_path: Path, base: Path, adapter: Path) -> None:
    report, merged = merge(base, adapter, tmp_path / "merged")
    reference = tiny.peft_merged(base, adapter)
    tied = json.loads((base / "config.json").read_text()).get("tie_word_embeddings", True)
    assert set(merged) == set(reference) - ({"lm_head.weight"} if tied else set())
    assert [n for n, t in merged.items() if t.dtype != reference[n].dtype or not torch.equal(t, reference[n])] == []
    untouched = stored(base)
    assert sum(not torch.equal(tensor, untouched[name]) for name, tensor in merged.items()) == report.num_changed_tensors > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("method", MERGED)
def test_every_tensor_has_pefts_bits(method: str, dtype: str, bases: Callable[[str, str], Path], tmp_path: Path) -> None:
    base = bases("llama", dtype)
    assert_pefts_bits(tmp_path, base, save_adapter(tmp_path / "adapter", base, MethodType(method)))


@pytest.mark.parametrize("method", ON_CONV1D)
def test_transposed_projections_have_pefts_bits(method: str, bases: Callable[[str, str], Path], tmp_path: Path) -> None:
    base = bases("gpt2", "bfloat16")
    assert_pefts_bits(tmp_path, base, save_adapter(tmp_path / "adapter", base, MethodType(method)))


def test_trained_tokens_of_tied_embeddings_have_pefts_bits(bases: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The file holds the rows twice, for the embeddings and for the head that is tied to them."""
    base = bases("gpt2", "bfloat16")
    adapter = save_adapter(tmp_path / "adapter", base, MethodType.TRAINABLE_TOKENS)
    assert len(load_file(adapter / "adapter_model.safetensors")) == 2
    assert_pefts_bits(tmp_path, base, adapter)


def test_trained_tokens_of_a_tied_head_alone_leave_the_embeddings_as_they_are(
    bases: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """PEFT's own merge would change both, and so also the inputs of the model."""
    base = bases("gpt2", "float32")
    settings = {"tokenIndices": [3, 300, 4], "targetModules": ["lm_head"]}
    adapter = save_adapter(tmp_path / "adapter", base, MethodType.TRAINABLE_TOKENS, settings)
    _, merged = merge(base, adapter, tmp_path / "merged")
    stored = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert [name for name in stored if not torch.equal(merged[name], stored[name])] == ["lm_head.weight"]
    tokens = torch.tensor([[3, 5, 300, 7, 4, 3]])
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
        expected = adapted(input_ids=tokens).logits
        merged_logits = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=tokens).logits
    assert torch.allclose(merged_logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("VeRA", {"r": 8, "saveProjection": False, "targetModules": ["q_proj", "down_proj"]}),
        ("LoKr", {"r": 4, "rankPattern": {"q_proj": 7}, "alphaPattern": {"down_proj": 3}}),
        ("LoHa", {"r": 4, "targetModules": ["q_proj"], "modulesToSave": ["lm_head", "norm"]}),
        ("OFT", {"oftBlockSize": 8, "r": 0, "targetModules": ["q_proj"], "bias": "all"}),
        ("IA3", {"targetModules": ["q_proj", "up_proj"], "feedforwardModules": ["up_proj", "q_proj"]}),
    ],
)
def test_settings_of_the_methods(
    method: str, settings: dict[str, Any], bases: Callable[[str, str], Path], tmp_path: Path
) -> None:
    base = bases("llama", "bfloat16")
    assert_pefts_bits(tmp_path, base, save_adapter(tmp_path / "adapter", base, MethodType(method), settings))


def test_a_half_precision_adapter_is_upcast_first(bases: Callable[[str, str], Path], tmp_path: Path) -> None:
    base = bases("llama", "bfloat16")
    adapter = save_adapter(tmp_path / "adapter", base, MethodType.LOHA)
    change_tensors(adapter, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert_pefts_bits(tmp_path, base, adapter)


def test_another_output_dtype_equals_a_wide_merge(bases: Callable[[str, str], Path], tmp_path: Path) -> None:
    base = bases("llama", "bfloat16")
    adapter = save_adapter(tmp_path / "adapter", base, MethodType.IA3)
    _, merged = merge(base, adapter, tmp_path / "merged", "float32")
    reference = tiny.peft_merged(base, adapter, torch.float32)
    assert [name for name, tensor in merged.items() if not torch.equal(tensor, reference[name])] == []


def test_supported_methods_are_those_that_merge() -> None:
    peft_types = {METHODS[kind].peft_type for kind in supported(Family.OTHER)}
    assert peft_types == set(CHANGED_PARAMETERS)


def change_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path, {"format": "pt"})


def change_config(adapter: Path, **fields: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(base: Path, adapter: Path, error: type[MergeError]) -> str:
    output = adapter.parent / "merged"
    with pytest.raises(error) as raised:
        merge(base, adapter, output)
    assert not output.exists()
    return str(raised.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "LILY"}, "by the mean over all tokens of a batch"),
        ({"peft_type": "PROMPT_TUNING"}, "virtual tokens before each sequence"),
        ({"peft_type": "NOVELTY"}, "the method is unknown to this version"),
    ],
)
def test_methods_that_cannot_be_merged_are_refused_with_the_reason(
    fields: dict[str, Any], reason: str, bases: Callable[[str, str], Path], tmp_path: Path
) -> None:
    base = bases("llama", "bfloat16")
    adapter = save_adapter(tmp_path / "adapter", base, MethodType.LOHA)
    change_config(adapter, **fields)
    message = refused(base, adapter, UnsupportedAdapterError)
    assert reason in message
    assert "Publish the adapter alone" in message or "publish the adapter alone" in message


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def without(*ends: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}


@pytest.mark.parametrize(
    ("method", "change", "error", "names"),
    [
        ("LoHa", without("0.self_attn.q_proj.hada_w1_b"), AdapterTensorError, f"{FIRST}.hada_w1_b"),
        (
            "LoHa",
            without(*(f"0.self_attn.q_proj.hada_w{end}" for end in ("1_a", "1_b", "2_a", "2_b"))),
            AdapterTensorError,
            "q_proj",
        ),
        ("VeRA", without("base_model.vera_A"), AdapterTensorError, "base_model.vera_A"),
        ("LoHa", lambda tensors: tensors | {f"{FIRST}.hada_w3_a": torch.zeros(4, 4)}, AdapterTensorError, f"{FIRST}.hada_w3_a"),
        ("LoHa", lambda tensors: tensors | {"base_model.extra": torch.zeros(2)}, AdapterTensorError, "base_model.extra"),
        (
            "LoHa",
            lambda tensors: tensors | {"base_model.model.model.layers.9.x.hada_w1_a": torch.zeros(2)},
            AdapterTensorError,
            "layers.9",
        ),
        ("LoHa", lambda tensors: tensors | {f"{FIRST}.hada_w1_a": torch.zeros(96, 5)}, AdapterTensorError, f"{FIRST}.hada_w1_a"),
        (
            "LNTuning",
            lambda tensors: tensors | {"base_model.model.model.norm.ln_tuning_layers.weight": torch.zeros(95)},
            AdapterTensorError,
            "norm.ln_tuning_layers.weight",
        ),
        ("TrainableTokens", lambda tensors: {n: t[:2] for n, t in tensors.items()}, AdapterTensorError, "token_indices"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    method: str,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    error: type[MergeError],
    names: str,
    bases: Callable[[str, str], Path],
    tmp_path: Path,
) -> None:
    base = bases("llama", "bfloat16")
    adapter = save_adapter(tmp_path / "adapter", base, MethodType(method))
    change_tensors(adapter, change)
    assert names in refused(base, adapter, error)


def test_a_layer_of_another_kind_is_refused(bases: Callable[[str, str], Path], tmp_path: Path) -> None:
    """OFT's layer for a Conv1D does not exist."""
    base = bases("gpt2", "bfloat16")
    adapter = save_adapter(tmp_path / "adapter", base, MethodType.VERA)
    change_tensors(adapter, lambda tensors: {"base_model.model.transformer.h.0.attn.c_attn.oft_R.weight": torch.zeros(2, 2)})
    change_config(adapter, peft_type="OFT", target_modules=["h.0.attn.c_attn"])
    assert "does not support this Conv1D" in refused(base, adapter, UnsupportedAdapterError)
