"""Changes of a manifest with which records of other names can be read, looked up by the keys of a record.

parse.py calls this for the first missing key. A suggestion contains changes of the manifest if these are certain to be meant;
otherwise it shows what a record should look like.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from finetune_job.api.inputs import DataFormat, MappingPreset
from finetune_job.plan.mapping import PRESETS, MappingPlan
from finetune_trainer.data.records import ASSISTANT, KEYS, PREFERENCES, ROLES, Suggestion, example, is_pair_of_turns

LONGEST_NAME = 128
"""Longest name in `data.mapping`, in characters."""
_FORMAT, _MAPPING, _LOSS_ON = "spec.data.format", "spec.data.mapping", "spec.data.lossOn"
ROLES_PATH = f"{_MAPPING}.roles."
"""Path before a role of the records. Roles that templates know need no mapping, so that other records stay as they are."""
_PAIRS = "PromptCompletion"
_ALPACA = ("instruction", "output")
_SHARE_GPT = {f"{_MAPPING}.preset": MappingPreset.SHARE_GPT.value}
_SHARE_GPT_TURN = ("from", "value")
_NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "instruction", "query", "problem", "user", "input", "source"),
    "completion": ("completion", "answer", "response", "output", "solution", "assistant", "target", "reply"),
    "text": ("text", "content", "body", "document", "article"),
    "role": ("role", "from", "speaker", "author", "sender"),
    "content": ("content", "value", "text", "message"),
    "input": ("input", "context", "passage", "background", "document", "evidence"),
    "system": ("system", "system_prompt", "system_message", "sys_prompt"),
}
"""Common names of the parts of a record in data sets, the clearest names first."""
_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("human", "prompter", "customer", "person", "client", "question"), "user"),
    **dict.fromkeys(("bot", "gpt", "chatgpt", "ai", "model", "chatbot", "agent", "answer"), ASSISTANT),
    **dict.fromkeys(("function", "observation"), "tool"),
}
"""Common names of the roles of a chat in data sets."""
_CALLS = frozenset({"function_call", "tool_call", "tool_calls"})
"""Roles under which data sets write calls of tools as turns of their own."""
_MOST_ROLES = 8
"""Largest number of roles that one fix names."""


def suggest(key: str, names: Mapping[str, Any], data_format: DataFormat, mapping: MappingPlan) -> Suggestion:
    """Suggest a fix for a record with these keys, or a table with these columns, that lacks `key`.

    Values are None if only names are known.
    """
    names = {name: value for name, value in names.items() if _can_be_written(name)}
    if all(name in names for name in PREFERENCES):
        return _preferences(names)
    suggestion = _turns(names, data_format) or _columns(names, data_format) or _near(key, names, data_format, mapping)
    return suggestion or Suggestion(f"write {example(data_format)}")


def suggest_for_table(columns: Mapping[str, Any]) -> Suggestion:
    """Suggest a fix for a table that was read as chats. Its columns may be question and answer, or a text."""
    names = {name: value for name, value in columns.items() if _can_be_written(name)}
    if all(name in names for name in PREFERENCES):
        return _preferences(names)
    return _columns(names, DataFormat.CHAT) or Suggestion(
        "write the chats as JSON Lines (.jsonl) or Parquet, or name the columns of question and answer in spec.data.mapping"
    )


def suggest_turn(message: Mapping[str, Any], turns: Sequence[Any], mapping: MappingPlan) -> Suggestion | None:
    """Suggest a fix for a turn, one of `turns`, that has no role by this name."""
    if all(name in message for name in _SHARE_GPT_TURN):
        kept = {} if mapping.messages == "conversations" else {f"{_MAPPING}.messages": mapping.messages}
        return _share_gpt({**_SHARE_GPT, **kept}, turns)
    role, content = _first(message, "role"), _first(message, "content")
    if role is None or content is None:
        return None
    return _set({f"{_MAPPING}.role": role, f"{_MAPPING}.content": content})


def is_call_role(role: str) -> bool:
    """Whether data sets write calls of tools as turns of this role."""
    return role.strip().lower() in _CALLS


def suggest_role(role: str) -> Suggestion:
    """Suggest a fix for a role that neither the mapping nor a template knows."""
    if _can_be_written(role) and (is_call_role(role) or _meant([role])):
        return _with_roles({}, [role])
    return Suggestion(f"name the role in {_MAPPING}.roles, as in {{{json.dumps(role)}: {ASSISTANT}}}")


def suggest_roles(roles: Sequence[str]) -> Suggestion | None:
    """Suggest a fix for a chat without an assistant: some of its roles may be other names for the known ones."""
    unknown = [role for role in roles if role not in ROLES and _can_be_written(role)][:_MOST_ROLES]
    if not unknown:
        return None
    names = _meant(unknown)
    is_call = any(is_call_role(role) for role in unknown)
    if is_call or (ASSISTANT in names.values() and len(names) == len(unknown)):
        return _with_roles({}, unknown)
    shown = json.dumps({role: names.get(role, ASSISTANT) for role in unknown[-1:]})
    return Suggestion(f"name the role of the answers in {_MAPPING}.roles, as in {shown}")


def _meant(roles: Sequence[str]) -> dict[str, str]:
    """Roles that are other names for known roles -> the known roles."""
    return {role: _ROLES[role.strip().lower()] for role in roles if role.strip().lower() in _ROLES}


def _with_roles(changes: Mapping[str, Any], unknown: Sequence[str]) -> Suggestion:
    """Suggest `changes` and names for the roles that templates do not know.

    If a turn calls a tool, the suggestion has no changes for a program, since learning a call as words is something else.
    """
    with_names = {**changes, **{f"{ROLES_PATH}{role}": name for role, name in _meant(unknown).items()}}
    calls = [role for role in unknown if is_call_role(role)]
    if not calls:
        return _set(with_names)
    as_words = _set({**with_names, **{f"{ROLES_PATH}{role}": ASSISTANT for role in calls}})
    return Suggestion(
        f"remove the records with such turns ({', '.join(calls)}): calls of tools are learnt from tool_calls of a turn, not from "
        f"turns of their own; to learn these as plain words of the assistant, {as_words.fix}"
    )


def _share_gpt(changes: Mapping[str, Any], turns: Sequence[Any]) -> Suggestion:
    """Suggest `changes`, which include the preset, and names for the roles of the turns that the preset does not know."""
    role_key = _SHARE_GPT_TURN[0]
    roles = [turn.get(role_key) for turn in turns if isinstance(turn, dict)]
    known = PRESETS[MappingPreset.SHARE_GPT].roles or {}
    written = dict.fromkeys(role for role in roles if isinstance(role, str) and _can_be_written(role))
    unknown = [role for role in written if role not in known and role not in ROLES][:_MOST_ROLES]
    return _with_roles(changes, unknown)


def _can_be_written(name: str) -> bool:
    """Whether a manifest may contain the name, which comes from the file and may be anything."""
    return name.isprintable() and len(name) <= LONGEST_NAME


def _set(changes: Mapping[str, Any]) -> Suggestion:
    return Suggestion(f"set {' and '.join(f'{path}: {value}' for path, value in changes.items())}", changes)


def _preferences(names: Mapping[str, Any]) -> Suggestion:
    """Advise how to use pairs of preferences. There are no changes for a program, since half of a pair means something else."""
    chosen = PREFERENCES[0]
    if isinstance(names[chosen], list):
        alone = _set({_FORMAT: "Chat", f"{_MAPPING}.messages": chosen})
    elif "prompt" in names:
        alone = _set({_FORMAT: _PAIRS, f"{_MAPPING}.completion": chosen})
    else:
        alone = _set({_FORMAT: "Text", f"{_MAPPING}.text": chosen})
    return Suggestion(
        "train on them with a tool for preferences, such as TRL's DPOTrainer; to imitate the chosen answers and ignore what the "
        f"rejected ones tell, which is another training, {alone.fix}"
    )


def rated_answers() -> Suggestion:
    """Advise how to use prompts with rated answers. There are no changes for a program, as above."""
    return Suggestion(
        "train on them with a tool for preferences, such as TRL's KTOTrainer; to imitate the desired answers, keep these records "
        "alone and remove the key; to imitate undesired ones, too, remove the key from all records, or, for a line break between "
        f"prompt and completion, {_set({f'{_MAPPING}.completion': 'completion'}).fix}"
    )


def _turns(names: Mapping[str, Any], data_format: DataFormat) -> Suggestion | None:
    """Suggest a chat if a list of turns stands under any key."""
    chat = {} if data_format is DataFormat.CHAT else {_FORMAT: "Chat"}
    sides = [names.get(key) for key in KEYS[DataFormat.PROMPT_COMPLETION]]
    if is_pair_of_turns(*sides) and all(isinstance(side, str) or _is_turns(side, ("role",)) for side in sides):
        return _set({**chat, _LOSS_ON: "Completion"})
    for key, value in names.items():
        if _is_turns(value, _SHARE_GPT_TURN):
            kept = {} if key == "conversations" else {f"{_MAPPING}.messages": key}
            return _share_gpt({**chat, **_SHARE_GPT, **kept, **_further(names, "system", but="system")}, value)
        if _is_turns(value, ("role", "content")):
            if not _has_answer(value):
                answer = _first(_texts(names), "completion")
                if answer is None:
                    continue
                pair = {f"{_MAPPING}.prompt": key, f"{_MAPPING}.completion": answer}
                return _set({**chat, **pair, _LOSS_ON: "Completion", **_further(names, "system")})
            kept = {} if key == "messages" else {f"{_MAPPING}.messages": key}
            return _set({**chat, **kept, **_further(names, "system")})
    return None


def _is_turns(value: Any, keys: tuple[str, ...]) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, dict) and all(key in turn for key in keys) for turn in value)


def _has_answer(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the turns may be the assistant's, under any name."""
    roles = [str(turn["role"]).strip().lower() for turn in turns]
    return any(_ROLES.get(role, role) not in ROLES - {ASSISTANT} for role in roles)


