"""The report's content as plain values, from which `report.json` and the page are written."""

from __future__ import annotations

from itertools import islice

from finetune_memory.verdict import limit_of
from finetune_trainer.inspection.report import ModelReport
from finetune_trainer.release.card import chosen_settings
from finetune_trainer.release.commands import convert_adapter, convert_merged, copy_command, serve_adapter, serve_merged
from finetune_trainer.release.facts import RunFacts, TrainingHistory
from finetune_trainer.release.write import versions
from finetune_trainer.report.charts import Points, finite_points, thin
from finetune_trainer.report.document import (
    MAX_ENTRIES,
    MOST_NUMBER,
    Chosen,
    Command,
    CurvePoint,
    DataCard,
    HeldOutLoss,
    LossAtStep,
    MemoryOfRank,
    OutcomeOfMerge,
    RunSummary,
    Samples,
    SourceOfRecords,
    TimeOfRun,
    Training,
    VerdictOfRun,
    VerificationOfMerge,
    Warned,
    known_count,
)
from finetune_trainer.report.timeline import Timeline

CURVES = ("loss", "eval_loss", "learning_rate", "gradient_norm", "tokens_per_second")
_COUNTS_OF_SPLIT = ("num_sequences", "num_dropped", "num_tokens")
_COUNTS_OF_SOURCE = ("num_records", "num_dropped", "num_repeated", "num_tokens", "num_supervised_tokens")


def run_summary(facts: RunFacts, timeline: Timeline, samples: Samples) -> RunSummary:
    """Summarise a run that has results, or whose results failed verification. Equal arguments give equal summaries."""
    plan, history = facts.plan, facts.history
    warnings = timeline.preflight.warnings if timeline.preflight is not None else ()
    lists = {"attempts": timeline.attempts, "sources": facts.sources, "warnings": warnings, "choices": plan.choices}
    return RunSummary(
        job={"namespace": plan.job.namespace, "name": plan.job.name, "uid": plan.job.uid},
        method=plan.method.type.value,
        model=plan.model.name,
        revision=plan.model.revision or "",
        verdict=verdict(facts),
        held_out_loss=held_out_loss(history),
        training=Training(
            steps=facts.trained_step,
            tokens=history.tokens,
            supervised_tokens=history.supervised_tokens,
            tokens_per_second=history.tokens_per_second,
            calculated_tokens_per_second=history.calculated_tokens_per_second,
        ),
        curves={name: _curve(history.values(name)) for name in CURVES},
        samples=samples,
        time=TimeOfRun(
            attempts=timeline.attempts[:MAX_ENTRIES],
            lost_steps=timeline.lost_steps,
            goodput=timeline.goodput.goodput,
            productive_seconds=timeline.goodput.productive_seconds,
            other_seconds={cause.value: seconds for cause, seconds in timeline.goodput.badput_seconds.items()},
        ),
        memory=_memory(facts, timeline),
        data=_data(facts, timeline.preflight),
        verification=_verification(facts),
        commands=tuple(Command(purpose=what, line=line) for what, line in commands(facts)),
        serving_notes=facts.serving.reasons + facts.serving.notes if facts.serving is not None else (),
        settings=dict(chosen_settings(plan)),
        choices=tuple(
            Chosen(field=choice.field, value=None if choice.value is None else str(choice.value), reason=choice.reason)
            for choice in plan.choices[:MAX_ENTRIES]
        ),
        provenance=_provenance(facts),
        left_out={name: len(entries) - MAX_ENTRIES for name, entries in lists.items() if len(entries) > MAX_ENTRIES},
    )


def verdict(facts: RunFacts) -> VerdictOfRun:
    """Return the outcome of the run, with a sentence about it."""
    if facts.verification is None:
        what = "adapter" if facts.plan.method.trains_adapter else "model"
        return VerdictOfRun(
            outcome=OutcomeOfMerge.NOT_MERGED, text=f"The {what} was trained. Nothing was merged, so there was nothing to verify."
        )
    if not facts.verification.passed:
        return VerdictOfRun(
            outcome=OutcomeOfMerge.FAILED,
            text="The merged model failed its verification, so it is not a result. The adapter is intact.",
        )
    return VerdictOfRun(
        outcome=OutcomeOfMerge.PASSED, text="The merged model passed its verification: it computes what base and adapter compute."
    )


def held_out_loss(history: TrainingHistory) -> HeldOutLoss | None:
    """Return the first, last and lowest held-out loss; None unless it is known at two or more steps."""
    evaluations = history.values("eval_loss")
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    best = min(evaluations, key=lambda entry: entry[1])
    moments = {"first": first, "last": last, "best": best}
    return HeldOutLoss(
        **{name: LossAtStep(step=step, loss=loss) for name, (step, loss) in moments.items()},
        change=(last[1] - first[1]) / first[1] if first[1] else 0.0,
        has_fallen=last[1] < first[1],
        rises_again=best[0] != last[0] and last[1] > best[1] * 1.02,
    )


