"""The rows of docs/reference/methods.md, and which cases of the sweep answer them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from finetune_job.methods import Family, supported
from tests.sweep.case import Case
from tests.sweep.covering import products

VERSIONS = ("2", "1")


@dataclass(frozen=True)
class Row:
    """Something that people ask about."""

    title: str
    values: Mapping[str, str]


@dataclass(frozen=True)
class Attempt:
    """A way to have it, tried in this order until one works."""

    condition: str
    """What has to be set for it; empty: nothing."""
    values: Mapping[str, str] = field(default_factory=dict)


_WHOLE = {"precision": "fp32", "use_orig": "true"}
ATTEMPTS = (
    Attempt(""),
    Attempt("`merge.enabled: false`", {"merge": "false"}),
    Attempt("`training.precision: fp32`", {"precision": "fp32"}),
    Attempt("`training.precision: fp32` and `useOrigParams: true`", _WHOLE),
    Attempt("one rank", {"ranks": "1"}),
    Attempt("one rank and `merge.enabled: false`", {"ranks": "1", "merge": "false"}),
)
LORA_ROWS = (
    Row("LoRA", {"method": "LoRA"}),
    Row("LoRA, rsLoRA scaling", {"method": "LoRA", "rslora": "true"}),
    Row("LoRA, LoRA+ learning rates", {"method": "LoRA", "lora_plus": "4"}),
    Row("LoRA, rank and alpha patterns", {"method": "LoRA", "rank_pattern": "one", "alpha_pattern": "one"}),
    Row("LoRA on embeddings", {"method": "LoRA", "targets": "embedding"}),
    Row("LoRA on the output head", {"method": "LoRA", "targets": "head"}),
    Row("LoRA on tied embeddings", {"method": "LoRA", "architecture": "llama_tied", "targets": "embedding"}),
    Row("LoRA, `modulesToSave` (output head)", {"method": "LoRA", "saved": "head"}),
    Row("LoRA, `modulesToSave` (embeddings and head)", {"method": "LoRA", "saved": "head and embedding"}),
    Row("LoRA, `modulesToSave` (norms)", {"method": "LoRA", "saved": "norm"}),
    Row("LoRA, `trainableTokenIndices`", {"method": "LoRA", "tokens": "some"}),
    Row(
        "LoRA, `trainableTokenIndices`, tied embeddings",
        {"method": "LoRA", "architecture": "llama_tied", "tokens": "some"},
    ),
    Row("LoRA on expert parameters (Mixtral)", {"method": "LoRA", "architecture": "mixtral", "parameters": "experts"}),
    Row("LoRA on expert parameters (Qwen3 MoE)", {"method": "LoRA", "architecture": "qwen3_moe", "parameters": "experts"}),
    Row("LoRA, trained biases", {"method": "LoRA", "architecture": "llama_biased", "bias": "lora_only"}),
    Row("LoRA on GPT-2 (Conv1D layers)", {"method": "LoRA", "architecture": "gpt2"}),
    Row("LoRA on Mamba, records apart", {"method": "LoRA", "architecture": "mamba", "packing": "false"}),
    Row("DoRA", {"method": "DoRA"}),
    Row("DoRA on embeddings", {"method": "DoRA", "targets": "embedding"}),
    Row("QLoRA, NF4, stored in the model's type", {"method": "QLoRA"}),
    Row("QLoRA, NF4, uint8 storage", {"method": "QLoRA", "storage": "uint8"}),
    Row("QLoRA, evaluated during the run", {"method": "QLoRA", "validation": "some", "evaluate": "1"}),
    Row("QLoRA, FP4", {"method": "QLoRA", "quant_type": "fp4"}),
    Row("QLoRA, merged into the unpacked weights", {"method": "QLoRA", "merge_base_packed": "Dequantized"}),
    Row("QLoRA, 8 bits", {"method": "QLoRA", "bits": "8"}),
    Row("QDoRA, NF4", {"method": "QDoRA"}),
    Row("QDoRA, FP4, uint8 storage", {"method": "QDoRA", "quant_type": "fp4", "storage": "uint8"}),
    Row("QDoRA, merged into the unpacked weights", {"method": "QDoRA", "merge_base_packed": "Dequantized"}),
    Row("QDoRA, 8 bits", {"method": "QDoRA", "bits": "8"}),
    Row("Full fine-tuning", {"method": "Full"}),
    Row("Full fine-tuning, tied embeddings", {"method": "Full", "architecture": "llama_tied"}),
)
OTHER_ROWS = tuple(Row(kind.value, {"method": kind.value}) for kind in supported(Family.OTHER))
ROWS = (*LORA_ROWS, *OTHER_ROWS)


def case_of(row: Row, version: str, attempt: Attempt) -> Case | None:
    """None where the attempt does not apply to the row."""
    values = {**row.values, "version": version, **attempt.values}
    found = products([{name: (value,) for name, value in values.items()}])
    return found[0] if found else None


def table_cases(attempt: Attempt, answered: Set[tuple[str, str]]) -> dict[tuple[str, str], Case]:
    """What to run next, by row and version; `answered`: those that need no further attempt."""
    cases = {(row.title, version): case_of(row, version, attempt) for row in ROWS for version in VERSIONS}
    return {key: case for key, case in cases.items() if case is not None and key not in answered}
