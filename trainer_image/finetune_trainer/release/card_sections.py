"""The sections of the model card about the run, one function each; an empty list leaves the section out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finetune_job.api.enumerations import MergeBase
from finetune_job.names import MANAGED_BY
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.markdown import block, code, table
from finetune_trainer.release.facts import DataSource, RunFacts, count_text, sparkline, table_points
from finetune_trainer.release.files import CHECKSUMS, PROVENANCE, VERIFICATION_PAGE

if TYPE_CHECKING:
    from finetune_trainer.verify.report import VerificationReport

_SHOWN_FILES, _SHOWN_LICENCE_FILES = 5, 10
_BASES = {MergeBase.ORIGINAL: "as it is stored", MergeBase.DEQUANTIZED: "as it was packed in training"}


def added_tokens(facts: RunFacts) -> list[str]:
    """Tokens that the tokenizer knows and the base's does not."""
    if facts.added is None:
        return []
    rows = [
        (code(token.content), str(number), "yes" if token.special else "no")
        for token, number in zip(facts.added.tokens, facts.added.ids, strict=True)
    ]
    note = "The tokenizer that comes with the model knows them; the base's does not."
    stops = [str(number) for token, number in zip(facts.added.tokens, facts.added.ids, strict=True) if token.stop]
    if stops and facts.layout.has_adapter:
        # An adapter has no generation_config.json.
        note += f" Turns end with {' or '.join(stops)}: with the adapter, add it to the `eos_token_id` that `generate` is given."
    return [*table(("token", "id", "special"), rows), "", note]


def training_data(facts: RunFacts) -> list[str]:
    """Sources with their counts and digests."""
    header = ("source", "split", "weight", "records", "tokens", "supervised tokens")
    rows = [
        (
            code(source.source) + (f" at {code(source.revision)}" if source.revision else ""),
            source.split,
            f"{source.weight:g}",
            *(count_text(source.counts, name) for name in ("num_records", "num_tokens", "num_supervised_tokens")),
        )
        for source in facts.sources
    ]
    lines = table(header, rows)
    for source in facts.sources:
        lines += _digests(source)
    for split, counts in facts.splits.items():
        dropped = counts.get("num_dropped", 0)
        size = f"{count_text(counts, 'num_sequences')} sequences with {count_text(counts, 'num_tokens')} tokens in one pass"
        lines += ["", f"Split {code(split)}: {size}; {dropped:,} records were too long and left out."]
    return [*lines, "", f"SHA-256 over everything prepared: {code(facts.data_hash)}."]


def _digests(source: DataSource) -> list[str]:
    shown = source.files[:_SHOWN_FILES]
    lines = [f"* {code(file.name or source.source)}: SHA-256 {code(file.sha256)}" for file in shown]
    if len(source.files) > len(shown):
        lines.append(f"* {len(source.files) - len(shown)} more files, all of them in {code(PROVENANCE)}")
    return ["", *lines] if lines else []


def settings(facts: RunFacts) -> list[str]:
    """Settings as the plan has them."""
    return table(("setting", "value"), [(code(name), code(value)) for name, value in chosen_settings(facts.plan)])


def chosen_settings(plan: RunPlan) -> list[tuple[str, str]]:
    """Settings of method, data and training by the plan's names."""
    chosen: dict[str, Any] = {"method": plan.method.type.value}
    if plan.method.lora is not None:
        chosen |= _without_unset(plan.method.lora.model_dump(mode="json"))
    if plan.method.adapter is not None:
        chosen |= _without_unset(plan.method.adapter.settings)
    if plan.method.quantization is not None:
        chosen |= {
            f"quantization.{name}": value
            for name, value in _without_unset(plan.method.quantization.model_dump(mode="json")).items()
        }
    named = ("format", "loss_on", "max_sequence_length", "packing")
    chosen |= {name: value for name, value in plan.data.model_dump(mode="json").items() if name in named}
    not_shown = {
        "micro_batch_size",
        "gradient_accumulation_steps",
        "trackers",
        "step_timeout_seconds",
        "compile",
        "activation_checkpointing",
    }
    chosen |= _without_unset(plan.training.model_dump(mode="json", exclude=not_shown))
    return [(name, _value(value)) for name, value in chosen.items()]


