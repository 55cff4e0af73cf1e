"""The planner in preflight: the real structure says the same as config.json, and a job that cannot fit is refused by it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from finetune_job.failures import FailureClass, Outcome
from finetune_job.finding import Finding
from finetune_memory.describe import ModelMetadata, model_shape, read_model
from finetune_memory.model_shape import facts_of
from finetune_operator.decide.reconcile import reconcile
from finetune_trainer.context import RunContext
from finetune_trainer.preflight.memory import shape_of
from finetune_trainer.preflight.model_process import check_model
from finetune_trainer.roles.preflight import run
from tests.support.builders import T0, a_job, observing
from tests.support.declared_model import declare_model
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama
from tools import quickstart

ODD = {"vocab_size": 265, "hidden_size": 36, "intermediate_size": 57, "num_attention_heads": 3, "num_key_value_heads": 1}
SAME: dict[str, dict[str, Any]] = {
    "LoRA": {"method": {"type": "LoRA", "lora": {"r": 3}}},
    "QLoRA": {"method": {"type": "QLoRA", "lora": {"r": 3}}},
    "DoRA": {"method": {"type": "DoRA", "lora": {"r": 3}}},
    "QDoRA": {"method": {"type": "QDoRA", "lora": {"r": 3}}},
    "Full": {"method": {"type": "Full", "lora": None}},
    "FSDP 1": {"method": {"type": "LoRA", "lora": {"r": 3}}, "parallelism": {"processesPerNode": 2, "fsdp": {"version": 1}}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), torch.bfloat16, **ODD)


@pytest.mark.parametrize("name", sorted(SAME))
def test_the_real_structure_is_the_one_from_the_configuration(name: str, directory: Path) -> None:
    plan = plan_of(tiny_spec(**SAME[name]))
    structure, findings = check_model(plan, directory)
    assert structure is not None, findings
    expected = model_shape(plan, read_model(directory))
    assert structure.shape is not None
    assert structure.stored_dtype == "bfloat16"
    assert structure.shape.parameters == expected.parameters
    assert (structure.shape.units, structure.shape.facts) == (expected.units, expected.facts)


def test_the_type_of_a_mixed_model_is_that_of_most_bytes(tmp_path: Path) -> None:
    """As the trainer takes it, or an estimate would choose another precision than preflight."""
    model = write_tiny_llama(tmp_path / "model", torch.bfloat16)
    file = model / "model.safetensors"
    wide = ("embed_tokens.weight", "lm_head.weight")
    tensors = {name: tensor.float() if name.endswith(wide) else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    numbers = {
        dtype: sum(each.numel() for each in tensors.values() if each.dtype is dtype) for dtype in (torch.float32, torch.bfloat16)
    }
    assert numbers[torch.float32] < numbers[torch.bfloat16] < 2 * numbers[torch.float32]
    assert read_model(model).stored == "float32"
    structure, findings = check_model(plan_of(tiny_spec()), model)
    assert structure is not None, findings
    assert structure.stored_dtype == "float32"


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe"])
def test_what_the_architecture_decides_is_what_its_name_says(kind: str, tmp_path: Path) -> None:
    """Attention, and experts that are loaded whole and adapted with all linear layers."""
    sizes = {"num_hidden_layers": 2, "head_dim": 12, "num_experts": 4, "moe_intermediate_size": 24, "eos_token_id": 0}
    config = AutoConfig.for_model(kind, **ODD, **sizes, bos_token_id=None, pad_token_id=0)
    declare_model(tmp_path / "model", json.loads(config.to_json_string(use_diff=False)) | {"dtype": "bfloat16"})
    plan = plan_of(tiny_spec(method={"type": "LoRA", "lora": {"r": 3}}, merge={"enabled": False}))
    structure, findings = check_model(plan, tmp_path / "model")
    assert structure is not None, findings
    expected = model_shape(plan, read_model(tmp_path / "model"))
    assert structure.shape is not None
    assert structure.shape.parameters == expected.parameters
    assert structure.shape.facts == expected.facts
    assert (expected.facts.has_fused_attention, expected.facts.is_stored_otherwise) == (kind != "gemma2", kind != "gemma2")


def test_kinds_of_modules_of_an_unknown_family_follow_from_their_names() -> None:
    """A head that is called an embedding in part is none, and what is inside a router belongs to it."""
    tensors = {
        "model.tok_embeddings.weight": ("BF16", (64, 16)),
        "model.layers.0.attention.wo.weight": ("BF16", (16, 16)),
        "model.layers.0.feed_forward.gate.weight": ("BF16", (4, 16)),
        "model.layers.0.feed_forward.router.layer.weight": ("BF16", (4, 16)),
        "model.layers.0.norm.weight": ("BF16", (16,)),
        "embed_out.weight": ("BF16", (64, 16)),
    }
    config = {"model_type": "unheard_of", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 64}
    shape = model_shape(plan_of(tiny_spec(method={"type": "Full", "lora": None})), ModelMetadata(config, tensors))
    assert {each.name: each.kind for each in shape.parameters} == {
        "model.tok_embeddings.weight": "embedding",
        "model.layers.0.attention.wo.weight": "linear",
        "model.layers.0.feed_forward.gate.weight": "other",
        "model.layers.0.feed_forward.router.layer.weight": "other",
        "model.layers.0.norm.weight": "other",
        "embed_out.weight": "linear",
    }


@pytest.mark.parametrize("kind", ["glm4_moe", "ernie4_5_moe", "minimax_m2", "lfm2_moe", "qwen3_moe"])
def test_experts_that_are_stored_one_by_one_are_stacked_in_the_estimate(kind: str, tmp_path: Path) -> None:
    """Of a family that is known by its files alone, and of one that is known without them."""
    sizes = {"num_hidden_layers": 3, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
    sizes |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1}
    sizes |= {"num_experts_per_tok": 2, "moe_k": 2, "layer_types": ["full_attention"] * 3} if kind == "lfm2_moe" else {}
    config = {"model_type": kind, **ODD, "head_dim": 12, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0, **sizes}
    directory = tmp_path / "model"
    declare_model(directory, config | {"dtype": "bfloat16", "tie_word_embeddings": False})
    plan = plan_of(tiny_spec(method={"type": "LoRA", "lora": {"r": 3}}, data={"packing": False}, merge={"enabled": False}))
    structure, findings = check_model(plan, directory)
    assert structure is not None, findings
    assert structure.shape is not None
    guessed, real = model_shape(plan, read_model(directory)), structure.shape
    assert guessed.facts.is_stored_otherwise is real.facts.is_stored_otherwise is True
    for trained in (True, False):
        sizes_of = [sum(each.numel for each in shape.parameters if each.is_trained is trained) for shape in (guessed, real)]
        assert sizes_of[0] == pytest.approx(sizes_of[1], rel=0.01)
    linear = [sum(each.numel for each in shape.parameters if each.kind == "linear") for shape in (guessed, real)]
    assert linear[0] == pytest.approx(linear[1], rel=0.01)


def test_what_a_configuration_leaves_out_is_the_default_of_its_class(tmp_path: Path) -> None:
    """As Gemma 3's published text_config, which names neither heads nor vocabulary."""
    text = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
    config = {"text_config": text, "vision_config": vision | {"patch_size": 14}, "mm_tokens_per_image": 4, "dtype": "bfloat16"}
    declare_model(tmp_path / "model", {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], **config})
    lora = {"r": 3, "targetModules": ["down_proj"]}
    structure, findings = check_model(plan_of(tiny_spec(method={"type": "LoRA", "lora": lora})), tmp_path / "model")
    assert structure is not None, findings
    assert structure.shape is not None
    facts = structure.shape.facts
    assert (facts.hidden_size, facts.num_heads, facts.num_key_value_heads, facts.head_size) == (64, 8, 4, 256)
    assert facts.vocabulary_size == 262208


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"model_type": "ernie4_5_moe", "moe_k": 6}, 6),
        ({"model_type": "hunyuan_v1_moe", "moe_topk": [8, 8]}, 8),
        ({"model_type": "longcat_flash", "moe_topk": 12}, 12),
        ({"model_type": "gemma4_text", "top_k_experts": 4}, 4),
        ({"model_type": "gemma4_text", "top_k_experts": None}, 2),
    ],
)
def test_experts_of_a_token_by_any_name(config: dict[str, Any], experts: int) -> None:
    assert facts_of(ODD | config).experts_per_token == experts


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    """The quick start on claims of its own, to be trained on a GPU of 1 GiB."""
    claims = tmp_path / "claims"
    for claim in (quickstart.DATA_CLAIM, quickstart.MODEL_CLAIM, quickstart.OUTPUT_CLAIM, quickstart.WORKSPACE_CLAIM):
        (claims / claim).mkdir(parents=True)
    quickstart.write_json_lines(
        claims / quickstart.DATA_CLAIM / "train.jsonl", [{"prompt": f"say {number}", "completion": "yes"} for number in range(64)]
    )
    job = a_job().spec("model.source", f"pvc://{quickstart.MODEL_CLAIM}/tiny").spec("preflight", {"rehearsal": "Skip"})
    for path, value in {
        "data": {
            "source": f"pvc://{quickstart.DATA_CLAIM}/train.jsonl",
            "format": "PromptCompletion",
            "maxSequenceLength": 64,
            "packing": False,
        },
        "output.destination": f"pvc://{quickstart.OUTPUT_CLAIM}/tiny",
        "workspace.claimName": quickstart.WORKSPACE_CLAIM,
    }.items():
        job = job.spec(path, value)
    plan = job.plan()
    write_tiny_llama(claims / quickstart.MODEL_CLAIM / "tiny", torch.bfloat16)
    return RunContext(plan, "0" * 64, claims, 0)


