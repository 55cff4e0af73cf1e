"""Checks settings against the stored weights: element types that do not fit together, rows of zeros for DoRA, and weights that
take too long to decompose.

Only the check of zero rows reads weight values: one value of each row, and whole rows only if it is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from finetune_job.api.method import LoraInit
from finetune_job.api.training import OptimizerName
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.module_names import ADAPTER
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.data.cpus import available_cpus
from finetune_trainer.model.adapters import lora_layers
from finetune_trainer.model.dtypes import ModelDtypes, resolve_casts, resolve_dtypes
from finetune_trainer.model.invariants import zero_row
from finetune_trainer.model.load import packed_dtype, stored_dtype
from finetune_trainer.model.load_shards import base_name
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.weights.headers import TensorHeader, read_checkpoint
from finetune_trainer.weights.rounding import dtype_name

FSDP = "spec.parallelism.fsdp"
PARAM_DTYPE = f"{FSDP}.mixedPrecision.paramDtype"
STORAGE = "spec.method.quantization.quantStorage"
AUTOCAST = "spec.method.lora.autocastAdapterDtype"
MAGNITUDES: Mapping[str, tuple[Any, int]] = {
    "F32": (np.dtype("<u4"), 0x7FFFFFFF),
    "F16": (np.dtype("<u2"), 0x7FFF),
    "BF16": (np.dtype("<u2"), 0x7FFF),
}
"""The bits of a value as a whole number, and those of them that are not its sign, by element type."""
SECONDS_PER_PRODUCT = 0.4e-9
"""Seconds of a decomposition on one CPU, over the product of the larger side and the square of the smaller one: 0.2 to 0.32
measured.
"""
LONGEST_DECOMPOSITION_SECONDS = 3600.0
BLOCK_ROWS = 1024
STARTS_AT_THE_BASE = (LoraInit.ZERO_B, LoraInit.GAUSSIAN)
"""Inits under which the first norms are those of the base's own rows. This includes orthogonal factors, except for rounding
to 16 bits.
"""


def check_element_types(seen: ModelInspection) -> list[Finding]:
    """Returns the findings about the adapted model."""
    dtypes = resolve_dtypes(seen.plan, stored_dtype(seen.directory))
    return [
        *_trained_in_float16(seen.trained.model, seen.plan),
        *_packed_and_cast(seen.plan, dtypes, packed_dtype(seen.plan, dtypes)),
    ]


def _trained_in_float16(model: nn.Module, plan: RunPlan) -> Iterator[Finding]:
    wrong = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.dtype is torch.float16]
    if not wrong or plan.training.optimizer is OptimizerName.SGD:
        return
    first = plan.parallelism.fsdp.version == 1 and plan.parallelism.world_size > 1
    reason = (
        f"{len(wrong)} parameters are trained in float16, first {wrong[0]}: squares of gradients below 2e-4 and Adam's epsilon "
    )
    reason += "are zero in it, and the first steps divide by zero"
    fix = "set spec.model.dtype: bfloat16"
    if plan.method.lora is not None:
        fix += ", or hold adapters in float32: autocastAdapterDtype: true" + (" and peftWrapPolicy: true" if first else "")
        # Float32 adapters may need other units than those that were written for float16 adapters.
        units = (f"{FSDP}.peftWrapPolicy", f"{FSDP}.useOrigParams") if first else ()
        changes = dict.fromkeys((AUTOCAST, *units), None)
        yield make_finding("trained-in-float16", field=AUTOCAST, value="float16", message=reason, fix=fix, changes=changes)
    else:
        yield make_finding(
            "trained-in-float16",
            field="spec.model.dtype",
            value="float16",
            message=reason,
            fix=fix,
            changes={"spec.model.dtype": "bfloat16"},
        )


def _packed_and_cast(plan: RunPlan, dtypes: ModelDtypes, packed: torch.dtype) -> Iterator[Finding]:
    """Reports a conflict only if the type of the computation, or of the base, follows from the stored weights.

    The rule book reports all others. `packed`: element type as which 4-bit weights are stored.
    """
    quantization, version = plan.method.quantization, plan.parallelism.fsdp.version
    if quantization is None or quantization.bits == 8 or plan.parallelism.world_size == 1 or not packed.is_floating_point:
        return
    cast = resolve_casts(plan, dtypes, plan.parallelism.world_size).by_fsdp
    if cast in (None, packed):
        return
    computed = dtype_name(cast)
    reason = f"packed weights stored as {dtype_name(packed)} would be converted to {computed} like numbers, which destroys them"
    if version == 1:
        fix = f"leave {PARAM_DTYPE} out, or set spec.training.precision: fp32"
        yield make_finding(
            "qlora-storage-not-param-dtype",
            field=PARAM_DTYPE,
            value=computed,
            message=reason,
            fix=fix,
            changes={PARAM_DTYPE: None},
        )
    else:
        fix = f"leave {STORAGE} out"
        yield make_finding(
            "qlora-storage-not-param-dtype",
            field=STORAGE,
            value=dtype_name(packed),
            message=reason,
            fix=fix,
            changes={STORAGE: None},
        )


def check_zero_rows(seen: ModelInspection) -> list[Finding]:
    """Reports the first weight with such a row."""
    model, lora = seen.trained.model, seen.lora
    if not lora.use_dora or lora.init_lora_weights not in (*STARTS_AT_THE_BASE, LoraInit.ORTHOGONAL):
        return []
    headers = read_checkpoint(seen.directory).tensors
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(base_name(name))
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or ADAPTER not in layer.lora_magnitude_vector:
            continue
        weight = layer.get_base_layer().weight
        if lora.init_lora_weights is LoraInit.ORTHOGONAL and weight.dtype is not torch.float32:
            continue
        # A weight with trained rows is made again for each reader, and refused elsewhere (attached.py).
        header = _stored(names.get(id(weight), []), headers)
        # A layer whose weight a loader combines from several stored ones is left to the trainer.
        if header is None or len(header.shape) != 2 or header.dtype not in MAGNITUDES:
            continue
        by_column = bool(layer.lora_magnitude_vector[ADAPTER].fan_in_fan_out)
        number = _zero_column(header) if by_column else _zero_row(header)
        if number is not None:
            return [_zero(base_name(f"{name}.weight").removesuffix(".weight"), "column" if by_column else "row", number)]
    return []


def check_decomposition(seen: ModelInspection) -> list[Finding]:
    """Reports decompositions, of every singular value of every weight, that would take longer than a job should wait."""
    if seen.lora.init_lora_weights is not LoraInit.PISSA or not isinstance(seen.trained.model, PeftModel):
        return []
    layers = lora_layers(seen.trained.model).values()
    seconds = decomposition_seconds([(layer.out_features, layer.in_features) for layer in layers], available_cpus())
    if seconds <= LONGEST_DECOMPOSITION_SECONDS:
        return []
    field = "spec.method.lora.initLoraWeights"
    return [
        make_finding(
            "decomposition-too-long",
            field=field,
            value=LoraInit.PISSA.value,
            message=f"all singular values of {len(layers)} weights take about {seconds / 3600:.1f} hours on the "
            f"{available_cpus()} CPUs of this pod",
            fix=f"set {field}: {LoraInit.PISSA_NITER_16.value}, which computes only those that are used, in minutes",
            changes={field: LoraInit.PISSA_NITER_16.value},
        )
    ]


def decomposition_seconds(shapes: Iterable[tuple[int, int]], cpus: int) -> float:
    """Estimates the time of LAPACK's decomposition of weights [outputs, inputs], one after the other."""
    return sum(max(shape) * min(shape) ** 2 for shape in shapes) * SECONDS_PER_PRODUCT / cpus