def _columns(names: Mapping[str, Any], data_format: DataFormat) -> Suggestion | None:
    """Suggest a format other than a list of turns.

    A text comes after question and answer: beside these it is the output of some template, which does not separate them.
    """
    return (
        _alpaca(names, data_format)
        or _other_format(names, data_format)
        or _pair(_texts(names), data_format)
        or _text(names, data_format)
        or _pair(names, data_format)
    )


def _alpaca(names: Mapping[str, Any], data_format: DataFormat) -> Suggestion | None:
    if any(name not in names for name in _ALPACA):
        return None
    more = _further({name: value for name, value in names.items() if name not in _ALPACA}, "input", but="input")
    return _as_pair(names, data_format, {f"{_MAPPING}.preset": "Alpaca", **more})


def _other_format(names: Mapping[str, Any], data_format: DataFormat) -> Suggestion | None:
    """Suggest another format if the record has its keys."""
    for other in (DataFormat.CHAT, DataFormat.PROMPT_COMPLETION):
        if other is not data_format and all(name in names for name in KEYS[other]):
            return Suggestion(f"set {_FORMAT}: {other.value}, which is what the record looks like", {_FORMAT: other.value})
    return None


def _pair(names: Mapping[str, Any], data_format: DataFormat) -> Suggestion | None:
    """Suggest prompt and completion by their common names."""
    pair = {field: _first(names, field) for field in ("prompt", "completion")}
    if not all(pair.values()):
        return None
    mapped = {f"{_MAPPING}.{field}": name for field, name in pair.items()}
    more = _further({name: value for name, value in names.items() if name not in pair.values()}, "input")
    return _as_pair(names, data_format, {**mapped, **more})


