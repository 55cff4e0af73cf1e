"""Rules on the sources of records, and on settings of `data` that depend on each other."""

from __future__ import annotations

from difflib import get_close_matches

from pydantic.alias_generators import to_camel

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.chat_templates import JINJA, TEMPLATES
from finetune_job.plan.inputs import NamedSource, named_sources
from finetune_job.plan.mapping import OF_FORMAT, OPTIONAL_KEYS, makes_chats_of_pairs, mapped_fields
from finetune_job.rules.rule import Problem, RuleContext, rule
from finetune_job.rules.rule_tables import Bounds

_SOURCE = "data.source"
_REVISION = "data.revision"
_DATASETS = "data.datasets"
_FORMAT = "data.format"
_TEMPLATE = "data.chatTemplate"
_ARGUMENTS = "data.templateArguments"
_LOSS_ON = "data.lossOn"
_MAPPING = "data.mapping"

WEIGHTS = Bounds(((">", 0.0), ("<=", 100.0)))
"""Allowed number of times that a record occurs in one pass; beyond the maximum, a run only repeats itself."""
_UNKNOWN_SOURCE = "pvc://data/train.jsonl"
"""Example source for use in a fix, since only the user knows the real address."""


@rule("source-or-datasets")
def source_or_datasets(context: RuleContext) -> Problem | None:
    data = context.spec.data
    if data.datasets is None:
        if data.source is not None:
            return None
        return Problem(
            value=None,
            message="neither source nor datasets names the training data",
            fix=f'set {_SOURCE} to a file or directory, such as "{_UNKNOWN_SOURCE}", or list several in {_DATASETS}',
            changes={_SOURCE: _UNKNOWN_SOURCE},
        )
    field, value = (_SOURCE, data.source) if data.source is not None else (_REVISION, data.revision)
    if value is None:
        return None
    return Problem(
        value=value,
        message=f"{_DATASETS} also names training data, and each of its entries has its own source and revision",
        fix=f"move it into {_DATASETS}, or remove {_DATASETS}",
        field=field,
        changes={_SOURCE: None, _REVISION: None},
    )


@rule("chat-template-without-chat")
def chat_template_without_chat(context: RuleContext) -> Problem | None:
    data = context.spec.data
    if data.template_arguments and data.format is not DataFormat.CHAT:
        return Problem(
            field=_ARGUMENTS,
            value=", ".join(data.template_arguments)[:60],
            message=f"records of format {data.format} are not chats, so no template takes arguments",
            fix=f"set {_FORMAT}: Chat if the records hold messages, or remove {_ARGUMENTS}",
            changes={_ARGUMENTS: None},
        )
    if data.chat_template is None or data.format is DataFormat.CHAT:
        return None
    shown = data.chat_template if len(data.chat_template) <= 60 else f"{data.chat_template[:57]}..."
    mapped = mapped_fields(data.mapping) if data.mapping is not None else {}
    may_be_chats = (
        "format" not in data.model_fields_set
        and all(name in OF_FORMAT[DataFormat.CHAT] for name in mapped)
        and not (_tables(context, DataFormat.CHAT) or _texts(context, DataFormat.CHAT))
    )
    return Problem(
        value=shown,
        message=f"records of format {data.format} are not chats, so nothing would be rendered with it",
        fix=f"set {_FORMAT}: Chat if the records hold messages, or remove {_TEMPLATE}",
        # A user who sets a chat template but no format most likely has chats.
        changes={_FORMAT: DataFormat.CHAT} if may_be_chats else {_TEMPLATE: None},
    )


@rule("assistant-loss-without-chat")
def assistant_loss_without_chat(context: RuleContext) -> Problem | None:
    data = context.spec.data
    if data.loss_on is not LossOn.ASSISTANT or data.format is DataFormat.CHAT:
        return None
    instead = LossOn.ALL if data.format is DataFormat.TEXT else LossOn.COMPLETION
    return Problem(
        value=data.loss_on,
        message=f"records of format {data.format} have no turns, so the loss would count every token, including the prompt's",
        fix=f"set {_LOSS_ON}: {instead}, or {_FORMAT}: Chat if the records hold messages",
        changes={_LOSS_ON: instead},
    )


@rule("dataset-weight-range")
def dataset_weight_range(context: RuleContext) -> Problem | None:
    datasets = context.spec.data.datasets or []
    is_wrong = [not WEIGHTS.hold(dataset.weight) for dataset in datasets]
    if not any(is_wrong):
        return None
    number = is_wrong.index(True)
    written = [dataset.model_dump(mode="json", by_alias=True, exclude_unset=True) for dataset in datasets]
    return Problem(
        value=datasets[number].weight,
        message=f"weight of {_DATASETS}[{number}], {datasets[number].source}: a record occurs {WEIGHTS} times in a pass",
        fix='write a weight such as "2" (each record twice) or "0.5" (every other record), or remove the data set',
        changes={
            _DATASETS: [
                {**dataset, "weight": "1"} if wrong else dataset for dataset, wrong in zip(written, is_wrong, strict=True)
            ]
        },
    )


