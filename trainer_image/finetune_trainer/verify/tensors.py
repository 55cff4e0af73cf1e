"""Compares merged tensors with base and adapters, without a model: untouched tensors byte for byte, changed ones in fp64.

In: directories. Out: TensorFigures by class of tensor, with every fault. The merge's plan says which tensors may differ, and how.
This module checks the differences with the formulas of exact.py; the comparison of logits checks the plan.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from finetune_job.module_names import EMBEDDINGS, OUTPUT_HEADS, is_router
from finetune_trainer.files import MANIFEST_FILE, FileDigests
from finetune_trainer.merge.changes import LowRank, Quantization, TokenRows
from finetune_trainer.merge.inputs import plan_merge
from finetune_trainer.merge.plan import OutputTensor
from finetune_trainer.processes.torch_threads import one_thread_for_each_operation
from finetune_trainer.verify.exact import ExactMatrix, clear_adapter_cache, has_formula, is_zero, read_rows
from finetune_trainer.weights.headers import CONFIG_FILE, TensorHeader, read_checkpoint, read_json
from finetune_trainer.weights.rounding import TORCH_DTYPES

SAMPLE_ROWS = 16
"""Number of rows of each changed matrix that are computed again in fp64, besides the first and the last."""
MIN_SAMPLE_ROWS = 4
"""Minimum number of these rows if many matrices are stacked in one tensor."""
TOKEN_ROWS = 64
"""Maximum number of additional rows for trained tokens, and also for added tokens."""
READ_BYTES = 8 << 20
FIRST_ELEMENTS = 4096
"""Number of elements that are compared first, because a changed tensor usually differs in them."""
_UNBOUNDED = 1 << 62
_WRITTEN_BY_MERGE = frozenset({"dtype", "torch_dtype"})
"""Fields of config.json that follow from the merge's options, not from the model."""

TENSOR_CLASSES = (
    "attention q", "attention k", "attention v", "attention o", "attention q+k+v", "mlp gate", "mlp up", "mlp down",
    "experts", "router", "embeddings", "output head", "norms", "other",
)  # fmt: skip
"""Classes in the order in which reports list them."""
_MODULES = {
    "attention q": {"q_proj", "q", "query", "wq", "q_a_proj", "q_b_proj"},
    "attention k": {"k_proj", "k", "key", "wk"},
    "attention v": {"v_proj", "v", "value", "wv"},
    "attention o": {"o_proj", "o", "wo", "out_proj", "dense"},
    "attention q+k+v": {"c_attn", "qkv_proj", "query_key_value", "Wqkv"},
    "mlp gate": {"gate_proj", "wi_0", "w1"},
    "mlp up": {"up_proj", "wi", "wi_1", "c_fc", "w3", "gate_up_proj", "dense_h_to_4h", "fc1"},
    "mlp down": {"down_proj", "w2", "dense_4h_to_h", "fc2"},
    "embeddings": EMBEDDINGS,
    "output head": OUTPUT_HEADS,
}
_CLASSES = {module: name for name, modules in _MODULES.items() for module in modules}
_NORM = re.compile(r"norm|(^|\.)ln_?\w*$", re.IGNORECASE)
_MLP_BLOCK = re.compile(r"(^|\.)(mlp|ff|feed_forward|DenseReluDense)$")


@dataclass
class TensorClassFigures:
    """Figures of one class of tensors.

    worst_rounding: largest ratio of an error to the error that rounding allows. relative_change: ||W' - W||/||W|| of sampled
    rows. num_by_logits_only: number of changed tensors that only PEFT can compute, so only the comparison of logits covers them.
    """

    num_untouched: int = 0
    num_changed: int = 0
    num_by_logits_only: int = 0
    num_values_sampled: int = 0
    worst_rounding: float = 0.0
    squared_change: float = 0.0
    squared_base: float = 0.0

    @property
    def relative_change(self) -> float:
        return math.sqrt(self.squared_change / self.squared_base) if self.squared_base else 0.0


@dataclass
class TensorFigures:
    """Figures by class, in the order of TENSOR_CLASSES, and a sentence about each fault."""

    classes: dict[str, TensorClassFigures] = field(
        default_factory=lambda: {name: TensorClassFigures() for name in TENSOR_CLASSES}
    )
    num_changed_tensors_with_base_bytes: int = 0
    is_zero_adapter: bool = False
    faults: list[str] = field(default_factory=list)

    @property
    def num_untouched(self) -> int:
        return sum(figures.num_untouched for figures in self.classes.values())

    @property
    def num_changed(self) -> int:
        return sum(figures.num_changed for figures in self.classes.values())

    @property
    def num_by_logits_only(self) -> int:
        return sum(figures.num_by_logits_only for figures in self.classes.values())

    @property
    def num_values_sampled(self) -> int:
        return sum(figures.num_values_sampled for figures in self.classes.values())

    @property
    def worst_rounding(self) -> float:
        return max((figures.worst_rounding for figures in self.classes.values()), default=0.0)


