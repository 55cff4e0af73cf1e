"""Every combination's merged tensors have the bits of PEFT's merge, under the names that the base has them in its files.

Where PEFT's merge of tied embeddings is not what the model with its adapter computes
(docs/explanation/decisions/0010-tied-weights.md), the bits are those of PEFT's merge into a copy of the base that was
untied before, and the logits those of base and adapter.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from transformers import PreTrainedModel

from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from tests.merge_matrix.architectures import SMALL_OUTPUT_BYTES, SMALL_SHARDS, Architecture
from tests.merge_matrix.cases import DTYPES, Case, Embeddings, all_cases
from tests.unit.finetune_trainer.merge import tiny

CASES = {case.name: case for case in all_cases()}
TOLERANCE = {"fp32": 2e-6, "bf16": 0.03, "fp16": 0.004}
"""Tolerance of logits, relative to the largest: base with adapter and merged model round differently."""

Bases = Callable[[Case], Path]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Return a function that gives the base of a case, which is made once."""
    made: dict[tuple[str, str, bool], Path] = {}

    def base(case: Case) -> Path:
        key = (case.architecture.name, case.dtype, case.base_in_shards)
        if key not in made:
            size = SMALL_SHARDS if case.base_in_shards else "1GB"
            made[key] = case.architecture.save_base(tmp_path_factory.mktemp("base") / "base", DTYPES[case.dtype], size)
        return made[key]

    return base


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def with_adapters(model: PreTrainedModel, adapters: list[Path]) -> PeftModel:
    """Return the model with all adapters active, in order."""
    names = [str(number) for number in range(len(adapters))]
    adapted = PeftModel.from_pretrained(model, adapters[0], adapter_name=names[0])
    for name, adapter in list(zip(names, adapters, strict=True))[1:]:
        adapted.load_adapter(adapter, adapter_name=name)
    if len(names) > 1:
        adapted.base_model.set_adapter(names)
    return adapted


def untied(architecture: Architecture, base: Path, num_rows: int | None) -> PreTrainedModel:
    """Return the base with separate output embeddings, as PEFT advises."""
    config = type(architecture.config).from_pretrained(base)
    config.tie_word_embeddings = False
    model: PreTrainedModel = architecture.auto.from_pretrained(base, config=config, dtype="auto")
    model.get_output_embeddings().weight.data = model.get_input_embeddings().weight.data.clone()
    if num_rows is not None:
        model.resize_token_embeddings(num_rows)
    return model


def peft_merged(case: Case, base: Path, adapters: list[Path], directory: Path) -> dict[str, torch.Tensor]:
    """Return PEFT's merge, saved by transformers, which gives parameters the names that files have."""
    parts = case.architecture.is_tied and case.method.embeddings is Embeddings.APART
    model = untied(case.architecture, base, case.num_rows) if parts else case.architecture.load(base, case.num_rows)
    merged = with_adapters(model, adapters).merge_and_unload(safe_merge=False)
    merged.save_pretrained(directory, save_original_format=not case.architecture.stores_experts_fused)
    return tensors_of(directory)


def saved_adapters(case: Case, base: Path, directory: Path) -> list[Path]:
    configs: list[PeftConfig] = case.method.adapters(case.architecture)
    return [
        tiny.save_adapter(
            directory / f"adapter-{number}",
            base,
            config,
            case.method.adapter_dtype,
            seed=number,
            auto=case.architecture.auto,
            num_rows=case.num_rows,
        )
        for number, config in enumerate(configs)
    ]


def test_the_matrix_is_large_and_covers_all_pairs() -> None:
    print(f"\n{len(CASES)} combinations")
    assert len(CASES) == len(all_cases()) >= 200
    seen = {
        (first, second)
        for case in CASES.values()
        for first in (case.architecture.name, case.method.name, case.base_in_shards, case.output_in_shards)
        for second in (case.dtype, f"in {case.base_in_shards}", f"out {case.output_in_shards}")
    }
    for name in {case.architecture.name for case in CASES.values()}:
        assert {(name, second) for second in (*DTYPES, "in True", "in False", "out True", "out False")} <= seen


@pytest.mark.parametrize("name", CASES)
def test_the_merge_is_pefts(name: str, bases: Bases, tmp_path: Path) -> None:
    case = CASES[name]
    architecture = case.architecture
    base = bases(case)
    adapters = saved_adapters(case, base, tmp_path)
    output_bytes = SMALL_OUTPUT_BYTES if case.output_in_shards else 1 << 30
    report = merge_adapter(MergeOptions(base, tuple(adapters), tmp_path / "merged", None, output_bytes))
    merged = tensors_of(tmp_path / "merged")
    assert report.num_changed_tensors > 0
    assert (len(list((tmp_path / "merged").glob("*.safetensors"))) > 1) is case.output_in_shards

    if architecture.is_tied and case.method.embeddings is not Embeddings.TOGETHER_TWICE:
        assert ("lm_head.weight" in merged) is (case.method.embeddings is Embeddings.APART)
    if not (architecture.is_tied and case.method.embeddings is Embeddings.TOGETHER_TWICE):
        expected = peft_merged(case, base, adapters, tmp_path / "peft")
        assert set(merged) == set(expected)
        for held in (name for name in expected if case.dtype == "fp16" and architecture.held_in_fp32 in name):
            assert expected[held].dtype == torch.float32
            expected[held] = expected[held].to(torch.float16)
        different = [n for n, t in merged.items() if t.dtype != expected[n].dtype or not torch.equal(t, expected[n])]
        assert different == []
    if architecture.is_tied and case.method.embeddings is not Embeddings.UNTOUCHED:
        wanted = architecture.logits(with_adapters(architecture.load(base, case.num_rows), adapters))
        found = architecture.logits(architecture.load(tmp_path / "merged"))
        assert (found - wanted).abs().max() <= TOLERANCE[case.dtype] * wanted.abs().max()
        before = architecture.logits(architecture.load(base, case.num_rows))
        assert (before - wanted).abs().max() > 10 * (found - wanted).abs().max()