def with_gpu(context: RunContext, memory: str) -> RunContext:
    placement = context.plan.placement
    assert placement is not None
    plan = context.plan.model_copy(update={"placement": placement.model_copy(update={"gpu_memory": memory})})
    return RunContext(plan, context.plan_sha256, context.claims_root, context.attempt)


def test_a_job_that_cannot_fit_is_refused_before_a_gpu_is_held(context: RunContext) -> None:
    report = run(with_gpu(context, "1Gi"))
    assert report.outcome is Outcome.REFUSED
    found = {finding.rule: finding for finding in report.findings}
    assert "memory-estimate-exceeds-gpu" in found, found
    assert "of 1.0 GiB (gpu.memory of profile default)" in found["memory-estimate-exceeds-gpu"].message
    assert int(report.facts["memory_estimate"]) > int(report.facts["memory_limit"]) == 2**30


def test_a_job_that_fits_says_how_much_it_needs(context: RunContext) -> None:
    report = run(with_gpu(context, "80Gi"))
    assert report.outcome is Outcome.SUCCEEDED, report.message
    assert 0 < int(report.facts["memory_estimate"]) < int(report.facts["memory_limit"]) == 80 * 2**30


def test_the_operator_keeps_what_preflight_says() -> None:
    seen = observing(a_job()).started().succeeded(memory_estimate="123", memory_limit="456")
    status = reconcile(seen.build(), T0).status
    assert status is not None
    assert status.memory is not None
    assert (status.memory.estimate, status.memory.limit) == (123, 456)