@one_thread_for_each_operation()  # samples are small, and files are hashed meanwhile
def check_tensors(base: Path, adapters: Sequence[Path], merged: Path, quantization: Quantization | None = None) -> TensorFigures:
    """Compare all tensors. quantization: how the base was quantized, if the merge added to the dequantized base.

    Raises MergeError only if a directory cannot be read.
    """
    plan = plan_merge(base, adapters, None, _UNBOUNDED, quantization)
    merged_tensors = read_checkpoint(merged).tensors
    figures = TensorFigures()
    # A model with other settings can have the same tensors, so the configuration is compared as well.
    expected, result_config = {**read_json(base / CONFIG_FILE), **plan.config_changes}, read_json(merged / CONFIG_FILE)
    for key in sorted((expected.keys() | result_config.keys()) - _WRITTEN_BY_MERGE):
        first, second = _without_dtype(expected.get(key)), _without_dtype(result_config.get(key))
        if first != second:
            figures.faults.append(f"{CONFIG_FILE}: {key} is {second!r} in the merged model, but should be {first!r}")
    planned = {tensor.name: tensor for tensor in plan.tensors}
    figures.faults += (f"tensor {name} is missing in the merged model" for name in sorted(planned.keys() - merged_tensors.keys()))
    figures.faults += (f"tensor {name} is not a tensor of this model" for name in sorted(merged_tensors.keys() - planned.keys()))
    originals = read_checkpoint(base).tensors
    changed = [tensor for tensor in planned.values() if tensor.is_changed_by_adapter]
    figures.is_zero_adapter = all(_is_zero_change(tensor, originals) for tensor in changed)
    for name in sorted(planned.keys() & merged_tensors.keys()):
        tensor, result = planned[name], merged_tensors[name]
        of_class = figures.classes[class_of(name)]
        if tensor.shape != result.shape:
            figures.faults.append(f"tensor {name} has shape {list(result.shape)}, but should have {list(tensor.shape)}")
        elif tensor.is_changed_by_adapter:
            of_class.num_changed += 1
            original = originals.get(name)
            if original is not None and _is_cast_of(original, result, original.dtype):
                figures.num_changed_tensors_with_base_bytes += 1
            figures.faults += _faults_of_changed(tensor, original, result, of_class)
        else:
            of_class.num_untouched += 1
            if not _is_cast_of(tensor.source, result, tensor.compute_dtype):
                figures.faults.append(f"tensor {name} differs from the base, although the adapter does not touch it")
    clear_adapter_cache()
    if figures.num_changed and figures.num_changed == figures.num_changed_tensors_with_base_bytes and not figures.is_zero_adapter:
        figures.faults.append(
            "the merged model has the base model's weights in every tensor that the adapter changes: the adapter was not "
            "merged, or is smaller than the dtype's precision (merge into a wider dtype)"
        )
    return figures


def manifest_faults(merged: Path, digests: FileDigests) -> Iterator[str]:
    """Yield a fault for each file of a merged model that differs from the model's manifest."""
    path = merged / MANIFEST_FILE
    if not path.exists():
        return
    for entry in json.loads(path.read_text(encoding="utf-8"))["files"]:
        file = merged / entry["name"]
        if not file.exists():
            yield f"file {entry['name']} is in the manifest but not on disk"
            continue
        if digests.of(file) != entry["sha256"]:
            yield f"file {entry['name']} does not have the sha256 of the manifest: it changed after the merge"


def _without_dtype(value: Any) -> Any:
    return {key: item for key, item in value.items() if key not in _WRITTEN_BY_MERGE} if isinstance(value, dict) else value


def _is_zero_change(tensor: OutputTensor, originals: Mapping[str, TensorHeader]) -> bool:
    """Whether no value can change: each change has an all-zero LoRA factor and no magnitude, and copies equal the base."""
    original = originals.get(tensor.name)
    if tensor.is_replaced and not (original is not None and _is_cast_of(tensor.source, original, original.dtype)):
        return False
    changes = [change for matrix in tensor.changes for change in matrix]
    return all(
        isinstance(change, LowRank) and change.magnitude is None and (is_zero(change.b) or is_zero(change.a))
        for change in changes
    )


