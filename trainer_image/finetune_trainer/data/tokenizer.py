"""The tokenizer of the model directory and its chat template, or the findings that make them unusable.

A template is judged by its text for a plain chat whose words are known: whether a model can distinguish the speakers, whether the
assistant's words are learnt, and whether generation stops where turns end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.catalogue.book import make_finding
from finetune_job.chat_templates import fitting_template, name_of
from finetune_job.finding import Finding
from finetune_trainer.added_tokens import FIELD as ADDED_FIELD
from finetune_trainer.data.chat import ChatTemplate
from finetune_trainer.data.records import Record, RecordProblem
from finetune_trainer.data.render_chat import ChatError, Tokenizer, template_source
from finetune_trainer.data.template_probe import PROBE, chat_template
from finetune_trainer.data.tokenize import THOUGHTS, EndlessTemplateError, tokenize

if TYPE_CHECKING:  # looking at the first records does without it
    from finetune_job.plan.run_plan import AddedTokenPlan, RunPlan

FIELD = "spec.model.source"
_OF_FOREIGN_TOKENS = ("chat-template-unusable", "chat-marker-split")
"""Findings about a template that was made for another tokenizer."""
_TODAY = "strftime_now"
"""Function that transformers gives templates that write the date."""
MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>")
"""Text in the form of a special token."""
QUESTIONS, ANSWERS = ([turn["content"] for turn in PROBE[first::2]] for first in (0, 1))


def load_checked_tokenizer(plan: RunPlan, directory: Path) -> tuple[Tokenizer | None, list[Finding]]:
    """Load the tokenizer; returns it, or None if it or its chat template cannot be used, and every finding.

    Both are tried in a bounded process first, since tokenizer files may have millions of entries and templates may never finish.
    """
    from finetune_trainer.processes.sandbox import SandboxEndedError, run_sandboxed

    allow_remote_code = plan.model.allow_remote_code
    try:
        findings = run_sandboxed(lambda: load_tokenizer(directory, allow_remote_code)[1])
    except SandboxEndedError as error:
        return None, [unusable(directory, f"loading the tokenizer {error}")]
    if findings:
        return None, findings
    tokenizer, findings = load_tokenizer(directory, allow_remote_code)
    if tokenizer is None:
        return None, findings
    try:
        findings += run_sandboxed(lambda: check_chat_template(plan.data, tokenizer, directory, plan.model.added_tokens))
    except SandboxEndedError as error:
        fix = "set spec.data.chatTemplate to a template without endless loops or huge texts"
        where = "spec.data.chatTemplate" if plan.data.chat_template is not None else FIELD
        value = (plan.data.chat_template or directory.name)[:80]
        message = f"rendering a plain chat {error}"
        findings.append(make_finding("chat-template-unusable", field=where, value=value, message=message, fix=fix))
    return None if any(finding.severity == "error" for finding in findings) else tokenizer, findings


def unusable(directory: Path, message: str) -> Finding:
    """The finding of a tokenizer that does not load."""
    return make_finding(
        "tokenizer-unusable",
        field=FIELD,
        value=directory.name,
        message=message,
        fix="copy tokenizer.json and tokenizer_config.json of the model next to its config.json",
    )


def load_tokenizer(directory: Path, allow_remote_code: bool) -> tuple[Tokenizer | None, list[Finding]]:
    """Load the tokenizer; returns it, or None with a finding. Nothing is downloaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
        tokenizer("probe")
    except Exception as error:  # noqa: BLE001 - a library meets a file of the user's: whatever it raises is about that file
        return None, [unusable(directory, f"the tokenizer does not load ({type(error).__name__}: {str(error)[:500]})")]
    if tokenizer.eos_token_id is None:
        return None, [
            make_finding(
                "tokenizer-without-end",
                field=FIELD,
                value=directory.name,
                message="the tokenizer has no end-of-sequence token, so the model could never learn to stop",
                fix="set eos_token in tokenizer_config.json",
            )
        ]
    return tokenizer, []


class TemplateSettings(Protocol):
    """The part of a DataPlan that matters for chats."""

    @property
    def format(self) -> DataFormat: ...

    @property
    def loss_on(self) -> LossOn: ...

    @property
    def chat_template(self) -> str | None: ...