@rule("csv-with-chat")
def csv_with_chat(context: RuleContext) -> Problem | None:
    tables = _tables(context, context.spec.data.format)
    if not tables:
        return None
    return Problem(
        value=DataFormat.CHAT,
        message=f"{tables[0].field} is {tables[0].source}, and a CSV file cannot hold the turns of a chat",
        fix=f"write the chats as JSON Lines (.jsonl) or Parquet, or set {_FORMAT}: PromptCompletion; with the columns of "
        f"question and answer in {_MAPPING}, each row is a chat",
        changes={_FORMAT: DataFormat.PROMPT_COMPLETION},
    )


@rule("txt-without-text")
def txt_without_text(context: RuleContext) -> Problem | None:
    data_format = context.spec.data.format
    texts = _texts(context, data_format)
    if not texts:
        return None
    return Problem(
        value=data_format,
        message=f"{texts[0].field} is {texts[0].source}, and a .txt file holds text alone; records of format {data_format} have "
        "parts",
        fix=f"set {_FORMAT}: Text, or name a file of JSON Lines .jsonl",
        changes={_FORMAT: DataFormat.TEXT},
    )


@rule("mapping-without-effect")
def mapping_without_effect(context: RuleContext) -> Problem | None:
    data = context.spec.data
    if data.mapping is None:
        return None
    written = data.mapping.model_dump(exclude_none=True)
    fields = {name: key for name, key in mapped_fields(data.mapping).items() if name in written or name not in OPTIONAL_KEYS}
    wrong = [name for name in fields if name not in OF_FORMAT[data.format]]
    message = f"records of format {data.format} do not have this part"
    if not wrong and "messages" in fields and makes_chats_of_pairs(data.mapping, data.format):
        wrong, message = ["messages"], "prompt and completion are mapped too, but a chat comes from those two or from messages"
    if not wrong:
        return None
    # Find a format to which all of these fields apply, if there is one.
    fits = next((kind for kind in DataFormat if all(name in OF_FORMAT[kind] for name in fields)), None)
    is_written = getattr(data.mapping, wrong[0]) is not None
    named = f"{_MAPPING}.{to_camel(wrong[0]) if is_written else 'preset'}"
    sets_format = fits is not None and fits is not data.format and not (_tables(context, fits) or _texts(context, fits))
    return Problem(
        value=f"{to_camel(wrong[0])}: {fields[wrong[0]]}" if is_written else f"preset: {data.mapping.preset}",
        message=message,
        fix=f"set {_FORMAT}: {fits}, or remove {named}" if sets_format else f"remove {named}",
        changes={_FORMAT: fits} if sets_format else {named: None},
    )


def _files(context: RuleContext, ending: str) -> list[NamedSource]:
    """Return the data sources that are single files with this suffix."""
    return [named for named in named_sources(context.spec) if not named.is_model and named.source.lower().endswith(ending)]


def _tables(context: RuleContext, data_format: DataFormat) -> list[NamedSource]:
    """Return the CSV files, if this format would require a row to contain all turns of a chat."""
    holds_turns = data_format is DataFormat.CHAT and not makes_chats_of_pairs(context.spec.data.mapping, data_format)
    return _files(context, ".csv") if holds_turns else []


def _texts(context: RuleContext, data_format: DataFormat) -> list[NamedSource]:
    """Return the plain-text files, if this format requires records with several parts."""
    return [] if data_format is DataFormat.TEXT else _files(context, ".txt")


@rule("chat-template-unknown")
def chat_template_unknown(context: RuleContext) -> Problem | None:
    written = context.spec.data.chat_template
    if written is None or written in TEMPLATES or any(mark in written for mark in JINJA):
        return None
    by_lower = {name.lower(): name for name in TEMPLATES}
    near = get_close_matches(written.strip().lower(), by_lower, n=1, cutoff=0.5)
    meant = by_lower[near[0]] if near else None
    return Problem(
        value=written[:60],
        message=f"it holds no Jinja, and none of our templates has this name: {', '.join(sorted(TEMPLATES))}",
        fix=f"set {_TEMPLATE}: {meant}" if meant else f"name one of them, or remove {_TEMPLATE}, so that the tokenizer's is used",
        changes={_TEMPLATE: meant},
    )


@rule("completion-loss-on-text")
def completion_loss_on_text(context: RuleContext) -> Problem | None:
    data = context.spec.data
    if data.format is not DataFormat.TEXT or data.loss_on is not LossOn.COMPLETION:
        return None
    return Problem(value=data.loss_on)