def _faults_of_changed(
    tensor: OutputTensor, original: TensorHeader | None, result: TensorHeader, figures: TensorClassFigures
) -> Iterator[str]:
    """Yield at most one fault, about the first matrix with an error that rounding does not explain."""
    if not tensor.changes:
        if not _is_cast_of(tensor.source, result, tensor.compute_dtype):
            yield f"tensor {tensor.name} is not the adapter's copy {tensor.source.name}"
        return
    if not all(has_formula(matrix) for matrix in tensor.changes):
        figures.num_by_logits_only += 1
        return
    out = TORCH_DTYPES[result.dtype]
    held = torch.promote_types(TORCH_DTYPES[tensor.compute_dtype], out)
    shape = tensor.matrix_shape
    sampler = random.Random(tensor.name)  # noqa: S311 - which rows are compared, the same ones each time
    # Rows that resizing the vocabulary added; none if the base stores no head of its own to compare with.
    added = range(original.shape[0], shape[0]) if original is not None and len(tensor.changes) == 1 else range(0)
    size = max(MIN_SAMPLE_ROWS, SAMPLE_ROWS // len(tensor.changes))
    for index, changes in enumerate(tensor.changes):
        tokens = [row for change in changes if isinstance(change, TokenRows) for row in change.indices]
        rows = {0, shape[0] - 1, *sampler.sample(tokens, min(len(tokens), TOKEN_ROWS))}
        rows |= {*sampler.sample(range(shape[0]), min(shape[0], size)), *sampler.sample(added, min(len(added), TOKEN_ROWS))}
        chosen = sorted(rows)
        merged = read_rows(result, index, shape, chosen).double()
        before = read_rows(tensor.source, index, shape, chosen).double()
        expected, allowed = ExactMatrix(tensor.source, index, shape, changes, held=held, out=out).rows(chosen)
        figures.num_values_sampled += merged.numel()
        figures.squared_change += float(((merged - before) ** 2).sum())
        figures.squared_base += float((before**2).sum())
        ratio = torch.nan_to_num((merged - expected).abs() / allowed, nan=math.inf)
        worst = int(ratio.argmax())
        row, column = divmod(worst, shape[1])
        figures.worst_rounding = max(figures.worst_rounding, float(ratio.view(-1)[worst]))
        if float(ratio.view(-1)[worst]) > 1:
            where = [*([index] if len(tensor.changes) > 1 else []), chosen[row], *([column] if len(tensor.shape) > 1 else [])]
            yield (
                f"tensor {tensor.name} at {where} is {float(merged[row, column]):.9g}, fp64 gives "
                f"{float(expected[row, column]):.9g}; rounding allows {float(allowed[row, column]):.2g}"
            )
            return


def _is_cast_of(source: TensorHeader, result: TensorHeader, held_as: str) -> bool:
    """Whether `result` is `source` cast twice: to the wider of `held_as` and `result`'s own dtype, then to the latter."""
    if source.dtype != result.dtype and not {source.dtype, result.dtype} <= TORCH_DTYPES.keys():
        return False
    num_elements = math.prod(source.shape)
    if num_elements != math.prod(result.shape):
        return False
    start, count = 0, FIRST_ELEMENTS
    with source.file.open("rb") as first, result.file.open("rb") as second:
        first.seek(source.offset)
        second.seek(result.offset)
        while start < num_elements:
            count = min(count, num_elements - start)
            left = first.read(count * source.num_bytes // num_elements)
            right = second.read(count * result.num_bytes // num_elements)
            start, count = start + count, READ_BYTES // 8
            if source.dtype == result.dtype == held_as:
                if left != right:
                    return False
                continue
            values = torch.frombuffer(bytearray(left), dtype=TORCH_DTYPES[source.dtype])
            out_dtype = TORCH_DTYPES[result.dtype]
            widened = values.to(torch.promote_types(TORCH_DTYPES[held_as], out_dtype))
            if not torch.equal(widened.to(out_dtype), torch.frombuffer(bytearray(right), dtype=out_dtype)):
                return False
    return True


def class_of(name: str) -> str:
    """Return the tensor's class from TENSOR_CLASSES. Biases and other parameters belong to the class of their module."""
    module = name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name
    parent, _, last = module.rpartition(".")
    if is_router(module):
        return "router"
    if ".experts." in f".{module}.":
        return "experts"
    if _NORM.search(last):
        return "norms"
    if last in ("c_proj", "wo") and _MLP_BLOCK.search(parent):
        return "mlp down"
    if last == "c_proj":
        return "attention o"
    return _CLASSES.get(last, "other")
