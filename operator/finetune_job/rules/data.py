"""What records a job may name, and which settings of `data` belong together."""

from __future__ import annotations

from difflib import get_close_matches

from pydantic.alias_generators import to_camel

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.chat_templates import JINJA, TEMPLATES
from finetune_job.plan.inputs import NamedSource, named_sources
from finetune_job.plan.mapping import OF_FORMAT, makes_chats_of_pairs, mapped_fields
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.rule_tables import Bounds

_SOURCE = "data.source"
_REVISION = "data.revision"
_DATASETS = "data.datasets"
_VALIDATION = "data.validation.source"
_FORMAT = "data.format"
_TEMPLATE = "data.chatTemplate"
_LOSS_ON = "data.lossOn"
_MAPPING = "data.mapping"

WEIGHTS = Bounds(((">", 0.0), ("<=", 100.0)))
"""Occurrences of a record in one pass; beyond them a run only repeats itself."""
_UNKNOWN_SOURCE = "pvc://data/train.jsonl"
"""Stands where only the user can know the place."""


@rule(
    "source-or-datasets",
    "Training data is named in one way",
    reads=(_SOURCE, _REVISION, _DATASETS),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_training_data_is_named_twice_or_not_at_all",
        "KeyError: nothing is prepared; or no error: one of the two names is ignored",
    ),
    holds_for=OURS,
)
def source_or_datasets(context: RuleContext) -> Problem | None:
    data = context.spec.data
    if data.datasets is None:
        if data.source is not None:
            return None
        return Problem(
            field=_SOURCE,
            value=None,
            message="neither source nor datasets names the training data",
            fix=f'set {_SOURCE} to a file or directory, such as "{_UNKNOWN_SOURCE}", or list several in {_DATASETS}',
            changes={_SOURCE: _UNKNOWN_SOURCE},
        )
    field, value = (_SOURCE, data.source) if data.source is not None else (_REVISION, data.revision)
    if value is None:
        return None
    return Problem(
        field=field,
        value=value,
        message=f"{_DATASETS} names the training data, too, and each of them has its own source and revision",
        fix=f"move it into {_DATASETS}, or remove {_DATASETS}",
        changes={_SOURCE: None, _REVISION: None},
    )


@rule(
    "chat-template-without-chat",
    "A chat template renders chats",
    reads=(_TEMPLATE, _FORMAT),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_a_template_renders_nothing_but_chats",
        "no error: the tokens are the same with and without it",
    ),
    holds_for=OURS,
)
def chat_template_without_chat(context: RuleContext) -> Problem | None:
    data = context.spec.data
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
        field=_TEMPLATE,
        value=shown,
        message=f"records of format {data.format} are not chats, so nothing would be rendered with it",
        fix=f"set {_FORMAT}: Chat if the records hold messages, or remove {_TEMPLATE}",
        # Who named a template and no format has chats.
        changes={_FORMAT: DataFormat.CHAT} if may_be_chats else {_TEMPLATE: None},
    )


@rule(
    "assistant-loss-without-chat",
    "Only a chat has turns of an assistant",
    reads=(_LOSS_ON, _FORMAT),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_a_loss_on_what_records_do_not_have",
        "no error: every token is learnt, prompts included",
    ),
    holds_for=OURS,
)
def assistant_loss_without_chat(context: RuleContext) -> Problem | None:
    data = context.spec.data
    if data.loss_on is not LossOn.ASSISTANT or data.format is DataFormat.CHAT:
        return None
    instead = LossOn.ALL if data.format is DataFormat.TEXT else LossOn.COMPLETION
    return Problem(
        field=_LOSS_ON,
        value=data.loss_on,
        message=f"records of format {data.format} have no turns, so the loss would count every token, a prompt's included",
        fix=f"set {_LOSS_ON}: {instead}, or {_FORMAT}: Chat if the records hold messages",
        changes={_LOSS_ON: instead},
    )


@rule(
    "dataset-weight-range",
    "A weight says how often a record occurs in a pass",
    reads=(_DATASETS,),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_weights_that_leave_out_or_repeat",
        "no error: a record occurs never, or a thousand times in a pass",
    ),
    holds_for=OURS,
)
def dataset_weight_range(context: RuleContext) -> Problem | None:
    datasets = context.spec.data.datasets or []
    is_wrong = [not WEIGHTS.hold(dataset.weight) for dataset in datasets]
    if not any(is_wrong):
        return None
    number = is_wrong.index(True)
    written = [dataset.model_dump(mode="json", by_alias=True, exclude_unset=True) for dataset in datasets]
    return Problem(
        field=_DATASETS,
        value=datasets[number].weight,
        message=f"weight of {_DATASETS}[{number}], {datasets[number].source}: a record occurs {WEIGHTS} times in a pass",
        fix='write a weight such as "2" (each record twice) or "0.5" (every other record), or remove the data set',
        changes={
            _DATASETS: [
                {**dataset, "weight": "1"} if wrong else dataset for dataset, wrong in zip(written, is_wrong, strict=True)
            ]
        },
    )


@rule(
    "csv-with-chat",
    "CSV cannot hold chat records",
    reads=(_FORMAT, _MAPPING, _SOURCE, _DATASETS, _VALIDATION),
    sources=("RFC 4180: a field is a text, and the turns of a chat are a list",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_a_table_holds_no_chats",
        "a CSV file cannot hold chats, whose turns are lists",
    ),
    holds_for=OURS,
)
def csv_with_chat(context: RuleContext) -> Problem | None:
    tables = _tables(context, context.spec.data.format)
    if not tables:
        return None
    return Problem(
        field=_FORMAT,
        value=DataFormat.CHAT,
        message=f"{tables[0].field} is {tables[0].source}, and a CSV file cannot hold the turns of a chat",
        fix=f"write the chats as JSON Lines (.jsonl) or Parquet, or set {_FORMAT}: PromptCompletion; with the columns of "
        f"question and answer in {_MAPPING}, each row is a chat",
        changes={_FORMAT: DataFormat.PROMPT_COMPLETION},
    )


