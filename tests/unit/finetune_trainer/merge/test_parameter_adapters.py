"""Adapters on experts, routers and other parameters merge with PEFT's bits, however the base stores these, or are refused."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from finetune_trainer.merge.adapter_settings import adapter_settings
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.merge.parameter_adapters import PARAMETER_ORDER, ParameterChanges, parameter_changes
from finetune_trainer.weights import errors
from finetune_trainer.weights.families import ModelFamily
from finetune_trainer.weights.headers import TensorHeader, read_adapter, read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model
from finetune_trainer.weights.stored import StoredModel
from tests.unit.finetune_trainer.merge import moe, tiny

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
ATTENTION = ["q_proj", "v_proj"]
ON_BOTH: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": [], "target_parameters": [GATE_UP, DOWN]}


@dataclass(frozen=True)
class Case:
    kind: str
    lora: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    experts_fused: bool = False
    max_shard_size: str = moe.SHARD


CASES: dict[str, Case] = {
    **{
        f"{kind} {str(dtype).removeprefix('torch.')}": Case(kind, {**ON_BOTH, "target_modules": ATTENTION}, dtype)
        for kind in moe.CONFIGS
        for dtype in (torch.bfloat16, torch.float32)
    },
    "float16": Case("qwen3_moe", ON_BOTH, torch.float16),
    "in one shard": Case("mixtral", ON_BOTH, max_shard_size="1GB"),
    "stored fused": Case("mixtral", ON_BOTH, experts_fused=True),
    "stored fused, blocks of rows": Case("qwen3_moe", ON_BOTH, experts_fused=True),
    "only down": Case("mixtral", {**ON_BOTH, "target_parameters": [DOWN]}),
    "only gate and up": Case("qwen3_moe", {**ON_BOTH, "target_parameters": ["experts.gate_up_proj"]}),
    "rank-stabilised": Case("qwen3_moe", {**ON_BOTH, "use_rslora": True, "r": 3}),
    "patterns": Case(
        "mixtral",
        {
            **ON_BOTH,
            "rank_pattern": {"experts.gate_up_proj": 2, r"layers\.1\.mlp\.experts\.down_proj": 5},
            "alpha_pattern": {"mlp.experts.down_proj": 17},
        },
    ),
    "router": Case("mixtral", {**ON_BOTH, "target_parameters": ["gate.weight", DOWN]}),
    "router next to linear layers": Case("qwen2_moe", {"target_modules": ATTENTION, "target_parameters": ["mlp.gate.weight"]}),
    "shared experts": Case("qwen2_moe", {**ON_BOTH, "target_modules": ["shared_expert.down_proj", "shared_expert_gate"]}),
    "linear layers' weights": Case(
        "mixtral", {"target_modules": [], "target_parameters": ["q_proj.weight", "embed_tokens.weight"]}
    ),
    "everything linear": Case("qwen3_moe", {"target_modules": "all-linear"}),
    "names from before fusing": Case("mixtral", {"target_modules": ["w1", "w2", "w3", "gate", "o_proj"]}),
    "four parameters of a module": Case(
        "gpt_oss", {**ON_BOTH, "target_parameters": [GATE_UP, DOWN, "gate_up_proj_bias", "down_proj_bias"]}
    ),
    "experts saved whole": Case("mixtral", {"target_modules": ATTENTION, "modules_to_save": ["experts"]}),
}


def save_adapter(directory: Path, base: Path, lora: dict[str, Any]) -> Path:
    return tiny.save_adapter(directory, base, LoraConfig(**lora))


def assert_merged_like_peft(base: Path, adapter: Path, tmp_path: Path, *, experts_fused: bool = False) -> None:
    """Compare the stored tensors. PEFT's merged model is saved in the base's form."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=False).save_pretrained(
        tmp_path / "reference", save_original_format=not experts_fused
    )
    report = merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    merged, reference = moe.load_weights(tmp_path / "merged"), moe.load_weights(tmp_path / "reference")
    assert set(merged) == set(reference)
    assert [name for name, values in merged.items() if not _same_bits(values, reference[name])] == []
    before = moe.load_weights(base)
    assert report.num_changed_tensors == sum(not torch.equal(before[name], merged[name]) for name in before) > 0


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("case", CASES)
def test_every_stored_tensor_has_pefts_bits(case: str, tmp_path: Path) -> None:
    made = CASES[case]
    base = moe.save_base(
        tmp_path / "base", made.kind, made.dtype, experts_fused=made.experts_fused, max_shard_size=made.max_shard_size
    )
    adapter = save_adapter(tmp_path / "adapter", base, made.lora)
    assert_merged_like_peft(base, adapter, tmp_path, experts_fused=made.experts_fused)


