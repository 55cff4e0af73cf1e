"""The report's content in plain values: `report.json`, and the figures of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from finetune_memory.verdict import limit_of
from finetune_trainer.release.card_sections import chosen_settings
from finetune_trainer.release.commands import convert_adapter, convert_merged, copy_command, serve_adapter, serve_merged
from finetune_trainer.release.facts import DataSource, RunFacts, TrainingHistory
from finetune_trainer.release.write import versions
from finetune_trainer.report.charts import finite_points, thin
from finetune_trainer.report.document import (
    MAX_ENTRIES,
    MOST_NUMBER,
    AnswerOfModel,
    AttemptOfTraining,
    Chosen,
    Command,
    CurvePoint,
    DataCard,
    HeldOutLoss,
    LossAtStep,
    MemoryOfRank,
    OutcomeOfMerge,
    RunSummary,
    SampleAnswer,
    SampleAnswers,
    SourceOfRecords,
    TimeOfRun,
    Training,
    VerdictOfRun,
    VerificationOfMerge,
    Warned,
    known_count,
)
from finetune_trainer.report.samples import ModelAnswer, Samples
from finetune_trainer.report.timeline import Timeline

CURVES = ("loss", "eval_loss", "learning_rate", "gradient_norm", "tokens_per_second")
_COUNTS = ("num_records", "num_dropped", "num_repeated", "num_tokens", "num_supervised_tokens")


def run_summary(facts: RunFacts, timeline: Timeline, samples: Samples) -> RunSummary:
    """Summary of a run that has results, or failed their verification. Equal arguments give equal values."""
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
        curves={name: _curve(history, name) for name in CURVES},
        samples=SampleAnswers(
            answers=tuple(
                SampleAnswer(
                    record=each.record,
                    prompt=each.prompt,
                    reference=each.reference,
                    base=_answer(each.base),
                    tuned=_answer(each.tuned),
                )
                for each in samples.shown
            ),
            reason=samples.reason,
            max_tokens=samples.max_tokens,
        ),
        time=_time(timeline),
        memory=memory(facts, timeline),
        data=_data(facts, timeline),
        verification=_verification(facts),
        commands=tuple(Command(purpose=what, line=line) for what, line in commands(facts)),
        serving_notes=facts.serving.reasons + facts.serving.notes if facts.serving is not None else (),
        settings=dict(chosen_settings(plan)),
        choices=tuple(
            Chosen(field=each.field, value=None if each.value is None else str(each.value), reason=each.reason)
            for each in plan.choices[:MAX_ENTRIES]
        ),
        provenance=dict(provenance(facts)),
        left_out={name: len(entries) - MAX_ENTRIES for name, entries in lists.items() if len(entries) > MAX_ENTRIES},
    )


def has_failed(facts: RunFacts) -> bool:
    """Whether a merged model failed its verification."""
    return facts.verification is not None and not facts.verification.passed


def verdict(facts: RunFacts) -> VerdictOfRun:
    """Verdict on the whole run."""
    if facts.verification is None:
        what = "adapter" if facts.plan.method.trains_adapter else "model"
        return VerdictOfRun(
            outcome=OutcomeOfMerge.NOT_MERGED, text=f"The {what} was trained. Nothing was merged, so there was nothing to verify."
        )
    if has_failed(facts):
        return VerdictOfRun(
            outcome=OutcomeOfMerge.FAILED,
            text="The merged model failed its verification, so it is not a result. The adapter is whole.",
        )
    return VerdictOfRun(
        outcome=OutcomeOfMerge.PASSED,
        text="The merged model passed its verification: it computes what base and adapter compute.",
    )


def held_out_loss(history: TrainingHistory) -> HeldOutLoss | None:
    """Loss before, after, and at best; None if the held-out loss is not known at two steps."""
    evaluations = history.evaluations
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    best = min(evaluations, key=lambda entry: entry[1])

    def at(entry: tuple[int, float]) -> LossAtStep:
        return LossAtStep(step=entry[0], loss=entry[1])

    return HeldOutLoss(
        first=at(first),
        last=at(last),
        best=at(best),
        change=(last[1] - first[1]) / first[1] if first[1] else 0.0,
        has_fallen=last[1] < first[1],
        rises_again=best[0] != last[0] and last[1] > best[1] * 1.02,
    )


def memory(facts: RunFacts, timeline: Timeline) -> MemoryOfRank | None:
    """Estimate, measured peak and limit of a rank; None if neither of the first two is known."""
    estimated = timeline.preflight.memory if timeline.preflight is not None else {}
    terms = {name: size for name, size in islice(estimated.items(), MAX_ENTRIES) if 0 < size < MOST_NUMBER}
    peak, limit = known_count(facts.history.peak_memory_bytes), limit_of(facts.plan)
    if not terms and peak is None:
        return None
    return MemoryOfRank(
        estimate=sum(terms.values()) or None,
        terms=terms,
        peak=peak,
        limit=limit.bytes if limit is not None else None,
        limit_source=limit.source if limit is not None else "",
    )


def commands(facts: RunFacts) -> list[tuple[str, str]]:
    """Purpose and line of each command; none if the merged model failed, because nothing was published."""
    if has_failed(facts):
        return []
    layout = facts.layout
    lines = [("Copy the results here", copy_command(facts))]
    if layout.has_merged:
        lines.append(("Serve the merged model with vLLM", serve_merged(facts)))
    if layout.has_adapter:
        lines.append(("Serve the adapter with vLLM", serve_adapter(facts)))
    if layout.has_merged:
        lines.append(("Convert the merged model for llama.cpp", convert_merged(facts)))
    if layout.has_adapter:
        lines.append(("Convert the adapter for llama.cpp", convert_adapter(facts)))
    return [(what, line) for what, line in lines if line is not None]


def provenance(facts: RunFacts) -> list[tuple[str, str]]:
    """Facts that prove the origin of the results."""
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
    return [(name, value) for name, value in rows if value]


def _curve(history: TrainingHistory, name: str) -> tuple[CurvePoint, ...]:
    values: Sequence[tuple[float, float]] = [
        (point.step, value) for point in history.points if (value := getattr(point, name)) is not None
    ]
    return tuple(
        CurvePoint(step=group.step, value=group.mean, lowest=group.smallest, highest=group.largest)
        for group in thin(finite_points(values))
    )


def _answer(answer: ModelAnswer) -> AnswerOfModel:
    return AnswerOfModel(text=answer.text, is_complete=answer.is_complete)


def _time(timeline: Timeline) -> TimeOfRun:
    totals = timeline.goodput
    return TimeOfRun(
        attempts=tuple(
            AttemptOfTraining(
                number=each.number,
                start=each.start,
                seconds=each.seconds,
                first_step=each.first_step,
                last_step=each.last_step,
                lost_steps=each.lost_steps,
                ending=each.ending,
                message=each.message,
            )
            for each in timeline.attempts[:MAX_ENTRIES]
        ),
        lost_steps=timeline.lost_steps,
        goodput=totals.goodput,
        productive_seconds=totals.productive_seconds,
        other_seconds={cause.value: seconds for cause, seconds in totals.badput_seconds.items()},
    )


def _data(facts: RunFacts, timeline: Timeline) -> DataCard:
    report = timeline.preflight
    return DataCard(
        sources=tuple(_source(source) for source in facts.sources[:MAX_ENTRIES]),
        splits={
            name: _counted(counts, ("num_sequences", "num_dropped", "num_tokens"))
            for name, counts in islice(facts.splits.items(), MAX_ENTRIES)
        },
        record_lengths={
            str(upper): count for upper, count in sorted(report.record_lengths.items())[:MAX_ENTRIES] if known_count(upper)
        }
        if report is not None
        else {},
        warnings=tuple(Warned(rule=each.rule, message=each.message, fix=each.fix) for each in report.warnings[:MAX_ENTRIES])
        if report is not None
        else (),
    )


def _source(source: DataSource) -> SourceOfRecords:
    return SourceOfRecords(
        source=source.source,
        split=source.split,
        revision=source.revision or "",
        weight=source.weight,
        files=len(source.files),
        counts=_counted(source.counts, _COUNTS),
    )


def _counted(counts: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: counts.get(name) for name in names}


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
