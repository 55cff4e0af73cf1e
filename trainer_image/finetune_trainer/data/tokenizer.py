"""The tokenizer of the model directory and its chat template, or why they cannot be used."""

from __future__ import annotations

from pathlib import Path

from finetune_job.api.data import DataFormat, LossOn
from finetune_job.catalogue.book import make_finding
from finetune_job.plan.run_plan import DataPlan, RunPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.data.chat import PROBE, chat_template, template_source
from finetune_trainer.data.chat_markers import check_markers
from finetune_trainer.data.generation_stops import generation_stops
from finetune_trainer.data.records import Record, RecordProblem
from finetune_trainer.data.tokenize import EndlessTemplateError, Tokenizer, tokenize
from finetune_trainer.processes.sandbox import EndedError, confined

FIELD = "spec.model.source"
_TODAY = "strftime_now"
"""What transformers gives templates that want to know the date."""


def checked_tokenizer(plan: RunPlan, directory: Path) -> tuple[Tokenizer | None, list[Finding]]:
    """The tokenizer, or None where it or its chat template cannot be used, and every finding.

    Each is tried in a process with bounds first: tokenizer files with millions of entries and templates that never end are
    files like others.
    """
    allow_remote_code = plan.model.allow_remote_code
    try:
        found = confined(lambda: load_tokenizer(directory, allow_remote_code)[1])
    except EndedError as error:
        return None, [_unusable(directory, f"loading the tokenizer {error}")]
    if found:
        return None, found
    tokenizer, found = load_tokenizer(directory, allow_remote_code)
    if tokenizer is None:
        return None, found
    try:
        found += confined(lambda: check_chat_template(plan.data, tokenizer, directory))
    except EndedError as error:
        fix = "set spec.data.chatTemplate to a template without endless loops or huge texts"
        where = "spec.data.chatTemplate" if plan.data.chat_template is not None else FIELD
        value = (plan.data.chat_template or directory.name)[:80]
        message = f"rendering a plain chat {error}"
        found.append(make_finding("chat-template-unusable", field=where, value=value, message=message, fix=fix))
    return None if any(finding.severity == "error" for finding in found) else tokenizer, found


def _unusable(directory: Path, message: str) -> Finding:
    return make_finding(
        "tokenizer-unusable",
        field=FIELD,
        value=directory.name,
        message=message,
        fix="copy tokenizer.json and tokenizer_config.json of the model beside its config.json",
    )


def load_tokenizer(directory: Path, allow_remote_code: bool) -> tuple[Tokenizer | None, list[Finding]]:
    """The tokenizer, or None with a finding. Nothing is fetched."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
        tokenizer("probe")
    except Exception as error:  # noqa: BLE001 - a library meets a file of the user's: whatever it raises is about that file
        return None, [_unusable(directory, f"the tokenizer does not load ({type(error).__name__}: {str(error)[:500]})")]
    if tokenizer.eos_token_id is None:
        return None, [
            make_finding(
                "tokenizer-without-end",
                field="spec.model.source",
                value=directory.name,
                message="the tokenizer has no end-of-sequence token, so the model could never learn to stop",
                fix="set eos_token in tokenizer_config.json",
            )
        ]
    return tokenizer, []


def check_chat_template(data: DataPlan, tokenizer: Tokenizer, directory: Path) -> list[Finding]:
    """What is wrong with the template for any chat: it is tried on a plain one. For other formats, with the token that ends a text.

    directory: of the model, for the tokens at which its generation stops.
    """
    if data.format is not DataFormat.CHAT:
        return _unknown_end(tokenizer, directory)
    is_written = data.chat_template is not None

    def of_template(rule: str, message: str, fix: str) -> Finding:
        field = "spec.data.chatTemplate" if is_written else "spec.model.source"
        value = (data.chat_template or directory.name)[:80]
        return make_finding(rule, field=field, value=value, message=message, fix=fix)

    try:
        (made,) = tokenize(tokenizer, [Record(1, "", "", PROBE)], data.loss_on, data.chat_template)
    except EndlessTemplateError as error:
        made = error.problem
    if isinstance(made, RecordProblem):
        return [of_template("chat-template-unusable", made.reason, made.fix)]
    begin = tokenizer.bos_token_id
    if begin is not None and made.input_ids[:2] == [begin, begin]:
        doubled = f"every chat begins with {tokenizer.bos_token!r} twice, which the model has never seen"
        return [of_template("chat-template-doubles-begin", doubled, "write the begin token once in the template")]
    found = []
    if begin is not None and made.input_ids[0] != begin and tokenizer("")["input_ids"][:1] == [begin]:
        unbegun = f"the tokenizer puts {tokenizer.bos_token!r} before each text and the template writes none, so no chat begins as "
        unbegun += "all that the model has learnt from"
        found.append(of_template("chat-template-without-begin", unbegun, "begin the template with {{ bos_token }}"))
    template = chat_template(tokenizer, template_source(tokenizer, data.chat_template))
    stop, number = list(template.stops.items())[-1]
    known = generation_stops(tokenizer, directory)
    if number not in known:
        endless = f"turns end with {stop!r} ({number}), but generation stops at {sorted(known)}, so a server would not stop there"
        fix = f"add {number} to eos_token_id in generation_config.json of the model"
        found.append(of_template("chat-stop-token-unknown", endless, fix))
    found += [
        of_template(problem.rule, problem.message, problem.fix)
        for problem in check_markers(template, tokenizer, learns_turns=data.loss_on is not LossOn.ALL)
    ]
    if _TODAY in template.source:
        dated = "the template writes the date of the preparation into every chat, so data prepared on another day is not the same"
        found.append(of_template("chat-template-dated", dated, f"remove {_TODAY} from the template"))
    return found


def _unknown_end(tokenizer: Tokenizer, directory: Path) -> list[Finding]:
    """Every text is made to end with the tokenizer's end token; a server has to stop there."""
    number, known = int(tokenizer.eos_token_id), generation_stops(tokenizer, directory)
    if number in known:
        return []
    return [
        make_finding(
            "stop-token-unknown",
            field=FIELD,
            value=str(tokenizer.eos_token),
            message=f"texts end with {tokenizer.eos_token!r} ({number}), but generation stops at {sorted(known)}, so a server "
            "would not stop there",
            fix=f"add {number} to eos_token_id in generation_config.json of the model, or set eos_token in tokenizer_config.json",
        )
    ]