def test_also_of_a_job_that_was_refused() -> None:
    finding = Finding(
        rule="memory-estimate-exceeds-gpu", severity="error", field="spec.training.microBatchSize", message="too large"
    )
    report = {"findings": [finding], "outcome": Outcome.REFUSED, "facts": {"memory_estimate": "456"}}
    seen = observing(a_job()).started().failed_pod(0, FailureClass.USER_CONFIG, **report).batch_job_failed()
    status = reconcile(seen.build(), T0).status
    assert status is not None
    assert status.memory is not None
    assert (status.memory.estimate, status.memory.limit) == (456, None)


@pytest.mark.parametrize("said", ["", "much", "-1", "9" * 30])
def test_what_is_no_number_is_not_kept(said: str) -> None:
    status = reconcile(observing(a_job()).started().succeeded(memory_estimate=said).build(), T0).status
    assert status is not None
    assert status.memory is None


@pytest.mark.parametrize(("strict", "load", "reads_all"), [
    (None, "bfloat16", False), ({"norm"}, "bfloat16", True), ({"norm"}, "float16", True), ({"norm"}, "float32", False),
])  # fmt: skip
def test_a_model_of_which_some_stays_in_float32_is_read_whole_by_every_rank(
    monkeypatch: pytest.MonkeyPatch, strict: set[str] | None, load: str, reads_all: bool
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", strict)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64))
    shape = shape_of(model, model, [], load)
    assert shape is not None
    assert shape.facts.is_stored_otherwise is reads_all
