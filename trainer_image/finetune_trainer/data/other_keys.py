"""Decides what happens to keys of records, turns and content parts that the format does not define.

Training tools give some of these keys a meaning, such as a label, a weight or a picture. If a value would change what the model
learns, the record is refused. Other keys are reported once for each source, unless they are known to carry nothing that is
learnt. `spec.data.mapping.ignored` names keys that have no meaning for the job and are skipped. Called by parse.py.

The meanings are taken from TRL, axolotl, LLaMA-Factory, ms-swift, NeMo, FastChat, OpenAI, Mistral, Together and Fireworks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from finetune_job.api.inputs import DataFormat
from finetune_job.plan.mapping import MappingPlan
from finetune_trainer.data.records import ASSISTANT, LABEL, RecordPosition, RecordRefusedError, as_json, kind

IGNORED_FIELD = "spec.data.mapping.ignored"
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Key of a record that holds arguments of its chat template, as in TRL."""
WEIGHT = "weight"
"""Key of a turn; the value 0 means that the turn is not learnt, as in OpenAI's records. Other such keys are converted to it."""
_FLAGS = (WEIGHT, "loss_weight", "loss_scale", "train", "training", "trainable")
"""Keys that say whether, or how much, a record or a turn is learnt."""
_TURN_FLAGS = (*_FLAGS, "loss")
_OF_ANSWERS = (WEIGHT, "loss", "loss_scale")
"""Flags that have a meaning only in turns of the assistant, and are ignored in other turns."""
_DETAILS = ("train_detail", "training_detail")
"""Keys under which axolotl lists the spans of a turn, each with a `train` flag."""
MEDIA = frozenset({
    "image", "images", "image_path", "image_paths", "image_url", "video", "videos", "audio", "audios", "input_audio", "bbox",
})  # fmt: skip
_PREFERENCES = (
    "chosen", "rejected", "chosen_messages", "rejected_messages", "chosen_response", "rejected_response", "rejected_output",
    "preferred_output", "non_preferred_output",
)  # fmt: skip
_RATINGS = (LABEL, "kto_tag")
_REWARDS = ("reward", "rewards", "advantage", "advantages")
_MASKED = "says which tokens are learnt, but this product decides that by spec.data.lossOn"
_UNMASK = "remove the key, and set spec.data.lossOn to what is to be learnt"
_NO_LABEL = -100
"""Label of tokens that are not learnt, in records that are already tokenised."""
_TOKEN_MASKS = ("loss_mask", "completion_mask", "assistant_mask", "assistant_masks")
_ROLE_MASK = "mask"
"""NeMo's key that names the role whose turns are not learnt."""
_NOTES = frozenset({
    "id", "ids", "_id", "idx", "index", "uid", "uuid", "guid", "key", "hash", "row_id", "sample_id", "example_id", "record_id",
    "prompt_id", "question_id", "message_id", "messageid", "conversation_id", "conversation_hash", "parent_id", "session_id",
    "source", "sources", "dataset", "dataset_name", "data_source", "origin", "url", "link", "file", "filename", "path", "repo",
    "category", "categories", "task", "task_type", "task_name", "topic", "topics", "subject", "domain", "subset", "tag", "tags",
    "language", "lang", "locale", "license", "author", "user", "username", "created", "created_at", "date", "timestamp", "time",
    "version", "model", "model_name", "generator", "metadata", "meta", "meta_info", "extra_info", "extra", "info", "split",
    "num_turns", "turns", "turn", "num_tokens", "token_count", "length", "difficulty", "quality", "__index_level_0__",
    "parallel_tool_calls",
})  # fmt: skip
"""Keys (in lower case) that only describe a record or a turn and carry nothing that is learnt."""
_TURN_NOTES = _NOTES | {"tool_call_id", "annotations", "parsed", "logprobs", "finish_reason", "usage", "end_turn"}
_PART_NOTES = _NOTES | {"type", "annotations", "cache_control", "logprobs"}
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are text."""
_TEXT_KEYS = ("text", "value", "content")
"""Keys under which tools store the text of a part."""


@dataclass(frozen=True)
class _Meaning:
    """A meaning of a key that this product does not support."""

    reason: str
    fix: str
    applies: Callable[[Any], bool] = lambda _value: True
    """Decides whether the meaning applies to a value, which is never empty."""
    are_preferences: bool = False


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in {"true", "false"})


def _is_other_share(value: Any) -> bool:
    return _share(value) not in (None, 1)


def _is_mask(value: Any) -> bool:
    return isinstance(value, list) and all(item in (0, 1) for item in value)


def _masks_labels(value: Any) -> bool:
    return isinstance(value, list) and _NO_LABEL in value


def _hides_answers(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in {ASSISTANT, "gpt", "model", "chatgpt", "bot"}


_RECORD_MEANINGS: Mapping[str, _Meaning] = {
    **dict.fromkeys(
        _RATINGS,
        _Meaning(
            "says whether the answer is desired: these are preferences, on which this product does not train, and it would "
            "also learn undesired answers",
            "train on them with a tool for preferences, such as TRL's KTOTrainer; to imitate the desired answers, keep these "
            "records alone and remove the key",
            _is_boolean,
            are_preferences=True,
        ),
    ),
    **dict.fromkeys(
        _PREFERENCES,
        _Meaning(
            "compares answers: these are preferences, on which this product does not train",
            "train on them with a tool for preferences, such as TRL's DPOTrainer; to imitate one answer, remove the others",
            are_preferences=True,
        ),
    ),
    **dict.fromkeys(
        MEDIA,
        _Meaning(
            "holds pictures, video or sound, but this product trains on text alone, so the model would learn answers to what it "
            "cannot see",
            "remove these records",
        ),
    ),
    **dict.fromkeys(
        _FLAGS,
        _Meaning(
            "says how much the record is learnt, but each record is learnt once in a pass",
            "put records of equal weight into a file of their own and name it, with its weight, in spec.data.datasets",
            _is_other_share,
        ),
    ),
    **dict.fromkeys(
        _REWARDS,
        _Meaning(
            "rates the answer, but training here gives every answer the same weight",
            "train with a tool for rewards, such as TRL's GRPOTrainer; to imitate good answers, keep these records alone",
        ),
    ),
    **dict.fromkeys(_TOKEN_MASKS, _Meaning(_MASKED, _UNMASK, _is_mask)),
    "labels": _Meaning(_MASKED, _UNMASK, _masks_labels),
    _ROLE_MASK: _Meaning(
        "says that the assistant's turns are not learnt, but this product learns nothing else of a chat",
        "remove the key, and name the role to be learnt in spec.data.mapping.roles",
        _hides_answers,
    ),
}
"""Key of a record -> the meaning that other tools give it."""
_NOT_OF_TEXTS = frozenset({*_RATINGS, *_PREFERENCES, *_FLAGS, *_REWARDS, *MEDIA, _ROLE_MASK})
"""Keys that lose this meaning in the text format: its records have no answer and are always learnt."""


def unread_keys(
    place: RecordPosition, record: Mapping[str, Any], read: Collection[str], data_format: DataFormat
) -> tuple[str, ...]:
    """Return the keys of a record that are not read but may mean something. Raises RecordRefusedError if a meaning would be lost.

    record: without the keys that the mapping ignores. read: the keys from which the record is made.
    """
    unread = []
    for key, value in record.items():
        if key in read or is_empty(value):
            continue
        meaning = _RECORD_MEANINGS.get(key)
        if data_format is DataFormat.TEXT and key in _NOT_OF_TEXTS:
            meaning = None
        is_repeated = key in _PREFERENCES and value in (record.get(name) for name in read)
        if meaning is not None and meaning.applies(value) and not is_repeated:
            _refuse(place, key, value, meaning)
        if is_of_interest(key) and not is_repeated and not _is_followed(key, value):
            unread.append(key)
    return tuple(unread)


def _is_followed(key: str, value: Any) -> bool:
    """Whether the product already does what this value asks for."""
    return (key in _FLAGS and _share(value) == 1) or (key == _ROLE_MASK and isinstance(value, str))


def is_of_interest(key: str) -> bool:
    """Whether a key that is not read might mean something, judging by its name."""
    return key.lower() not in _NOTES


def judged_columns(names: Collection[str], data_format: DataFormat, mapping: MappingPlan) -> list[str]:
    """Columns whose values decide whether a record is refused. Other columns are not read, because their values may be large."""
    not_judged = {*mapping.ignored, *(_NOT_OF_TEXTS if data_format is DataFormat.TEXT else ())}
    return [name for name in names if name in _RECORD_MEANINGS and name not in not_judged]


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, an empty string, list or object, or a list or object of such values."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return all(item in (None, "", [], {}) for item in items)


def without_flags(place: RecordPosition, key: str, turn: Mapping[str, Any], role: str, mapping: MappingPlan) -> dict[str, Any]:
    """Return the remaining keys of a turn, without flags that say whether the turn is learnt.

    A turn of the assistant that is not learnt gets `weight: 0` instead. Raises RecordRefusedError for keys that would change what
    is learnt in a way that this product does not support.
    """
    others: dict[str, Any] = {}
    is_learnt = True
    for name, value in turn.items():
        if value is None or name in mapping.ignored:
            continue
        if name in _TURN_FLAGS:
            is_learnt = _is_learnt(place, f"{key}.{name}", value, role) and is_learnt
        elif name in _DETAILS and not is_empty(value):
            _check_spans(place, f"{key}.{name}", value)
        elif name in (*MEDIA, *_RATINGS, *_REWARDS) and not is_empty(value) and _RECORD_MEANINGS[name].applies(value):
            _refuse(place, f"{key}.{name}", value, _RECORD_MEANINGS[name])
        else:
            others[name] = value
    if role == ASSISTANT and not is_learnt:
        others[WEIGHT] = 0
    return others


def may_matter(turn: Mapping[str, Any]) -> Iterator[str]:
    """Yield a turn's keys that matter only if the template reads them. A tool result's `name` is skipped: the call has it too."""
    known = {*_TURN_NOTES, WEIGHT, *(["name"] if turn["role"] == "tool" else [])}
    return (key for key, value in turn.items() if key.lower() not in known and not is_empty(value))


def text_of_part(place: RecordPosition, key: str, part: Any, mapping: MappingPlan) -> str:
    """The text of one content part. Raises RecordRefusedError if the part has no text, or has keys that would be lost."""
    part_type = part.get("type", "text") if isinstance(part, dict) else kind(part)
    text = next((part[name] for name in _TEXT_KEYS if part.get(name) is not None), None) if isinstance(part, dict) else None
    if part_type not in _TEXT_PARTS or not isinstance(text, str):
        reason = f'is a part of the type {as_json(part_type)}, not "text", and this product trains on text alone'
        if part_type in _TEXT_PARTS:
            reason = f"is a text part without a string under {' or '.join(map(repr, _TEXT_KEYS))}"
        place.refuse(key, as_json(part), reason, "remove the part, or the record", is_of_source=part_type not in _TEXT_PARTS)
    for name, value in part.items():
        if name in (*_TEXT_KEYS, *_PART_NOTES, *mapping.ignored) or is_empty(value):
            continue
        if name in _TURN_FLAGS and _share(value) == 1:
            continue
        reason = "is a key of a content part, of which only the text is read"
        place.refuse(f"{key}.{name}", as_json(value), reason, f"remove it, or name it in {IGNORED_FIELD}", is_of_source=True)
    return text


def _refuse(place: RecordPosition, key: str, value: Any, meaning: _Meaning) -> NoReturn:
    name = key.rpartition(".")[2]
    fix = f"{meaning.fix}; to learn the records whatever it says, set {IGNORED_FIELD}: [{name}]"
    problem = place.problem(key, as_json(value), meaning.reason, fix, is_of_source=True)
    raise RecordRefusedError(replace(problem, are_preferences=meaning.are_preferences))


def _share(value: Any) -> float | None:
    """How much something is learnt: 1 for true, 0 for false; None if the value is neither a boolean nor a number."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
        try:
            return float(value)
        except ValueError:
            return None
    try:
        return float(value) if isinstance(value, bool | int | float) else None
    except OverflowError:
        return math.inf


def _is_learnt(place: RecordPosition, key: str, value: Any, role: str) -> bool:
    share = _share(value)
    if share not in (0, 1):
        reason = "is neither 0 nor 1, but a turn is learnt either whole or not at all"
        fix = f"write 1 to learn the turn or 0 to leave it out, or name the key in {IGNORED_FIELD}"
        place.refuse(key, as_json(value), reason, fix, is_of_source=True)
    if share == 1 and role != ASSISTANT and key.rpartition(".")[2] not in _OF_ANSWERS:
        reason = f"asks to learn a turn of the role {role!r}, but only turns of the assistant are learnt"
        fix = f"remove it, or set spec.data.lossOn: All and name the key in {IGNORED_FIELD}"
        place.refuse(key, as_json(value), reason, fix, is_of_source=True)
    return share == 1


def _check_spans(place: RecordPosition, key: str, spans: Any) -> None:
    is_whole = isinstance(spans, list) and all(isinstance(span, dict) and _share(span.get("train", True)) == 1 for span in spans)
    if not is_whole:
        reason = "asks to learn a part of the turn, but a turn is learnt either whole or not at all"
        place.refuse(key, as_json(spans), reason, f"remove it, or name it in {IGNORED_FIELD}", is_of_source=True)
