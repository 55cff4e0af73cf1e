"""Loads and checks the tokenizer of the model directory and its chat template.

The text that a template writes for a plain chat with known words shows whether a model can distinguish the speakers, whether the
assistant's words are learnt, and whether generation stops where turns end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.catalogue.book import make_finding
from finetune_job.chat_templates import fitting_template, name_of
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.added_tokens import FIELD as ADDED_FIELD
from finetune_trainer.data.chat import ChatTemplate
from finetune_trainer.data.left_out import THOUGHTS
from finetune_trainer.data.records import Record, RecordProblem
from finetune_trainer.data.render_chat import ChatError, Tokenizer, template_source
from finetune_trainer.data.template_probe import PROBE, arguments_key, chat_template
from finetune_trainer.data.tokenize import EndlessTemplateError, tokenize
from finetune_trainer.files import GENERATION_FILE, open_regular

if TYPE_CHECKING:  # not imported to look at the first records
    from finetune_job.plan.run_plan import AddedTokenPlan, RunPlan

FIELD = "spec.model.source"
_OF_FOREIGN_TOKENS = ("chat-template-unusable", "chat-marker-split")
"""Rules that a template breaks if it was made for another tokenizer."""
_TODAY = "strftime_now"
"""Name of the transformers function with which templates write the current date."""
MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>")
"""Text that looks like a special token."""
QUESTIONS, ANSWERS = ([turn["content"] for turn in PROBE[first::2]] for first in (0, 1))
_OF_VOCABULARIES = ("token", "vocab", "merges", "spiece", "sentencepiece", "spm", "tekken", ".model", "bpe")
"""Parts of the names of files that hold a vocabulary or a tokenizer's code."""
_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes of tokenizers whose tokens are bytes or characters, so that they have no vocabulary file."""
_MOST_SETTINGS_BYTES = 1 << 20
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that come with a vocabulary and are useless without one."""
MarkerProblem = tuple[str, str, str]
"""Rule, message and fix of a problem in the text that the template writes around turns."""


def load_checked_tokenizer(plan: RunPlan, directory: Path) -> tuple[Tokenizer | None, list[Finding]]:
    """Load the tokenizer. Returns it (None if it or its chat template cannot be used) and all findings.

    Both are first tried in a process with limits, since tokenizer files may have millions of entries and templates may not end.
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


def _finding(rule: str, value: str, message: str, fix: str) -> Finding:
    return make_finding(rule, field=FIELD, value=value, message=message, fix=fix)


def unusable(directory: Path, message: str) -> Finding:
    """The finding that the tokenizer does not load."""
    fix = "copy tokenizer.json and tokenizer_config.json of the model next to its config.json"
    return _finding("tokenizer-unusable", directory.name, message, fix)


def no_tokenizer(directory: Path) -> Finding | None:
    """The finding that a model's directory holds no vocabulary, for which libraries silently make a tokenizer without words."""
    names = [path.name.lower() for path in directory.glob("*") if path.name not in _TOKENIZER_SETTINGS]
    text = ""
    with suppress(OSError), open_regular(directory / _TOKENIZER_SETTINGS[0]) as file:
        text = file.read(_MOST_SETTINGS_BYTES).decode(errors="replace")
    if any(word in name for name in names for word in _OF_VOCABULARIES) or any(name in text for name in _WITHOUT_VOCABULARY):
        return None
    message = (
        "the model's directory has no tokenizer: no tokenizer.json, nor tokenizer.model, vocab.json, vocab.txt or tekken.json"
    )
    return unusable(directory, message)


def load_tokenizer(directory: Path, allow_remote_code: bool) -> tuple[Tokenizer | None, list[Finding]]:
    """Load the tokenizer. Returns it, or None and a finding. Nothing is downloaded."""
    from transformers import AutoTokenizer

    if (missing := no_tokenizer(directory)) is not None:
        return None, [missing]
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
        tokenizer("probe")
    except Exception as error:  # noqa: BLE001 - a library reads a user's file: every error is about that file
        return None, [unusable(directory, f"the tokenizer does not load ({type(error).__name__}: {str(error)[:500]})")]
    if tokenizer.eos_token_id is None:
        message = "the tokenizer has no end-of-sequence token, so the model could never learn to stop"
        return None, [_finding("tokenizer-without-end", directory.name, message, "set eos_token in tokenizer_config.json")]
    return tokenizer, []