def check_chat_template(
    data: TemplateSettings, tokenizer: Tokenizer, directory: Path, added: Sequence[AddedTokenPlan] = ()
) -> list[Finding]:
    """Findings about the template that hold for any chat, from a plain one; for other formats, about the token that ends a text.

    directory: of the model, for the tokens at which its generation stops. added: the job's own tokens.
    """
    if data.format is not DataFormat.CHAT:
        return _unknown_end(tokenizer, directory)
    is_written, named = data.chat_template is not None, name_of(data.chat_template)

    def of_template(rule: str, message: str, fix: str, changes: Mapping[str, Any] | None = None) -> Finding:
        field = "spec.data.chatTemplate" if is_written else FIELD
        value = named or (data.chat_template or directory.name)[:80]
        other = _other_template(tokenizer, named) if rule in _OF_FOREIGN_TOKENS else None
        if other is not None:
            fix, changes = f"set {field}: {other}, which fits this tokenizer", {field: other}
        return make_finding(rule, field=field, value=value, message=message, fix=fix, changes=changes)

    try:
        (made,) = tokenize(tokenizer, [Record(1, "", "", PROBE)], data.loss_on, data.chat_template)
    except EndlessTemplateError as error:
        made = error.problem
    if isinstance(made, RecordProblem):
        return [of_template("chat-template-unusable", made.reason, made.fix, made.changes)]
    begin = tokenizer.bos_token_id
    if begin is not None and made.input_ids[:2] == [begin, begin]:
        doubled = f"every chat begins with {tokenizer.bos_token!r} twice, which the model has never seen"
        return [of_template("chat-template-doubles-begin", doubled, "write the begin token once in the template")]
    findings = []
    if begin is not None and made.input_ids[0] != begin and tokenizer("")["input_ids"][:1] == [begin]:
        unbegun = (
            f"the tokenizer puts {tokenizer.bos_token!r} before each text and the template writes none, so no chat begins as "
            "all that the model has learnt from"
        )
        findings.append(of_template("chat-template-without-begin", unbegun, "begin the template with {{ bos_token }}"))
    template = chat_template(tokenizer, template_source(tokenizer, data.chat_template))
    stop, number = list(template.stops.items())[-1]
    added_stop = next((token for token in added if token.content == stop), None)
    known = generation_stops(tokenizer, directory)
    if number not in known and added_stop is not None and not added_stop.stop:
        endless = f"turns end with {stop!r}, an added token at which generation would not stop"
        tokens = [{**token.written(), **({"stop": True} if token is added_stop else {})} for token in added]
        fix = f"set stop: true for {stop!r} in {ADDED_FIELD}"
        findings.append(of_template("chat-stop-token-unknown", endless, fix, {ADDED_FIELD: tokens}))
    elif number not in known and added_stop is None:
        endless = f"turns end with {stop!r} ({number}), but generation stops at {sorted(known)}, so a server would not stop there"
        fix = f"add {number} to eos_token_id in generation_config.json of the model"
        findings.append(of_template("chat-stop-token-unknown", endless, fix))
    findings += [
        of_template(problem.rule, problem.message, problem.fix)
        for problem in check_markers(template, tokenizer, learns_turns=data.loss_on is not LossOn.ALL)
    ]
    if _TODAY in template.source:
        dated = "the template writes the date of the preparation into every chat, so data prepared on another day is not the same"
        findings.append(of_template("chat-template-dated", dated, f"remove {_TODAY} from the template"))
    return findings


def _other_template(tokenizer: Tokenizer, named: str | None) -> str | None:
    """The built-in template that fits the tokenizer's tokens, if another built-in one is named."""
    if named is None or not tokenizer.is_fast:
        return None
    fitting = fitting_template(frozenset(token.content for token in tokenizer.added_tokens_decoder.values()))
    return fitting if fitting != named else None


def _unknown_end(tokenizer: Tokenizer, directory: Path) -> list[Finding]:
    """The finding if a server would not stop at the tokenizer's end token, with which every text ends."""
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


@dataclass(frozen=True)
class MarkerProblem:
    """A problem of what the template writes around the turns."""

    rule: str
    message: str
    fix: str


