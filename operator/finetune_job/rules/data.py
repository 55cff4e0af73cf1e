"""What records a job may name, and which settings of `data` belong together."""

from __future__ import annotations

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.plan.inputs import named_sources
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.rule_tables import Bounds

_SOURCE = "data.source"
_REVISION = "data.revision"
_DATASETS = "data.datasets"
_VALIDATION = "data.validation.source"
_FORMAT = "data.format"
_TEMPLATE = "data.chatTemplate"
_LOSS_ON = "data.lossOn"

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
    return Problem(
        field=_TEMPLATE,
        value=shown,
        message=f"records of format {data.format} are not chats, so nothing would be rendered with it",
        fix=f"set {_FORMAT}: Chat if the records hold messages, or remove {_TEMPLATE}",
        changes={_TEMPLATE: None},
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
    reads=(_FORMAT, _SOURCE, _DATASETS, _VALIDATION),
    sources=("RFC 4180: a field is a text, and the turns of a chat are a list",),
    reproduction=Reproduction(
        "tests/pitfalls/test_records.py::test_a_table_holds_no_chats",
        "a CSV file cannot hold chats, whose turns are lists",
    ),
    holds_for=OURS,
)
def csv_with_chat(context: RuleContext) -> Problem | None:
    if context.spec.data.format is not DataFormat.CHAT:
        return None
    tables = [named for named in named_sources(context.spec) if not named.is_model and named.source.lower().endswith(".csv")]
    if not tables:
        return None
    return Problem(
        field=_FORMAT,
        value=DataFormat.CHAT,
        message=f"{tables[0].field} is {tables[0].source}, and a CSV file cannot hold the turns of a chat",
        fix=f"write the chats as JSON Lines (.jsonl) or Parquet, or set {_FORMAT}: PromptCompletion",
        changes={_FORMAT: DataFormat.PROMPT_COMPLETION},
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
    source_or_datasets,
    chat_template_without_chat,
    assistant_loss_without_chat,
    dataset_weight_range,
    csv_with_chat,
)