@rule(
    "txt-without-text",
    "A .txt file holds records of format Text",
    reads=(_FORMAT, _SOURCE, _DATASETS, _VALIDATION),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_a_text_file_holds_texts_alone",
        "a .txt file holds text alone",
    ),
    holds_for=OURS,
)
def txt_without_text(context: RuleContext) -> Problem | None:
    data_format = context.spec.data.format
    texts = _texts(context, data_format)
    if not texts:
        return None
    return Problem(
        field=_FORMAT,
        value=data_format,
        message=f"{texts[0].field} is {texts[0].source}, and a .txt file holds text alone; records of format {data_format} have "
        "parts",
        fix=f"set {_FORMAT}: Text, or name a file of JSON Lines .jsonl",
        changes={_FORMAT: DataFormat.TEXT},
    )


@rule(
    "mapping-without-effect",
    "A mapping names parts that records of the format have",
    reads=(_MAPPING, _FORMAT, _SOURCE, _DATASETS, _VALIDATION),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_a_mapping_of_what_the_format_does_not_have",
        "no error: the names are not looked for, and records are refused for the keys of the format, or read by other ones",
    ),
    holds_for=OURS,
)
def mapping_without_effect(context: RuleContext) -> Problem | None:
    data = context.spec.data
    if data.mapping is None:
        return None
    fields = mapped_fields(data.mapping)
    wrong = [name for name in fields if name not in OF_FORMAT[data.format]]
    message = f"records of format {data.format} have none"
    if not wrong and "messages" in fields and makes_chats_of_pairs(data.mapping, data.format):
        wrong, message = ["messages"], "prompt and completion are mapped, too, and a chat is made of them or of messages"
    if not wrong:
        return None
    # A preset means one format; what is written beside it may belong to another.
    fits = next((each for each in DataFormat if all(name in OF_FORMAT[each] for name in fields)), None)
    is_written = getattr(data.mapping, wrong[0]) is not None
    named = f"{_MAPPING}.{to_camel(wrong[0]) if is_written else 'preset'}"
    sets_format = fits is not None and fits is not data.format and not (_tables(context, fits) or _texts(context, fits))
    return Problem(
        field=_MAPPING,
        value=f"{to_camel(wrong[0])}: {fields[wrong[0]]}" if is_written else f"preset: {data.mapping.preset}",
        message=message,
        fix=f"set {_FORMAT}: {fits}, or remove {named}" if sets_format else f"remove {named}",
        changes={_FORMAT: fits} if sets_format else {named: None},
    )


def _files(context: RuleContext, ending: str) -> list[NamedSource]:
    """Sources of records that are one file of this kind."""
    return [named for named in named_sources(context.spec) if not named.is_model and named.source.lower().endswith(ending)]


def _tables(context: RuleContext, data_format: DataFormat) -> list[NamedSource]:
    """Tables whose records, of this format, would have to hold the turns of a chat."""
    holds_turns = data_format is DataFormat.CHAT and not makes_chats_of_pairs(context.spec.data.mapping, data_format)
    return _files(context, ".csv") if holds_turns else []


def _texts(context: RuleContext, data_format: DataFormat) -> list[NamedSource]:
    """Files of text alone whose records, of this format, would have to have parts."""
    return [] if data_format is DataFormat.TEXT else _files(context, ".txt")


@rule(
    "chat-template-unknown",
    "A chat template is Jinja, or the name of one",
    reads=(_TEMPLATE,),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_a_word_that_names_no_template_is_one_of_its_own",
        "no turn of a chat is written",
    ),
    holds_for=OURS,
)
def chat_template_unknown(context: RuleContext) -> Problem | None:
    written = context.spec.data.chat_template
    if written is None or written in TEMPLATES or any(mark in written for mark in JINJA):
        return None
    by_lower = {name.lower(): name for name in TEMPLATES}
    near = get_close_matches(written.strip().lower(), by_lower, n=1, cutoff=0.5)
    meant = by_lower[near[0]] if near else None
    return Problem(
        field=_TEMPLATE,
        value=written[:60],
        message=f"it holds no Jinja, and none of our templates has this name: {', '.join(sorted(TEMPLATES))}",
        fix=f"set {_TEMPLATE}: {meant}" if meant else f"name one of them, or remove {_TEMPLATE}, so that the tokenizer's is used",
        changes={_TEMPLATE: meant},
    )


@rule(
    "completion-loss-on-text",
    "Plain text has no completion",
    reads=(_LOSS_ON, _FORMAT),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_a_loss_on_what_records_do_not_have",
        "no error: every token is learnt",
    ),
    holds_for=OURS,
)
def completion_loss_on_text(context: RuleContext) -> Problem | None:
    data = context.spec.data
    if data.format is not DataFormat.TEXT or data.loss_on is not LossOn.COMPLETION:
        return None
    return Problem(
        field=_LOSS_ON,
        value=data.loss_on,
        message="records of format Text have no prompt and no completion, so the loss would count every token",
        fix=f"set {_LOSS_ON} to All, or {_FORMAT} to PromptCompletion",
        changes={_LOSS_ON: LossOn.ALL},
    )


RULES = (
    completion_loss_on_text,
    txt_without_text,
    mapping_without_effect,
    chat_template_unknown,
    source_or_datasets,
    chat_template_without_chat,
    assistant_loss_without_chat,
    dataset_weight_range,
    csv_with_chat,
)
