"""Checks that what this run trains can be merged into its base, and the merge verified within the requested thresholds.

Uses the merge's own planner with the tensors that will be saved. Reads headers only.
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

_VERIFY = "spec.merge.verify"


def check_merge(seen: ModelInspection) -> Iterator[Finding]:
    """Returns at most one finding; none if the merge is possible or not requested. Reads headers only."""
    plan, directory, structure = seen.plan, seen.directory, seen.known_structure
    if not plan.merge.enabled or structure.adapter_settings is None:
        return
    # The planner looks at names and shapes; the adapter's element type does not decide whether it can be merged.
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
        # The merge leaves tensors alone that it cannot read; its verification computes with all.
        model.require_readable()
    except MergeError as error:
        yield make_finding(
            "merge-impossible",
            field="spec.merge.enabled",
            value="true",
            message=str(error),
            fix="change the adapter settings as said, or set spec.merge.enabled: false and publish the adapter alone",
        )


def check_thresholds(seen: ModelInspection) -> Iterator[Finding]:
    """Returns warnings: how far rounding moves the logits depends on the model, and a small one may stay below. Reads headers
    only.
    """
    plan, merge = seen.plan, seen.plan.merge
    if not merge.enabled or seen.known_structure.adapter_settings is None:
        return
    # A merge that replaces stored tensors by trained ones does not round.
    if METHODS[plan.method.type].needs.trains_base_modules:
        return
    if merge.max_kl_divergence is None and merge.min_top1_agreement is None:
        return
    dtype = judged_dtype(seen.directory, merge.dtype.value if merge.dtype else None)
    usual, measured = GATES[dtype], LARGEST_MEASURED_KL[dtype]
    if merge.max_kl_divergence is not None and merge.max_kl_divergence < measured:
        yield _too_tight(
            "maxKlDivergence",
            merge.max_kl_divergence,
            f"rounding to {dtype} alone moves a right merge by a mean divergence of up to {measured:.2g}, as measured",
            f"{usual.max_mean_kl:g}",
        )
    if merge.min_top1_agreement is not None and merge.min_top1_agreement > usual.min_top1_agreement:
        yield _too_tight(
            "minTop1Agreement",
            merge.min_top1_agreement,
            f"tokens whose logits are more than {TIE_UNITS} roundings of {dtype} apart do not count as tied, and rounding "
            "alone makes them change places at single positions of a right merge; of a share that is asked for none is excused",
            f"{usual.min_top1_agreement:g}",
        )


def _too_tight(name: str, value: float, reason: str, usual: str) -> Finding:
    field = f"{_VERIFY}.{name}"
    return make_finding(
        "verification-within-rounding",
        field=field,
        value=f"{value:g}",
        message=f"{reason}: the merged model may be refused once all the training is done, though nothing is wrong with it",
        fix=f"remove {field}: the default here is {usual}",
        changes={field: None},
    )
