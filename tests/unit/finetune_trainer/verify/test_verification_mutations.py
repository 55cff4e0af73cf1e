"""The engine made wrong on purpose: every way in which merges have gone wrong fails, by tensors and by logits, each alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import MixtralConfig, PreTrainedConfig

from finetune_trainer.merge.changes import LowRank, Orientation
from finetune_trainer.merge.inputs import plan_merge
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.merge.plan import MergePlan, OutputTensor, shard_layout
from finetune_trainer.verify.tensors import TensorFigures
from tests.unit.finetune_trainer.merge import tiny

PROMPTS = [[1, 5, 9, 200, 17, 33, 250, 4], [2, 3, 4, 90, 91], [300, 11, 12, 13, 90, 91]]
RANK, ALPHA = 8, 16
Mutation = Callable[[MergePlan], MergePlan]
LINEAR = {"target_modules": ["q_proj", "o_proj", "v_proj", "up_proj"]}
MIXTRAL = MixtralConfig(
    vocab_size=tiny.VOCABULARY, hidden_size=96, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
BASES: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "llama": (tiny.llama(), LINEAR),
    "llama dora": (tiny.llama(), {**LINEAR, "use_dora": True}),
    "llama head": (tiny.llama(), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "llama tokens": (tiny.llama(), {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9, 200, 17]}),
    "qwen2 tied": (tiny.qwen2(), {"target_modules": ["embed_tokens"]}),
    "mixtral": (MIXTRAL, {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
}


def each_tensor(plan: MergePlan, edit: Callable[[OutputTensor], OutputTensor | None]) -> MergePlan:
    edited = [edit(tensor) for tensor in plan.tensors]
    return replace(plan, shards=shard_layout([tensor for tensor in edited if tensor is not None], 1 << 30))


def each_low_rank(plan: MergePlan, edit: Callable[[LowRank], LowRank]) -> MergePlan:
    def changed(tensor: OutputTensor) -> OutputTensor:
        changes = tuple(tuple(edit(c) if isinstance(c, LowRank) else c for c in matrix) for matrix in tensor.changes)
        return replace(tensor, changes=changes)

    return each_tensor(plan, changed)


def without_changes(plan: MergePlan, part: str) -> MergePlan:
    return each_tensor(plan, lambda tensor: replace(tensor, changes=()) if part in tensor.name else tensor)


def twice(plan: MergePlan) -> MergePlan:
    return each_tensor(plan, lambda tensor: replace(tensor, changes=tuple(matrix * 2 for matrix in tensor.changes)))


def scaled(plan: MergePlan, scaling: float) -> MergePlan:
    return each_low_rank(plan, lambda change: replace(change, scaling=scaling))


def transposed(plan: MergePlan) -> MergePlan:
    """Of square matrices, where no shape says it."""

    def edit(change: LowRank) -> LowRank:
        return replace(change, orientation=Orientation.CONV1D) if change.a.shape[1] == change.b.shape[0] else change

    return each_low_rank(plan, edit)


def layers_swapped(plan: MergePlan) -> MergePlan:
    def of_other_layer(tensor: OutputTensor) -> OutputTensor:
        other = tensor.name.replace("layers.0.", "layers.9.").replace("layers.1.", "layers.0.").replace("layers.9.", "layers.1.")
        return replace(tensor, changes=next(t.changes for t in plan.tensors if t.name == other))

    return each_tensor(plan, of_other_layer)


def factors_of_two_layers(plan: MergePlan) -> MergePlan:
    """A of one layer with B of the other."""
    found = {change.a.name: change.a for tensor in plan.tensors for matrix in tensor.changes for change in matrix}  # type: ignore[union-attr]

    def edit(change: LowRank) -> LowRank:
        other = "layers.1." if "layers.0." in change.a.name else "layers.0."
        name = change.a.name.replace("layers.0.", other) if other == "layers.1." else change.a.name.replace("layers.1.", other)
        return replace(change, a=found[name])

    return each_low_rank(plan, edit)


def next_expert(plan: MergePlan) -> MergePlan:
    def edit(change: LowRank) -> LowRank:
        assert change.part is not None
        return replace(change, part=replace(change.part, expert=(change.part.expert + 1) % change.part.num_experts))

    return each_low_rank(plan, edit)


def one_expert_left_out(plan: MergePlan) -> MergePlan:
    return without_changes(plan, ".experts.2.")


def still_tied(plan: MergePlan) -> MergePlan:
    kept = each_tensor(plan, lambda tensor: None if tensor.name == "lm_head.weight" else tensor)
    return replace(kept, config_changes=MappingProxyType({}))


MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "did nothing": ("llama", partial(without_changes, part="")),
    "applied twice": ("llama", twice),
    "twice the scaling": ("llama", partial(scaled, scaling=2 * ALPHA / RANK)),
    "half the scaling": ("llama", partial(scaled, scaling=ALPHA / RANK / 2)),
    "alpha left out": ("llama", partial(scaled, scaling=1 / RANK)),
    "scaling of rslora": ("llama", partial(scaled, scaling=ALPHA / math.sqrt(RANK))),
    "one layer left out": ("llama", partial(without_changes, part="layers.1.")),
    "one projection left out": ("llama", partial(without_changes, part="layers.0.self_attn.q_proj")),
    "transposed": ("llama", transposed),
    "layers swapped": ("llama", layers_swapped),
    "factors of two layers": ("llama", factors_of_two_layers),
    "magnitudes left out": ("llama dora", lambda plan: each_low_rank(plan, lambda change: replace(change, magnitude=None))),
    "dora applied twice": ("llama dora", twice),
    "trained tokens left out": ("llama tokens", partial(without_changes, part="embed_tokens")),
    "another expert's factors": ("mixtral", next_expert),
    "one expert left out": ("mixtral", one_expert_left_out),
    "tied head not untied": ("qwen2 tied", still_tied),
}


BELOW_ROUNDING = {"one projection left out"}
"""Changes the logits of a bfloat16 model by no more than rounding does, so that only the tensors show it."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    made: dict[str, tuple[Path, Path]] = {}

    def pair(name: str) -> tuple[Path, Path]:
        if name not in made:
            config, settings = BASES[name]
            directory = tmp_path_factory.mktemp("pair")
            base = tiny.save_base(directory / "base", config, torch.bfloat16)
            lora = LoraConfig(r=RANK, lora_alpha=ALPHA, **settings)
            made[name] = base, tiny.save_adapter(directory / "adapter", base, lora)
        return made[name]

    return pair