def check_chat_template(
    data: DataPlan, tokenizer: Tokenizer, directory: Path, added: Sequence[AddedTokenPlan] = ()
) -> list[Finding]:
    """Return findings about the chat template, from rendering a plain chat; for other formats, findings about the EOS token.

    directory: the model's, whose files name the tokens at which generation stops. added: the tokens that the job adds.
    """
    if data.format is not DataFormat.CHAT:
        number, known = int(tokenizer.eos_token_id), generation_stops(tokenizer, directory)
        if number in known:
            return []
        message = (
            f"texts end with {tokenizer.eos_token!r} ({number}), but generation stops at {sorted(known)}, so a server would "
        )
        fix = f"add {number} to eos_token_id in generation_config.json of the model, or set eos_token in tokenizer_config.json"
        return [_finding("stop-token-unknown", str(tokenizer.eos_token), f"{message}not stop there", fix)]
    is_written, named = data.chat_template is not None, name_of(data.chat_template)
    known = generation_stops(tokenizer, directory)
    stop_ids = tuple(sorted(known))

    def of_template(rule: str, message: str, fix: str, changes: Mapping[str, Any] | None = None) -> Finding:
        field = "spec.data.chatTemplate" if is_written else FIELD
        value = named or (data.chat_template or directory.name)[:80]
        if rule in _OF_FOREIGN_TOKENS and named is not None and tokenizer.is_fast:
            other = fitting_template(frozenset(token.content for token in tokenizer.added_tokens_decoder.values()))
            if other != named:
                fix, changes = f"set {field}: {other}, which fits this tokenizer", {field: other}
        return make_finding(rule, field=field, value=value, message=message, fix=fix, changes=changes)

    try:
        probe = Record(1, "", "", PROBE)
        (made,) = tokenize(
            tokenizer, [probe], data.loss_on, data.chat_template, stop_ids=stop_ids, template_arguments=data.template_arguments
        )
    except EndlessTemplateError as error:
        made = error.problem
    if isinstance(made, RecordProblem):
        return [of_template("chat-template-unusable", made.reason, made.fix, made.changes)]
    begin = tokenizer.bos_token_id
    if begin is not None and made.input_ids[:2] == [begin, begin]:
        doubled = f"every chat begins with {tokenizer.bos_token!r} twice, which the model has never seen"
        return [of_template("chat-template-doubles-begin", doubled, "write the BOS token once in the template")]
    findings = []
    if begin is not None and made.input_ids[0] != begin and tokenizer("")["input_ids"][:1] == [begin]:
        unbegun = (
            f"the tokenizer puts {tokenizer.bos_token!r} before each text and the template writes none, so no chat begins like "
            "the texts that the model was trained on"
        )
        findings.append(of_template("chat-template-without-begin", unbegun, "begin the template with {{ bos_token }}"))
    source = template_source(tokenizer, data.chat_template)
    template = chat_template(tokenizer, source, stop_ids, arguments_key(data.template_arguments))
    stop, number = list(template.stops.items())[-1]
    added_stop = next((token for token in added if token.content == stop), None)
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
        of_template(*problem) for problem in check_markers(template, tokenizer, learns_turns=data.loss_on is not LossOn.ALL)
    ]
    for name in data.template_arguments:
        if not template.mentions(name):
            finding = _finding("template-argument-unread", name, "the chat template does not mention it", f"remove {name}")
            findings.append(finding.model_copy(update={"field": "spec.data.templateArguments"}))
    if _TODAY in template.source:
        dated = "the template writes the date of the preparation into every chat, so data prepared on another day is not the same"
        findings.append(of_template("chat-template-dated", dated, f"remove {_TODAY} from the template"))
    return findings


