"""Checks that the result of this run can be merged into its base, and that a correct merge can pass the requested thresholds.

Runs the merge's own planner with the tensors that will be saved. Reads headers only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from finetune_job.api.enumerations import MergeBase
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.methods import METHODS
from finetune_trainer.merge.adapter_settings import AdapterHeaders
from finetune_trainer.merge.plan import merge_plan
from finetune_trainer.merge.quantized_base import packed_in_training, quantized_tensors
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.verify.gate import GATES, LARGEST_MEASURED_KL, TIE_UNITS
from finetune_trainer.verify.verification import judged_dtype
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import ADAPTER_FILE, CONFIG_FILE, TensorHeader, read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model


def check_merge(seen: ModelInspection) -> Iterator[Finding]:
    """Reports a merge that is requested but impossible. Reads headers only."""
    plan, directory, structure = seen.plan, seen.directory, seen.known_structure
    if not plan.merge.enabled or structure.adapter_settings is None:
        return
    # The planner looks only at names and shapes, so the adapter's element type does not matter.
    shapes = structure.saved_tensors | structure.fixed_tensors
    adapter = {name: TensorHeader(name, "F32", shape, Path(ADAPTER_FILE), 0) for name, shape in shapes.items()}
    settings = json.loads(json.dumps(structure.adapter_settings))
    try:
        base, config = read_checkpoint(directory), read_json(directory / CONFIG_FILE)
        model = read_stored_model(base, config)
        packed = packed_in_training(plan, directory) if plan.merge.base is MergeBase.DEQUANTIZED else None
        merge_plan(
            base=base.tensors,
            base_config=config,
            model=model,
            adapters=[AdapterHeaders(adapter, settings)],
            dtype=plan.merge.dtype.value if plan.merge.dtype else None,
            max_shard_bytes=plan.merge.max_shard_bytes,
            quantized=quantized_tensors(directory, model, packed) if packed else {},
        )
        # The merge copies tensors of unknown formats byte for byte, but the verification computes with every tensor.
        model.require_readable()
    except MergeError as error:
        yield make_finding(
            "merge-impossible",
            field="spec.merge.enabled",
            value="true",
            message=str(error),
            fix="change the adapter settings accordingly, or set spec.merge.enabled: false and publish the adapter alone",
        )


def check_thresholds(seen: ModelInspection) -> Iterator[Finding]:
    """Warns of thresholds that a correct merge may miss, because rounding changes the logits. The degree depends on the model.

    Reads headers only.
    """
    plan, merge = seen.plan, seen.plan.merge
    # A merge that only replaces stored tensors with trained tensors does not round, so there is nothing to check.
    if not merge.enabled or METHODS[plan.method.type].needs.trains_base_modules:
        return
    if seen.known_structure.adapter_settings is None:
        return
    dtype = judged_dtype(seen.directory, merge.dtype.value if merge.dtype else None)
    usual, measured = GATES[dtype], LARGEST_MEASURED_KL[dtype]
    tight: list[tuple[str, float, float, str]] = []
    if merge.max_kl_divergence is not None and merge.max_kl_divergence < measured:
        reason = f"rounding to {dtype} alone moves a correct merge by a mean divergence of up to {measured:.2g}, as measured"
        tight.append(("maxKlDivergence", merge.max_kl_divergence, usual.max_mean_kl, reason))
    if merge.min_top1_agreement is not None and merge.min_top1_agreement > usual.min_top1_agreement:
        reason = (
            f"tokens whose logits are more than {TIE_UNITS} roundings of {dtype} apart do not count as tied, and rounding "
            "alone makes them change places at single positions of a correct merge; a requested share permits none of them"
        )
        tight.append(("minTop1Agreement", merge.min_top1_agreement, usual.min_top1_agreement, reason))
    for name, value, default, reason in tight:
        field = f"spec.merge.verify.{name}"
        yield make_finding(
            "verification-within-rounding",
            field=field,
            value=f"{value:g}",
            message=f"{reason}: the merged model may be refused once all the training is done, though nothing is wrong with it",
            fix=f"remove {field}: the default here is {default:g}",
            changes={field: None},
        )
