"""Checks, from counts alone, that the data, the model and the batches fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.data.prepare import SplitFacts
from finetune_trainer.data.shards import TRAIN, VALIDATION
from finetune_trainer.data.steps import check_steps, total_steps
from finetune_trainer.preflight.inspection import Inspection


def check_fit(seen: Inspection) -> list[Finding]:
    """Returns the findings about the prepared splits."""
    structure, tokenizer = seen.structure, seen.tokenizer
    return fit_findings(
        seen.plan,
        {} if seen.data is None else seen.data.splits,
        structure.vocabulary_size if structure else None,
        len(tokenizer) if tokenizer is not None else 0,
        structure.max_positions if structure else None,
        max_row=structure.max_row if structure else None,
    )


def fit_findings(
    plan: RunPlan,
    splits: Mapping[str, SplitFacts],
    vocabulary_size: int | None,
    tokenizer_size: int,
    max_positions: int | None,
    *,
    max_row: int | None = None,
) -> list[Finding]:
    """Returns the findings for these counts. A count is None if the model does not state it."""
    longest = max((facts.longest_document for facts in splits.values()), default=0)
    # Packing fills rows up to maxSequenceLength, if there are enough tokens.
    packed = plan.data.max_sequence_length if plan.data.packing else 0
    fullest = max((max(min(packed, facts.num_tokens), facts.longest_document) for facts in splits.values()), default=0)
    findings = []
    if vocabulary_size is not None and tokenizer_size > vocabulary_size:
        largest = max((facts.largest_token_id for facts in splits.values()), default=-1)
        is_used = largest >= vocabulary_size
        findings.append(
            make_finding(
                "tokenizer-beyond-vocabulary",
                severity="error" if is_used else "warning",
                field="spec.model.source",
                value=str(tokenizer_size),
                message=f"the tokenizer has {tokenizer_size} tokens, the model's embedding {vocabulary_size} rows"
                + (f"; the data uses token {largest}" if is_used else "; the data uses none of those beyond"),
                fix="use the tokenizer of this model, or resize the model's embeddings and save it",
            )
        )
    if max_positions is not None and longest > max_positions:
        findings.append(
            make_finding(
                "document-beyond-positions",
                field="spec.data.maxSequenceLength",
                value=str(longest),
                message=f"the longest record has {longest} tokens, the model was made for {max_positions} "
                "(max_position_embeddings)",
                fix=f"set spec.data.maxSequenceLength to {max_positions} or less; longer records are then dropped and counted; "
                f"or, if positions are rotary and so have no fixed limit, set spec.model.maxPositions to {longest}",
            )
        )
    if max_row is not None and fullest > max_row:
        findings.append(
            make_finding(
                "sequence-beyond-positions",
                field="spec.data.maxSequenceLength",
                value=str(fullest),
                message=f"the model's code makes attention biases for {max_row} tokens (max_seq_len) and fails with longer "
                "sequences, packed or not",
                fix=f"set spec.data.maxSequenceLength to {max_row} or less; longer records are then dropped and counted",
                changes={"spec.data.maxSequenceLength": max_row},
            )
        )
    train = splits.get(TRAIN)
    steps = () if train is None else check_steps(plan, train.num_sequences, train.num_occurrences)
    return [*findings, *steps, *_evaluations(plan, splits)]


def _evaluations(plan: RunPlan, splits: Mapping[str, SplitFacts]) -> Iterator[Finding]:
    """Reports a run that is too short for its evaluations. If maxSteps is set, the rule book reports this earlier."""
    facts, evaluation, training = splits.get(TRAIN), plan.evaluation, plan.training
    every, stopping = evaluation.every_steps, evaluation.early_stopping
    if facts is None or every is None or training.max_steps is not None or VALIDATION not in splits:
        return
    total = total_steps(training.epochs, None, facts.num_sequences, training.global_batch_size)
    if stopping is not None:
        field, value, needed = "spec.evaluation.earlyStopping", f"patience {stopping.patience}", stopping.patience + 1
        why = f"it could end the run after step {needed * every} at the earliest"
    elif evaluation.load_best_model_at_end:
        field, value, needed = "spec.evaluation.loadBestModelAtEnd", "true", 1
        why = "only the last checkpoint is evaluated, and the best is the last"
    else:
        return
    if needed * every < total:
        return
    soon = (total - 1) // needed
    yield make_finding(
        "evaluations-beyond-the-end",
        field=field,
        value=value,
        message=f"NoEffect: {training.epochs} epochs of {facts.num_sequences} sequences are {total} steps; with an evaluation "
        f"every {every} steps {why}",
        fix=f"set spec.evaluation.everySteps to {soon} or less" if soon else f"remove {field}",
        changes={"spec.evaluation.everySteps": soon} if soon else {field: None},
    )