def check_markers(template: ChatTemplate, tokenizer: Tokenizer, *, learns_turns: bool) -> Iterator[MarkerProblem]:
    """Yield every problem. learns_turns: whether only the assistant's turns are learnt, so that their spans matter."""
    text = template.render(PROBE)
    if learns_turns:
        yield from _wrong_spans(template)
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    split = next((marker for marker in MARKER.findall(text) if marker not in known), None)
    num_pieces = len(tokenizer(split, add_special_tokens=False)["input_ids"]) if split is not None else 0
    if num_pieces > 1:
        yield (
            "chat-marker-split",
            f"the template writes {split!r}, which is not a token of the tokenizer but {num_pieces} pieces of plain text",
            f"name it in {ADDED_FIELD}, or write a spec.data.chatTemplate with tokens that exist",
        )
    if not template.asks and template.headers:
        message = (
            f"the template ignores add_generation_prompt, so the model has to learn to write {template.headers[0]!r} "
            "itself before each answer"
        )
        fix = f"write {{% if add_generation_prompt %}}{template.headers[0]}{{% endif %}} at the end of the template"
        yield "chat-answer-not-asked-for", message, fix
    if _asks_otherwise(template):
        message = (
            f"the template asks for an answer with {template.headers[0]!r} but never writes that before a given answer, so the "
            "model is not trained on the prompts that servers send, and thoughts are dropped"
        )
        fix = "set a spec.data.chatTemplate that writes its generation prompt before each answer, and keeps the thoughts"
        yield "chat-asks-otherwise", message, fix
    before_answer = text.partition(QUESTIONS[0])[2].partition(ANSWERS[0])[0]
    before_question = text.partition(ANSWERS[0])[2].partition(QUESTIONS[1])[0]
    if before_answer == before_question:
        yield (
            "chat-roles-unmarked",
            f"the template writes {before_answer!r} both before answers and before questions, so a model cannot tell who speaks",
            "write the role of each turn in the template",
        )


def _asks_otherwise(template: ChatTemplate) -> bool:
    """Whether the template asks for an answer with a text that it never writes before a given answer, such as an open thought.

    The answer is rendered without thoughts, and with thoughts wherever templates look for them.
    """
    if not template.asks or not template.headers:
        return False
    question, answer = PROBE[:2]
    for changes in ({}, {"content": f"<think>\nthought\n</think>\n\n{answer['content']}"}, dict.fromkeys(THOUGHTS, "thought")):
        with suppress(ChatError):
            if template.headers[0] in template.render([question, {**answer, **changes}]):
                return False
    return True


def _wrong_spans(template: ChatTemplate) -> Iterator[MarkerProblem]:
    try:
        chat = template.render_turns(PROBE)
    except ChatError as error:
        yield "chat-template-unusable", error.reason, error.fix
        return
    turns = ["".join(chat.text[start:stop] for start, stop in turn) for turn in chat.turns]
    fix = "put {% generation %} before what the assistant says and {% endgeneration %} after the token that ends its turn"
    if any(answer not in turn for answer, turn in zip(ANSWERS, turns, strict=True)):
        reason = "the template's generation blocks leave out what the assistant says, so it would not be learnt"
        yield "chat-generation-misplaced", reason, fix
    elif any(question in turn for question in QUESTIONS for turn in turns):
        reason = "the template's generation blocks hold what the user says, so the model would learn to write the user's turns"
        yield "chat-generation-misplaced", reason, fix


def generation_stops(tokenizer: Tokenizer, directory: Path) -> set[int]:
    """Tokens at which generation stops, as the model's files in `directory` say; if they name none, the tokenizer's EOS token."""
    for name in (GENERATION_FILE, "config.json"):
        try:
            written = json.loads((directory / name).read_text())
        except (OSError, ValueError, RecursionError):  # no such file, or a malformed file, which other checks report
            continue
        for part in (written, written.get("text_config")) if isinstance(written, dict) else ():
            value = part.get("eos_token_id") if isinstance(part, dict) else None
            declared = {number for number in (value if isinstance(value, list) else [value]) if type(number) is int}
            if declared:
                return declared
    return {int(tokenizer.eos_token_id)}