def _without_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that were left open or switched off; zeros are kept."""
    return {name: value for name, value in values.items() if value is not None and value is not False and value not in ({}, [])}


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def training(facts: RunFacts) -> list[str]:
    """Extent of the training, and the curves."""
    history = facts.history
    last = history.points[-1].step if history.points else facts.trained_step
    exported = "" if last == facts.trained_step else f" The weights are those after step {facts.trained_step}."
    lines = [
        f"{last:,} optimizer steps over {history.tokens:,} tokens, {history.supervised_tokens:,} of them supervised.{exported}"
    ]
    losses, evaluations = history.losses, history.evaluations
    curves = []
    if len(losses) > 1:
        curves.append(f"loss           {sparkline([loss for _, loss in losses])}  {losses[0][1]:.4g} -> {losses[-1][1]:.4g}")
    if len(evaluations) > 1:
        curves.append(
            f"held-out loss  {sparkline([loss for _, loss in evaluations])}  {evaluations[0][1]:.4g} -> {evaluations[-1][1]:.4g}"
        )
    if curves:
        lines += ["", *block("\n".join(curves), "text")]
    if history.points:
        rows = [(f"{point.step:,}", _loss(point.loss), _loss(point.eval_loss)) for point in table_points(history.points)]
        lines += ["", *table(("step", "loss", "held-out loss"), rows)]
    return lines


def evaluation(facts: RunFacts) -> list[str]:
    """Held-out loss of the base, the best and the last step."""
    evaluations = facts.history.evaluations
    if not evaluations:
        return ["Nothing was held out."] if facts.plan.data.validation is None else []
    rows = [("base model", "0", _loss(evaluations[0][1]))] if evaluations[0][0] == 0 else []
    trained = [(step, loss) for step, loss in evaluations if step > 0]
    if trained:
        best = min(trained, key=lambda entry: entry[1])
        rows += [("best", f"{best[0]:,}", _loss(best[1])), ("last", f"{trained[-1][0]:,}", _loss(trained[-1][1]))]
    return [
        "Mean cross-entropy in nats per supervised token of the held-out records.",
        "",
        *table(("weights", "after step", "held-out loss"), rows),
    ]


def verification(facts: RunFacts) -> list[str]:
    """The verdict and its figures."""
    report = facts.verification
    if report is None:
        return []
    lines = [f"{'Passed' if report.passed else 'Failed'}. The whole report is in {code(VERIFICATION_PAGE)}."]
    logits, gate = report.logits, report.gate
    if logits is None or gate is None:
        return lines
    about = f"Merged model against base and adapter, on {logits.num_prompts:,} prompts of {logits.num_positions:,} tokens:"
    if facts.plan.method.quantization is not None:
        about = f"The adapter was added to the base {_BASES[facts.plan.merge.base]}. {about}"
    return [*lines, "", about, "", *table(("figure", "measured", "threshold"), verification_rows(report))]


def verification_rows(report: VerificationReport) -> list[tuple[str, str, str]]:
    """Figure, measured value, and its threshold; none if logits were not compared."""
    logits, gate = report.logits, report.gate
    if logits is None or gate is None:
        return []
    rows = [
        (
            f"{logits.judged}, of the largest logit",
            f"{logits.relative_difference:.3g}",
            f"at most {gate.allowed_difference(logits):.3g}",
        ),
        (
            f"mean KL divergence of {logits.judged_positions} from base and adapter, nats",
            f"{logits.mean_kl:.3g}",
            f"at most {gate.max_mean_kl:.3g}",
        ),
        ("same most likely token", f"{logits.top1_agreement:.4%}", f"at least {gate.min_top1_agreement:.2%}"),
        ("KL divergence of the base alone, nats", f"{logits.effect_mean_kl:.3g}", ""),
    ]
    if report.other_logits is not None:
        rows.append(("mean KL divergence from the other base and adapter, nats", f"{report.other_logits.mean_kl:.3g}", ""))
    return rows


def provenance(facts: RunFacts) -> list[str]:
    """Facts that prove the origin of the release."""
    plan = facts.plan
    rows = [("job", code(f"{plan.job.namespace}/{plan.job.name}")), ("job uid", code(plan.job.uid))]
    rows += [("base model", code(facts.base_source)), ("base revision", code(plan.model.revision or "none"))]
    if facts.model_digest is not None:
        rows.append(("base digest, SHA-256 over configuration, index, headers and sizes", code(facts.model_digest)))
    rows += [("plan, SHA-256", code(facts.plan_sha256)), ("data, SHA-256", code(facts.data_hash))]
    if plan.placement is not None:
        rows.append(("trainer image", code(plan.placement.trainer_image)))
    proven = f"{code(CHECKSUMS)} holds the SHA-256 of every file, to be checked with {code(f'sha256sum --check {CHECKSUMS}')}."
    stated = f"{code(PROVENANCE)} is an in-toto statement about all of it; it is not signed. Made by {MANAGED_BY}."
    return [*table(("what", "which"), rows), "", proven, stated]


def licence(facts: RunFacts) -> list[str]:
    """The base model's licence, which still applies."""
    base_licence = facts.licence
    if not base_licence.is_known:
        return [f"{code(facts.base_source)} states no licence in its files. Ask its owner before you pass this model on."]
    named = base_licence.identifier or "the terms in its files"
    lines = [
        f"This is a derivative of {code(facts.base_source)}, whose licence still applies: {code(base_licence.name or named)}."
    ]
    if base_licence.link:
        lines.append(f"Its terms: {code(base_licence.link)}.")
    if base_licence.files:
        lines.append(
            f"Files with terms of the base: {', '.join(code(name) for name in base_licence.files[:_SHOWN_LICENCE_FILES])}."
        )
    return lines


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