def test_factors_of_all_experts_are_read_once(tmp_path: Path) -> None:
    base = moe.save_base(tmp_path / "base", "mixtral", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, ON_BOTH)
    report = merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    stored = [*moe.load_weights(base).values(), *moe.load_weights(adapter).values()]
    assert report.bytes_read == sum(tensor.numel() * tensor.element_size() for tensor in stored)


@pytest.mark.parametrize("kind", moe.OLD_PROJECTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_old_adapters_on_single_experts_have_pefts_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = moe.save_base(tmp_path / "base", kind, dtype)
    adapter = moe.save_old_adapter(tmp_path / "adapter", base, (*moe.OLD_PROJECTIONS[kind], "gate", "q_proj"))
    assert_merged_like_peft(base, adapter, tmp_path)


@pytest.mark.parametrize("kind", moe.OLD_PROJECTIONS)
def test_old_adapters_on_one_projection_have_pefts_bits(kind: str, tmp_path: Path) -> None:
    base = moe.save_base(tmp_path / "base", kind, torch.bfloat16)
    down = {"mixtral": "w2", "qwen3_moe": "down_proj"}[kind]
    adapter = moe.save_old_adapter(tmp_path / "adapter", base, (down,), use_rslora=True)
    assert_merged_like_peft(base, adapter, tmp_path)


def changes(base: Path, adapter: Path) -> ParameterChanges:
    stored = read_stored_model(read_checkpoint(base), read_json(base / "config.json"))
    return parameter_changes(stored, read_adapter(adapter).tensors, adapter_settings(read_json(adapter / "adapter_config.json")))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe.save_base(tmp_path_factory.mktemp("mixtral") / "base", "mixtral", torch.bfloat16)


@pytest.fixture
def adapter(tmp_path: Path, mixtral: Path) -> Path:
    return save_adapter(tmp_path / "adapter", mixtral, ON_BOTH)


def edit(adapter: Path, drop: str = "", add: dict[str, torch.Tensor] | None = None, **settings: Any) -> None:
    """Change a saved adapter: remove tensors whose names contain `drop`, add others, and set fields."""
    tensors = {name: values for name, values in moe.load_weights(adapter).items() if not drop or drop not in name}
    save_file(tensors | (add or {}), adapter / "adapter_model.safetensors")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


LAST = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"drop": "layers.1.mlp.experts.base_layer.lora"}, r"layers.1.mlp.experts.base_layer.lora_A.weight, although"),
        ({"drop": "layers.0.mlp.experts.lora"}, r"layers.0.mlp.experts.lora_A.weight, although"),
        ({"drop": "layers.0.mlp.experts.lora_B"}, rf"lora_B is missing for {LAST}"),
        ({"add": {LAST: torch.zeros(15, 48)}}, rf"{LAST}: shape \[15, 48\], expected \[16, 48\] for .*down_proj"),
        ({"rank_pattern": {"down_proj": 5}}, r"expected \[20, 48\]"),
    ],
    ids=["first wrapper", "last wrapper", "one factor", "shape", "rank of the configuration"],
)
def test_a_missing_or_misshaped_tensor_is_named(change: dict[str, Any], named: str, mixtral: Path, adapter: Path) -> None:
    edit(adapter, **change)
    with pytest.raises(errors.AdapterTensorError, match=named):
        changes(mixtral, adapter)


def test_factors_that_belong_to_no_parameter_are_refused(mixtral: Path, adapter: Path, tmp_path: Path) -> None:
    stray = "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.lora_A.weight"
    edit(adapter, add={stray: torch.zeros(4, 32), stray.replace("lora_A", "lora_B"): torch.zeros(32, 4)})
    with pytest.raises(errors.AdapterTensorError, match=r"base_layer\.base_layer"):
        merge_adapter(MergeOptions(mixtral, (adapter,), tmp_path / "merged", None, 1 << 30))
    assert not (tmp_path / "merged").exists()


def test_dora_on_parameters_is_refused_as_by_peft(mixtral: Path, adapter: Path) -> None:
    with pytest.raises(ValueError, match="use_dora"):
        save_adapter(adapter.parent / "dora", mixtral, {**ON_BOTH, "use_dora": True})
    edit(adapter, use_dora=True)
    with pytest.raises(errors.UnsupportedAdapterError, match="use_dora with target_parameters"):
        changes(mixtral, adapter)


