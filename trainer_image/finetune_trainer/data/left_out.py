"""Finds what a chat template leaves out of a record: keys that it does not read, and content that it does not write.

The record is still used. Called by tokenize.py for each rendered chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from finetune_trainer.data.chat import ChatTemplate, RenderedChat
from finetune_trainer.data.other_keys import IGNORED_FIELD, TEMPLATE_ARGUMENTS, is_empty, may_matter
from finetune_trainer.data.records import ASSISTANT, TOOLS, Record, RecordProblem, as_json, called_name, shown

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys in which templates look for the thoughts before an answer."""
_READ_IN_TURNS = frozenset({"role", "content", "tool_calls", *THOUGHTS})
"""Keys of a turn that `_unread_by` skips, since templates read them or `_dropped_content` checks them."""
END_OF_THOUGHT, START_OF_THOUGHT = "</think>", "<think>"
"""Delimiters of thoughts within a content."""


def left_out_by(template: ChatTemplate, record: Record, chat: RenderedChat) -> tuple[RecordProblem, ...]:
    """Return a problem for everything that the template leaves out of a record. chat: the rendered record with all its turns."""
    return (*_dropped_content(record, chat), *_unread_by(template, record))


def _unread_by(template: ChatTemplate, record: Record) -> Iterator[RecordProblem]:
    """Yield a problem for each key that may matter but that the template does not mention, once for all turns with that key."""

    def unread(key: str, value: Any) -> RecordProblem:
        reason = "is not read by the chat template, so it has no effect"
        fix = f"set a spec.data.chatTemplate that reads it, or remove it, or name it in {IGNORED_FIELD}"
        return RecordProblem(record.line, key, shown(as_json(value)), reason, fix, record.unit, record.file)

    for name, value in record.template_arguments.items():
        if not is_empty(value) and not template.mentions(name):
            yield unread(f"{TEMPLATE_ARGUMENTS}.{name}", value)
    known = set(_READ_IN_TURNS)
    for number, message in enumerate(record.messages):
        for name in may_matter(message):
            if name not in known and not template.mentions(name):
                known.add(name)  # the same key in another turn is the same kind of problem
                yield unread(f"messages[{number}].{name}", message[name])


def _dropped_content(record: Record, chat: RenderedChat) -> Iterator[RecordProblem]:
    """Yield a problem for every text of the record that is not in the rendered chat.

    chat.turns: all turns of the assistant in order, or empty if every token is supervised.
    """

    def dropped(key: str, text: str, reason: str, fix: str) -> RecordProblem:
        return RecordProblem(record.line, key, shown(text), reason, fix, record.unit, record.file)

    turns = iter(chat.turns)
    for number, message in enumerate(record.messages):
        place, words = f"messages[{number}]", message["content"] or ""
        if message["role"] != ASSISTANT:
            # Some templates write the result of a tool as a JSON string, so its escaped form is accepted as well.
            if words.strip() not in chat.text and json.dumps(words.strip(), ensure_ascii=False)[1:-1] not in chat.text:
                role = message["role"]
                reason = f"of a turn of the role {role!r} is left out or changed by the chat template"
                fix = f"set a spec.data.chatTemplate that writes turns of the role {role!r}, or write it into another turn"
                yield dropped(f"{place}.content", words.strip(), reason, fix)
            continue
        turn = next(turns, None)
        learnt = chat.text if turn is None else "".join(chat.text[start:stop] for start, stop in turn)
        thoughts = [(key, message[key]) for key in THOUGHTS if isinstance(message.get(key), str)]
        if words.strip() not in learnt and END_OF_THOUGHT in words:
            thought, _, words = words.rpartition(END_OF_THOUGHT)
            thoughts.append(("content", thought.rpartition(START_OF_THOUGHT)[2]))
        for key, thought in thoughts:
            if thought.strip() not in learnt:
                reason = "holds thoughts that the chat template leaves out, so they are not learnt"
                fix = (
                    "write a record for each answer whose thoughts are to be learnt, or set a spec.data.chatTemplate that keeps "
                    "them"
                )
                yield dropped(f"{place}.{key}", thought.strip(), reason, fix)
                break  # several keys may hold the same thoughts
        if words.strip() not in learnt:
            reason = "is left out or changed by the chat template, so it is not learnt as written"
            fix = "set a spec.data.chatTemplate that writes the assistant's content unchanged, also in turns with tool calls"
            yield dropped(f"{place}.content", words.strip(), reason, fix)
    for name in map(called_name, record.tools):
        if name not in chat.text:
            reason = f"{name!r} is left out by the chat template, so the model does not see it"
            yield dropped(TOOLS, name, reason, "set a spec.data.chatTemplate that writes tools, or remove them")
            return