def _as_pair(names: Mapping[str, Any], data_format: DataFormat, changes: Mapping[str, Any]) -> Suggestion:
    """changes: the mapping of the keys."""
    system = _further(names, "system")
    # Only chats have a system turn.
    wanted = DataFormat.CHAT if system else data_format if data_format is not DataFormat.TEXT else DataFormat.PROMPT_COMPLETION
    return _set({**({} if data_format is wanted else {_FORMAT: wanted.value}), **changes, **system})


def _text(names: Mapping[str, Any], data_format: DataFormat) -> Suggestion | None:
    text = _first(names, "text")
    if text is None:
        return None
    changes = {} if data_format is DataFormat.TEXT else {_FORMAT: "Text"}
    return _set(changes | ({} if text == "text" else {f"{_MAPPING}.text": text}))


def _first(names: Mapping[str, Any], field: str) -> str | None:
    by_lower = {name.strip().lower(): name for name in names}
    return next((by_lower[name] for name in _NAMES[field] if name in by_lower), None)


def _texts(names: Mapping[str, Any]) -> dict[str, Any]:
    """Names whose values are texts, as far as the values are known."""
    return {name: value for name, value in names.items() if value is None or isinstance(value, str)}


def _further(names: Mapping[str, Any], field: str, but: str = "") -> dict[str, str]:
    """The change with which a further text is read, if the records have one. but: a name that is read without a change."""
    name = _first(_texts(names), field)
    return {} if name in {None, but} else {f"{_MAPPING}.{field}": str(name)}


def _near(key: str, names: Mapping[str, Any], data_format: DataFormat, mapping: MappingPlan) -> Suggestion | None:
    """Suggest the name that is most similar to the missing one."""
    field = {mapping.messages: "messages", mapping.prompt: "prompt", mapping.completion: "completion", mapping.text: "text"}[key]
    similar = difflib.get_close_matches(key, [name for name in names if name not in KEYS[data_format]], n=1)
    return _set({f"{_MAPPING}.{field}": similar[0]}) if similar else None