def check_markers(template: ChatTemplate, tokenizer: Tokenizer, *, learns_turns: bool) -> Iterator[MarkerProblem]:
    """Yield every problem. learns_turns: only the assistant's turns are learnt, so that their spans count."""
    text = template.render(PROBE)
    if learns_turns:
        yield from _wrong_spans(template)
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    split = [marker for marker in dict.fromkeys(MARKER.findall(text)) if marker not in known]
    if split:
        pieces = tokenizer(split[0], add_special_tokens=False)["input_ids"]
        if len(pieces) > 1:
            yield MarkerProblem(
                "chat-marker-split",
                f"the template writes {split[0]!r}, which is not a token of the tokenizer but {len(pieces)} pieces of plain text",
                f"name it in {ADDED_FIELD}, or write a spec.data.chatTemplate with tokens that exist",
            )
    if not template.asks and template.headers:
        yield MarkerProblem(
            "chat-answer-not-asked-for",
            f"the template does not heed add_generation_prompt, so the model has to learn to write {template.headers[0]!r} "
            "itself before each answer",
            f"write {{% if add_generation_prompt %}}{template.headers[0]}{{% endif %}} at the end of the template",
        )
    yield from _asked_otherwise(template)
    gaps = [
        text.partition(first)[2].partition(second)[0]
        for first, second in ((QUESTIONS[0], ANSWERS[0]), (ANSWERS[0], QUESTIONS[1]))
    ]
    if gaps[0] == gaps[1]:
        yield MarkerProblem(
            "chat-roles-unmarked",
            f"the template writes {gaps[0]!r} both before answers and before questions, so a model cannot tell who speaks",
            "write the role of each turn in the template",
        )


def _asked_otherwise(template: ChatTemplate) -> Iterator[MarkerProblem]:
    """Find a template that begins a thought where it asks for an answer, and drops the thoughts of every given answer."""
    if not template.asks or not template.headers or any(template.headers[0] in text for text in _answered(template)):
        return
    yield MarkerProblem(
        "chat-asks-otherwise",
        f"the template asks for an answer with {template.headers[0]!r} and never writes that before an answer that it is given, "
        "so what is learnt is not what a server asks for, and thoughts are dropped",
        "set a spec.data.chatTemplate that writes before each answer what it asks for one with, and keeps the thoughts",
    )


def _answered(template: ChatTemplate) -> Iterator[str]:
    """A question and its answer: without thoughts, and with thoughts in each place where templates look for them."""
    question, answer = PROBE[:2]
    for changes in ({}, {"content": f"<think>\nthought\n</think>\n\n{answer['content']}"}, dict.fromkeys(THOUGHTS, "thought")):
        try:
            yield template.render([question, {**answer, **changes}])
        except ChatError:
            continue


def _wrong_spans(template: ChatTemplate) -> Iterator[MarkerProblem]:
    try:
        chat = template.render_turns(PROBE)
    except ChatError as error:
        yield MarkerProblem("chat-template-unusable", error.reason, error.fix)
        return
    said = ["".join(chat.text[start:stop] for start, stop in turn) for turn in chat.turns]
    fix = "put {% generation %} before what the assistant says and {% endgeneration %} behind the token that ends its turn"
    if any(answer not in turn for answer, turn in zip(ANSWERS, said, strict=True)):
        reason = "the template's generation blocks leave out what the assistant says, so it would not be learnt"
        yield MarkerProblem("chat-generation-misplaced", reason, fix)
    elif any(question in turn for question in QUESTIONS for turn in said):
        reason = "the template's generation blocks hold what the user says, so the model would learn to ask"
        yield MarkerProblem("chat-generation-misplaced", reason, fix)


def generation_stops(tokenizer: Tokenizer, directory: Path) -> set[int]:
    """Tokens at which generation stops, from the files of the model in `directory`, or else the tokenizer's end token."""
    for name in ("generation_config.json", "config.json"):
        try:
            written = json.loads((directory / name).read_text())
        except (OSError, ValueError, RecursionError):  # no such file, or a malformed one, which other checks report
            continue
        for part in (written, written.get("text_config")) if isinstance(written, dict) else ():
            value = part.get("eos_token_id") if isinstance(part, dict) else None
            declared = {number for number in (value if isinstance(value, list) else [value]) if type(number) is int}
            if declared:
                return declared
    return {int(tokenizer.eos_token_id)}