def require_caught(
    base: Path, adapter: Path, merged: Path, monkeypatch: pytest.MonkeyPatch, *, by_logits_too: bool = True
) -> None:
    by_tensors = tiny.verified(base, adapter, merged, prompts=PROMPTS)
    assert not by_tensors.passed
    assert by_tensors.tensors.faults
    if not by_logits_too:
        return
    monkeypatch.setattr("finetune_trainer.verify.verification.check_tensors", lambda *_: TensorFigures())
    by_logits = tiny.verified(base, adapter, merged, prompts=PROMPTS)
    assert not by_logits.passed
    assert by_logits.logits is not None
    print(f"logits alone: {'; '.join(by_logits.faults)}")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_merge_fails(
    name: str, pairs: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, mutation = MUTATIONS[name]
    base, adapter = pairs(case)
    right = plan_merge(base, [adapter], None, 1 << 30)
    wrong = mutation(right)
    assert [tensor.changes for tensor in wrong.tensors] != [tensor.changes for tensor in right.tensors]
    with monkeypatch.context() as patched:
        patched.setattr("finetune_trainer.merge.merge_adapter.plan_merge", lambda *_: wrong)
        merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    require_caught(base, adapter, tmp_path / "merged", monkeypatch, by_logits_too=name not in BELOW_ROUNDING)


@pytest.mark.parametrize("case", BASES)
def test_the_same_merge_unchanged_passes(case: str, pairs: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """Else the mutations would be caught whatever they did."""
    base, adapter = pairs(case)
    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    assert tiny.verified(base, adapter, tmp_path / "merged", prompts=PROMPTS).faults == ()


def test_the_wrong_adapter_of_two_fails(
    pairs: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = pairs("llama")
    other = tiny.save_adapter(tmp_path / "other", base, LoraConfig(r=RANK, lora_alpha=ALPHA, **LINEAR), seed=6)
    merge_adapter(MergeOptions(base, (other,), tmp_path / "merged", None, 1 << 30))
    require_caught(base, adapter, tmp_path / "merged", monkeypatch)


def test_one_of_two_adapters_left_out_or_added_twice_fails(
    pairs: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = pairs("llama")
    other = tiny.save_adapter(tmp_path / "other", base, LoraConfig(r=RANK, lora_alpha=ALPHA, **LINEAR), seed=6)
    for number, merged_ones in enumerate([(adapter,), (other,), (adapter, other, other)]):
        merged = tmp_path / f"merged-{number}"
        merge_adapter(MergeOptions(base, merged_ones, merged, None, 1 << 30))
        for alone in ("tensors", "logits"):
            with monkeypatch.context() as patched:
                if alone == "logits":
                    patched.setattr("finetune_trainer.verify.verification.check_tensors", lambda *_: TensorFigures())
                assert not tiny.verified(base, [adapter, other], merged, prompts=PROMPTS).passed


def test_a_configuration_of_another_model_fails(pairs: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    base, adapter = pairs("llama")
    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    path = tmp_path / "merged" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))
    (tmp_path / "merged" / "manifest.json").unlink()
    faults = tiny.verified(base, adapter, tmp_path / "merged", prompts=PROMPTS).faults
    assert faults == ("config.json: rms_norm_eps is 0.5 in the merged model, but should be 1e-06",)
