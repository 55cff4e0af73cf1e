"""Thresholds of the verification that a right merge into this base may miss by rounding alone."""

from __future__ import annotations

from collections.abc import Iterator

from finetune_job.catalogue.book import make_finding
from finetune_job.methods import METHODS
from finetune_job.rules.rule import Finding
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.verify.element_types import judged_dtype
from finetune_trainer.verify.gate import GATES, LARGEST_MEASURED_KL, TIE_UNITS

_VERIFY = "spec.merge.verify"


def check_thresholds(seen: ModelInspection) -> Iterator[Finding]:
    """Warnings: how far rounding moves the logits depends on the model, and a small one may stay below. Reads headers only."""
    plan, merge = seen.plan, seen.plan.merge
    if not merge.enabled or seen.known_structure.adapter_settings is None:
        return
    # A merge that puts what was trained in the place of what is stored does not round.
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
