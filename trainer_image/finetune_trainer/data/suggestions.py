"""Suggests manifest changes that make records with other keys readable, judging by the keys of one record.

parse.py calls this for the first missing key. A suggestion contains manifest changes only if they are certainly what the user
wants; otherwise it shows what a record should look like.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from finetune_job.api.inputs import DataFormat, MappingPreset
from finetune_job.plan.mapping import PRESETS, MappingPlan
from finetune_trainer.data.records import ASSISTANT, KEYS, PREFERENCES, ROLES, Suggestion, example, is_pair_of_turns

LONGEST_NAME = 128
"""Longest name in `data.mapping`, in characters."""
_FORMAT, _MAPPING, _LOSS_ON = "spec.data.format", "spec.data.mapping", "spec.data.lossOn"
ROLES_PATH = f"{_MAPPING}.roles."
"""Manifest path to which the name of a role is appended. Roles that templates know need no mapping."""
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
"""Part of a record -> its common names in data sets, the clearest names first."""
_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("human", "prompter", "customer", "person", "client", "question"), "user"),
    **dict.fromkeys(("bot", "gpt", "chatgpt", "ai", "model", "chatbot", "agent", "answer"), ASSISTANT),
    **dict.fromkeys(("function", "observation"), "tool"),
}
"""Common names of roles in data sets -> the roles that templates know."""
_ARGUMENTS = frozenset({"reasoning_effort", "enable_thinking", "thinking", "documents", "tool_choice", "model_identity"})
"""Keys of records that are usually arguments of a chat template."""
_MOST_ROLES = 8
"""Largest number of roles in one fix."""


def suggest(key: str, names: Mapping[str, Any], data_format: DataFormat, mapping: MappingPlan) -> Suggestion:
    """Suggest a fix for a record with these keys, or a table with these columns, that lacks `key`.

    The values of `names` are None if only the names are known.
    """
    names = {name: names[name] for name in _usable(names)}
    if all(name in names for name in PREFERENCES):
        return _preferences(names)
    suggestion = _turns(names, data_format) or _columns(names, data_format)
    if suggestion is None:
        fields = {mapping.messages: "messages", mapping.prompt: "prompt", mapping.completion: "completion", mapping.text: "text"}
        similar = difflib.get_close_matches(key, [name for name in names if name not in KEYS[data_format]], n=1)
        suggestion = _set(_mapped(fields[key], similar[0])) if similar else Suggestion(f"write {example(data_format, mapping)}")
    return suggestion


def suggest_for_table(columns: Mapping[str, Any]) -> Suggestion:
    """Suggest a fix for a table that was read as chats. Its columns may be question and answer, or a text."""
    names = {name: columns[name] for name in _usable(columns)}
    if all(name in names for name in PREFERENCES):
        return _preferences(names)
    return _columns(names, DataFormat.CHAT) or Suggestion(
        "write the chats as JSON Lines (.jsonl) or Parquet, or name the columns of question and answer in spec.data.mapping"
    )


def suggest_turn(message: Mapping[str, Any], turns: Sequence[Any], mapping: MappingPlan) -> Suggestion | None:
    """Suggest a fix for `message`, one of `turns`, if it lacks the key that the mapping gives for the role."""
    if all(name in message for name in _SHARE_GPT_TURN):
        return _share_gpt({**_SHARE_GPT, **_mapped("messages", mapping.messages, but="conversations")}, turns)
    role, content = _first(message, "role"), _first(message, "content")
    return None if role is None or content is None else _set({**_mapped("role", role), **_mapped("content", content)})


def is_call_role(role: str) -> bool:
    """Whether data sets use this role for turns that are calls of tools."""
    return role.strip().lower() in {"function_call", "tool_call", "tool_calls"}


def suggest_role(role: str) -> Suggestion:
    """Suggest a fix for a role that neither the mapping nor a template knows."""
    if role in _usable([role]):
        if is_call_role(role):
            as_words = _set({f"{ROLES_PATH}{role}": ASSISTANT})
            return Suggestion(
                "remove the records with such turns: calls of tools are learnt from tool_calls of a turn, not from turns of "
                f"their own; to learn these as plain words of the assistant, {as_words.fix}"
            )
        if known := _known_roles([role]):
            return _set(known)
    return Suggestion(f"name the role in {_MAPPING}.roles, as in {{{json.dumps(role)}: {ASSISTANT}}}")


def suggest_roles(roles: Sequence[str]) -> Suggestion | None:
    """Suggest a fix for a chat without an assistant, if some of its roles are common names of known roles."""
    unknown = [role for role in _usable(roles) if role not in ROLES][:_MOST_ROLES]
    if not unknown:
        return None
    known = _known_roles(unknown)
    if ASSISTANT in known.values() and len(known) == len(unknown):
        return _set(known)
    shown = json.dumps({unknown[-1]: known.get(f"{ROLES_PATH}{unknown[-1]}", ASSISTANT)})
    return Suggestion(f"name the role of the answers in {_MAPPING}.roles, as in {shown}")


def suggest_reading(key: str, data_format: DataFormat, mapping: MappingPlan) -> str:
    """Advise how to read a key that is in the records but not in the mapping; empty if its name does not show its meaning."""
    name, is_chat = key.lower(), data_format is DataFormat.CHAT
    if data_format is DataFormat.TEXT:
        return ""
    if name in _NAMES["system"]:
        return f"to begin chats with {key!r}, set {'' if is_chat else f'{_FORMAT}: Chat and '}{_MAPPING}.system: {key}"
    if name == "history":
        return f"to put its turns before the prompt, set {'' if is_chat else f'{_FORMAT}: Chat and '}{_MAPPING}.history: {key}"
    if name in _ARGUMENTS and is_chat:
        return f"to give {key!r} to the chat template, set spec.data.templateArguments, or write it into chat_template_kwargs"
    if name in _NAMES["input"] and (not is_chat or mapping.chat_of_pair):
        return f"to add {key!r} to the prompt, set {_MAPPING}.input: {key}"
    return ""


def _preferences(names: Mapping[str, Any]) -> Suggestion:
    """Advise how to use pairs of preferences. No changes are offered: learning half of each pair is a different task."""
    chosen, rejected = PREFERENCES
    if isinstance(names[chosen], list):
        alone = {_FORMAT: "Chat", **_mapped("messages", chosen)}
    elif "prompt" in names:
        alone = {_FORMAT: "PromptCompletion", **_mapped("completion", chosen)}
    else:
        alone = {_FORMAT: "Text", **_mapped("text", chosen)}
    return Suggestion(
        "train on them with a tool for preferences, such as TRL's DPOTrainer; to imitate the chosen answers and ignore the "
        f"rejected ones, which is a different training, {_set({**alone, f'{_MAPPING}.ignored': f'[{rejected}]'}).fix}"
    )


def _turns(names: Mapping[str, Any], data_format: DataFormat) -> Suggestion | None:
    """Suggest the chat format if any key has a list of turns."""
    chat = {} if data_format is DataFormat.CHAT else {_FORMAT: "Chat"}
    sides = [names.get(key) for key in KEYS[DataFormat.PROMPT_COMPLETION]]
    if is_pair_of_turns(*sides) and all(isinstance(side, str) or _is_turns(side, ("role",)) for side in sides):
        return _set({**chat, _LOSS_ON: "Completion"})
    texts = _texts(names)
    for key, value in names.items():
        if _is_turns(value, _SHARE_GPT_TURN):
            system = _mapped("system", _first(texts, "system"), but="system")
            return _share_gpt({**chat, **_SHARE_GPT, **_mapped("messages", key, but="conversations"), **system}, value)
        if _is_turns(value, ("role", "content")):
            system = _mapped("system", _first(texts, "system"))
            roles = [str(turn["role"]).strip().lower() for turn in value]
            if any(_ROLES.get(role, role) not in ROLES - {ASSISTANT} for role in roles):  # an unknown role may be the assistant's
                return _set({**chat, **_mapped("messages", key, but="messages"), **system})
    return None


def _is_turns(value: Any, keys: tuple[str, ...]) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) and turn.keys() >= {*keys} for turn in value)


def _columns(names: Mapping[str, Any], data_format: DataFormat) -> Suggestion | None:
    """Suggest a format for a record without a list of turns.

    Question and answer are preferred to a text: a text in the same record is a template's output, which does not separate them.
    """
    if "instruction" in names and "output" in names:
        preset = {f"{_MAPPING}.preset": "Alpaca"}
        return _pair(names, data_format, preset, ("instruction", "output"), but="input")
    for other in (DataFormat.CHAT, DataFormat.PROMPT_COMPLETION):
        if other is not data_format and all(name in names for name in KEYS[other]):
            return Suggestion(f"set {_FORMAT}: {other.value}, which is what the record looks like", {_FORMAT: other.value})
    for columns in (_texts(names), names):
        pair = (_first(columns, "prompt"), _first(columns, "completion"))
        if pair[0] is not None and pair[1] is not None:
            return _pair(columns, data_format, {**_mapped("prompt", pair[0]), **_mapped("completion", pair[1])}, pair)
        text = _first(names, "text")
        if text is not None:
            return _set(({} if data_format is DataFormat.TEXT else {_FORMAT: "Text"}) | _mapped("text", text, but="text"))
    return None


def _pair(
    names: Mapping[str, Any],
    data_format: DataFormat,
    changes: Mapping[str, str],
    read: Sequence[str | None],
    but: str | None = None,
) -> Suggestion:
    """Suggest a pair of question and answer. changes: the mapping of the keys in `read`. but: input key that needs no mapping."""
    texts = _texts(names)
    system = _mapped("system", _first(texts, "system"))
    more = _mapped("input", _first({name: None for name in texts if name not in read}, "input"), but)
    # Only chats have a system turn, so a system column needs that format.
    wanted = DataFormat.CHAT if system else data_format if data_format is not DataFormat.TEXT else DataFormat.PROMPT_COMPLETION
    return _set({**({} if data_format is wanted else {_FORMAT: wanted.value}), **changes, **more, **system})


def _share_gpt(changes: Mapping[str, str], turns: Sequence[Any]) -> Suggestion:
    """Suggest `changes`, which include the preset, and a mapping of the roles in the turns that the preset does not know."""
    roles = [turn.get(_SHARE_GPT_TURN[0]) for turn in turns if isinstance(turn, dict)]
    known = PRESETS[MappingPreset.SHARE_GPT].roles or {}
    written = _usable(dict.fromkeys(role for role in roles if isinstance(role, str)))
    unknown = [role for role in written if role not in known and role not in ROLES][:_MOST_ROLES]
    return _set({**changes, **_known_roles(unknown)})


def _known_roles(roles: Sequence[str]) -> dict[str, str]:
    """The changes that map each of `roles` that is a common name of a known role."""
    return {f"{ROLES_PATH}{role}": _ROLES[role.strip().lower()] for role in roles if role.strip().lower() in _ROLES}


def _usable(names: Iterable[str]) -> list[str]:
    """Keep only names that a manifest may contain. The names in a file may be anything."""
    return [name for name in names if name.isprintable() and len(name) <= LONGEST_NAME]


def _texts(names: Mapping[str, Any]) -> dict[str, Any]:
    """The entries whose value is a string or not known (None)."""
    return {name: value for name, value in names.items() if value is None or isinstance(value, str)}


def _first(names: Mapping[str, Any], field: str) -> str | None:
    """The first of the field's common names that is among `names`; None if there is none."""
    by_lower = {name.strip().lower(): name for name in names}
    return next((by_lower[name] for name in _NAMES[field] if name in by_lower), None)


def _mapped(field: str, name: str | None, but: str | None = None) -> dict[str, str]:
    """The change that maps the field to `name`. but: a name that needs no change."""
    return {} if name is None or name == but else {f"{_MAPPING}.{field}": name}


def _set(changes: Mapping[str, str]) -> Suggestion:
    return Suggestion(f"set {' and '.join(f'{path}: {value}' for path, value in changes.items())}", changes)