def _stored(names: list[str], headers: Mapping[str, TensorHeader]) -> TensorHeader | None:
    """Finds a weight in the files, where a tied one has only one of its names."""
    return next((headers[name] for name in names if name in headers), None)


def _bits(header: TensorHeader) -> Any:
    kind, _ = MAGNITUDES[header.dtype]
    return np.memmap(header.file, dtype=kind, mode="r", offset=header.offset, shape=header.shape)


def _zero_row(header: TensorHeader) -> int | None:
    """Returns the number of the first row whose values are all zero."""
    bits, (_, mask) = _bits(header), MAGNITUDES[header.dtype]
    candidates = np.flatnonzero((bits[:, 0] & mask) == 0)
    return next((int(row) for row in candidates if not (bits[row] & mask).any()), None)


def _zero_column(header: TensorHeader) -> int | None:
    """Returns the number of the first column whose values are all zero; the first rows usually decide."""
    bits, (_, mask) = _bits(header), MAGNITUDES[header.dtype]
    is_zero = np.ones(header.shape[1], dtype=bool)
    for first in range(0, header.shape[0], BLOCK_ROWS):
        is_zero &= ~(bits[first : first + BLOCK_ROWS] & mask).any(axis=0)
        if not is_zero.any():
            return None
    return int(np.flatnonzero(is_zero)[0])


def _zero(module: str, kind: str, number: int) -> Finding:
    message, fix = zero_row(module, kind, number)
    return make_finding("dora-zero-row", field="spec.method.lora.targetModules", value=module, message=message, fix=fix)