def _memory(facts: RunFacts, timeline: Timeline) -> MemoryOfRank | None:
    """Return a rank's estimated memory, measured peak, and limit; None if neither estimate nor peak is known."""
    estimated = timeline.preflight.memory if timeline.preflight is not None else {}
    terms = {name: size for name, size in islice(estimated.items(), MAX_ENTRIES) if 0 < size < MOST_NUMBER}
    peak, limit = known_count(facts.history.peak_memory_bytes), limit_of(facts.plan)
    estimate = known_count(sum(terms.values())) or None
    if estimate is None and peak is None:
        return None
    return MemoryOfRank(
        estimate=estimate,
        terms=terms if estimate is not None else {},
        peak=peak,
        limit=limit.bytes if limit is not None else None,
        limit_source=limit.source if limit is not None else "",
    )


def commands(facts: RunFacts) -> list[tuple[str, str]]:
    """List each command with its purpose. If the merged model failed verification, nothing is published; the list is empty."""
    if facts.verification is not None and not facts.verification.passed:
        return []
    has_merged, has_adapter = facts.layout.has_merged, facts.layout.has_adapter
    lines = (
        ("Copy the results here", copy_command(facts)),
        ("Serve the merged model with vLLM", serve_merged(facts) if has_merged else None),
        ("Serve the adapter with vLLM", serve_adapter(facts) if has_adapter else None),
        ("Convert the merged model for llama.cpp", convert_merged(facts) if has_merged else None),
        ("Convert the adapter for llama.cpp", convert_adapter(facts) if has_adapter else None),
    )
    return [(what, line) for what, line in lines if line is not None]


def _provenance(facts: RunFacts) -> dict[str, str]:
    """Return the facts that document where the results come from."""
    plan = facts.plan
    rows = [
        ("job", f"{plan.job.namespace}/{plan.job.name}"),
        ("job uid", plan.job.uid),
        ("base model", facts.base_source),
        ("base revision", plan.model.revision or ""),
        ("base digest, SHA-256 over configuration, index, headers and sizes", facts.model_digest or ""),
        ("data, SHA-256", facts.data_hash),
        ("plan, SHA-256", facts.plan_sha256),
        ("what is learnt, SHA-256", facts.learning_sha256),
        ("trainer image", plan.placement.trainer_image if plan.placement is not None else ""),
        ("licence of the base", facts.licence.name or facts.licence.identifier or ", ".join(facts.licence.files)),
        *((f"version of {package}", version) for package, version in versions().items()),
    ]
    return {name: value for name, value in rows if value}


def _curve(points: Points) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(step=group.step, value=group.mean, lowest=group.smallest, highest=group.largest)
        for group in thin(finite_points(points))
    )


def _data(facts: RunFacts, preflight: ModelReport | None) -> DataCard:
    lengths = sorted(preflight.record_lengths.items())[:MAX_ENTRIES] if preflight is not None else []
    warnings = preflight.warnings[:MAX_ENTRIES] if preflight is not None else ()
    return DataCard(
        sources=tuple(
            SourceOfRecords(
                source=source.source,
                split=source.split,
                revision=source.revision or "",
                weight=source.weight,
                files=len(source.files),
                counts={name: source.counts.get(name) for name in _COUNTS_OF_SOURCE},
            )
            for source in facts.sources[:MAX_ENTRIES]
        ),
        splits={
            split: {name: counts.get(name) for name in _COUNTS_OF_SPLIT}
            for split, counts in islice(facts.splits.items(), MAX_ENTRIES)
        },
        record_lengths={str(upper): count for upper, count in lengths if known_count(upper)},
        warnings=tuple(Warned(rule=warning.rule, message=warning.message, fix=warning.fix) for warning in warnings),
    )


def _verification(facts: RunFacts) -> VerificationOfMerge | None:
    report = facts.verification
    if report is None:
        return None
    logits, gate = report.logits, report.gate
    figures: dict[str, float] = {}
    if logits is not None and gate is not None:
        figures = {
            "relative_difference": logits.relative_difference,
            "max_relative_difference": gate.allowed_difference(logits),
            "mean_kl": logits.mean_kl,
            "max_mean_kl": gate.max_mean_kl,
            "top1_agreement": logits.top1_agreement,
            "min_top1_agreement": gate.min_top1_agreement,
            "effect_mean_kl": logits.effect_mean_kl,
        }
    return VerificationOfMerge(
        passed=report.passed,
        faults=tuple(report.faults[:MAX_ENTRIES]),
        untouched_tensors=report.tensors.num_untouched,
        changed_tensors=report.tensors.num_changed,
        **figures,
    )
