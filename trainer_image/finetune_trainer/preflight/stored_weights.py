"""Checks settings against the stored weights. Reports element types that do not fit together, rows of zeros for DoRA, and weights
that take too long to decompose.

Only the check for zeros reads weights: one value per row, and the whole row if that value is zero; for columns, blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from finetune_trainer.weights.finite import MAGNITUDES
from finetune_trainer.weights.headers import TensorHeader, read_checkpoint
from finetune_trainer.weights.rounding import dtype_name

FSDP = "spec.parallelism.fsdp"
PARAM_DTYPE = f"{FSDP}.mixedPrecision.paramDtype"
STORAGE = "spec.method.quantization.quantStorage"
AUTOCAST = "spec.method.lora.autocastAdapterDtype"
SECONDS_PER_PRODUCT = 0.4e-9
"""Seconds to decompose a matrix on one CPU, divided by (larger side * smaller side squared). Measured: 0.2 to 0.32 ns."""
LONGEST_DECOMPOSITION_SECONDS = 3600.0
BLOCK_ROWS = 1024
STARTS_AT_THE_BASE = (LoraInit.ZERO_B, LoraInit.GAUSSIAN)
"""Initialisations with which DoRA's first norms are the norms of the base's rows. In float32, ORTHOGONAL is one too."""


def check_element_types(seen: ModelInspection) -> list[Finding]:
    """Reports element types of the adapted model that do not fit together."""
    model, dtypes = seen.trained.model, resolve_dtypes(seen.plan, stored_dtype(seen.directory))
    return [*_trained_in_float16(model, seen.plan), *_packed_and_cast(seen.plan, dtypes, packed_dtype(seen.plan, dtypes))]


def _trained_in_float16(model: nn.Module, plan: RunPlan) -> Iterator[Finding]:
    wrong = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.dtype is torch.float16]
    if not wrong or plan.training.optimizer is OptimizerName.SGD:
        return
    field, fix = "spec.model.dtype", "set spec.model.dtype: bfloat16"
    changes: dict[str, str | None] = {field: "bfloat16"}
    if plan.method.lora is not None:
        is_first = plan.parallelism.fsdp.version == 1 and plan.parallelism.world_size > 1
        field = AUTOCAST
        fix += ", or hold adapters in float32: autocastAdapterDtype: true" + (" and peftWrapPolicy: true" if is_first else "")
        # Float32 adapters may need different FSDP units from the manifest's float16 adapters, so settings of units are removed.
        changes = dict.fromkeys((AUTOCAST, *((f"{FSDP}.peftWrapPolicy", f"{FSDP}.useOrigParams") if is_first else ())), None)
    yield make_finding(
        "trained-in-float16",
        field=field,
        value="float16",
        message=f"{len(wrong)} parameters, such as {wrong[0]}, are trained in float16: squares of gradients below 2e-4 and "
        "Adam's epsilon are zero in it, and the first steps divide by zero",
        fix=fix,
        changes=changes,
    )


def _packed_and_cast(plan: RunPlan, dtypes: ModelDtypes, packed: torch.dtype) -> Iterator[Finding]:
    """Reports packed weights whose storage type differs from the compute type, if the compute type follows from the weights.

    The rule book reports all other conflicts. `packed`: element type in which 4-bit weights are stored.
    """
    quantization = plan.method.quantization
    if quantization is None or quantization.bits == 8 or plan.parallelism.world_size == 1 or not packed.is_floating_point:
        return
    cast = resolve_casts(plan, dtypes, plan.parallelism.world_size).by_fsdp
    if cast in (None, packed):
        return
    is_first = plan.parallelism.fsdp.version == 1
    field, value = (PARAM_DTYPE, dtype_name(cast)) if is_first else (STORAGE, dtype_name(packed))
    yield make_finding(
        "qlora-storage-not-param-dtype",
        field=field,
        value=value,
        message=f"packed weights stored as {dtype_name(packed)} would be cast to {dtype_name(cast)} as if they were ordinary "
        "numbers, which destroys them",
        fix=f"leave {field} out" + (", or set spec.training.precision: fp32" if is_first else ""),
        changes={field: None},
    )


def check_zero_rows(seen: ModelInspection) -> list[Finding]:
    """Reports the first weight that has a row or column of zeros, by whose norm DoRA would divide."""
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
        # A weight with trained rows has no header here: it is computed for each use, and attached.py refuses it. The files hold a
        # tied weight under only one of its names.
        header = next((headers[other] for other in names.get(id(weight), []) if other in headers), None)
        # If a loader combines a weight from several stored tensors, the check is left to the trainer.
        if header is None or len(header.shape) != 2 or header.dtype not in MAGNITUDES:
            continue
        by_column = bool(layer.lora_magnitude_vector[ADAPTER].fan_in_fan_out)
        number = _zero_column(header) if by_column else _zero_row(header)
        if number is not None:
            module = base_name(f"{name}.weight").removesuffix(".weight")
            message, fix = zero_row(module, "column" if by_column else "row", number)
            field = "spec.method.lora.targetModules"
            return [make_finding("dora-zero-row", field=field, value=module, message=message, fix=fix)]
    return []


def check_decomposition(seen: ModelInspection) -> list[Finding]:
    """Reports a job that would wait too long for its decompositions (all singular values of all adapted weights)."""
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
    """Estimates the seconds that LAPACK needs to decompose weights [outputs, inputs], one after the other."""
    return sum(max(shape) * min(shape) ** 2 for shape in shapes) * SECONDS_PER_PRODUCT / cpus


def _bits(header: TensorHeader) -> Any:
    kind, _ = MAGNITUDES[header.dtype]
    return np.memmap(header.file, dtype=kind, mode="r", offset=header.offset, shape=header.shape)


def _zero_row(header: TensorHeader) -> int | None:
    """Returns the number of the first row whose values are all zero; None if there is none."""
    bits, (_, mask) = _bits(header), MAGNITUDES[header.dtype]
    candidates = np.flatnonzero((bits[:, 0] & mask) == 0)
    return next((int(row) for row in candidates if not (bits[row] & mask).any()), None)


def _zero_column(header: TensorHeader) -> int | None:
    """Returns the number of the first column whose values are all zero; None if there is none, as the first rows usually show."""
    bits, (_, mask) = _bits(header), MAGNITUDES[header.dtype]
    is_zero = np.ones(header.shape[1], dtype=bool)
    for first in range(0, header.shape[0], BLOCK_ROWS):
        is_zero &= ~(bits[first : first + BLOCK_ROWS] & mask).any(axis=0)
        if not is_zero.any():
            return None
    return int(np.flatnonzero(is_zero)[0])