def test_parameters_of_a_module_that_register_in_unknown_order_are_refused() -> None:
    shapes = {"model.mixer.alpha": (4, 4), "model.mixer.beta": (4, 4)}
    stored = StoredModel(
        {name: TensorHeader(name, "F32", shape, Path("file"), 0) for name, shape in shapes.items()}, {}, ModelFamily()
    )
    settings = adapter_settings({"peft_type": "LORA", "r": 2, "target_parameters": ["mixer.alpha", "mixer.beta"]})
    with pytest.raises(errors.UnsupportedAdapterError, match=r"'alpha', 'beta'\] of model.mixer; the order in which PEFT nests"):
        parameter_changes(stored, {}, settings)


def test_layers_that_the_model_does_not_load_need_no_adapter(mixtral: Path, adapter: Path, tmp_path: Path) -> None:
    tensors = moe.load_weights(mixtral)
    extra = {name.replace("layers.1.", "layers.2."): values.clone() for name, values in tensors.items() if "layers.1." in name}
    base = tmp_path / "base"
    base.mkdir()
    save_file(tensors | extra, base / "model.safetensors")
    (base / "config.json").write_text((mixtral / "config.json").read_text())
    adapted = changes(base, adapter)
    assert adapted.used == set(moe.load_weights(adapter))
    assert not any("layers.2." in change.stored.name for change in adapted.changes)


def test_order_of_parameters_is_that_of_every_model_in_the_library() -> None:
    compared = 0
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for source in re.split(r"^class ", path.read_text(), flags=re.MULTILINE):
            registered = dict.fromkeys(re.findall(r"^\s+self\.(\w+) = nn\.Parameter\(", source, flags=re.MULTILINE))
            names = [name for name in registered if name in PARAMETER_ORDER]
            assert names == sorted(names, key=PARAMETER_ORDER.index), f"{path.name}: {source.partition('(')[0]}"
            compared += len(names) > 1
    assert compared > 50


def test_tied_parameter_is_refused(tmp_path: Path) -> None:
    base = tiny.save_base(tmp_path / "base", tiny.qwen2(), torch.bfloat16)
    lora = {"target_modules": [], "target_parameters": ["embed_tokens.weight"]}
    adapter = save_adapter(tmp_path / "adapter", base, lora)
    with pytest.raises(errors.TiedWeightsError, match="shares its memory"):
        changes(base, adapter)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_rslora": True}, "rsLoRA's division"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"rank_pattern": {"experts.1.w1": 4}, "alpha_pattern": {"experts.1.w1": 9}}, "without regard to rank_pattern"),
        ({"alpha_pattern": {"w2": 9}}, "without regard to rank_pattern"),
    ],
)
def test_old_adapters_that_peft_fuses_wrongly_are_refused(
    settings: dict[str, Any], reason: str, mixtral: Path, tmp_path: Path
) -> None:
    adapter = moe.save_old_adapter(tmp_path / "adapter", mixtral, moe.OLD_PROJECTIONS["mixtral"], **settings)
    with pytest.raises(errors.UnsupportedAdapterError, match=reason):
        changes(mixtral, adapter)


def test_old_adapters_are_refused_where_peft_does_not_fuse(tmp_path: Path) -> None:
    base = moe.save_base(tmp_path / "base", "qwen2_moe", torch.bfloat16)
    adapter = moe.save_old_adapter(tmp_path / "adapter", base, moe.OLD_PROJECTIONS["qwen3_moe"])
    with pytest.raises(errors.UnsupportedAdapterError, match="does not load for this model type"):
        changes(base, adapter)


def test_old_adapters_on_a_fused_base_are_refused(mixtral: Path, tmp_path: Path) -> None:
    fused = moe.save_base(tmp_path / "base", "mixtral", torch.bfloat16, experts_fused=True)
    adapter = moe.save_old_adapter(tmp_path / "adapter", mixtral, moe.OLD_PROJECTIONS["mixtral"])
    with pytest.raises(errors.UnsupportedBaseError, match=r"w1.lora_A.weight: adapts one projection .* as one tensor"):
        changes(fused, adapter)


def test_old_adapter_must_cover_all_experts_and_projections(mixtral: Path, tmp_path: Path) -> None:
    adapter = moe.save_old_adapter(tmp_path / "adapter", mixtral, moe.OLD_PROJECTIONS["mixtral"])
    edit(adapter, "layers.1.block_sparse_moe.experts.2.w3.")
    with pytest.raises(errors.AdapterTensorError, match=r"projection 1 of expert 2 of model.layers.1.mlp.experts.gate_up_proj"):
        changes(mixtral, adapter)
