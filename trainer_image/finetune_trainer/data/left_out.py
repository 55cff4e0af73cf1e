"""What a chat holds and its rendered text does not: thoughts, words beside a call, whole turns, the tools.

Templates leave out on purpose: thoughts of all answers but the last, say. It is no mistake of the record, but a user has to know.
Called by tokenize.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from finetune_trainer.data.chat import RenderedChat
from finetune_trainer.data.records import ASSISTANT, TOOLS, Message, Record, called_name

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which templates look for what was thought before an answer."""
END_OF_THOUGHT, START_OF_THOUGHT = "</think>", "<think>"
"""What thoughts within a content stand between."""


@dataclass(frozen=True)
class LeftOut:
    """A text of the record that is not in the rendered chat."""

    key: str
    text: str
    reason: str
    fix: str


def left_out(record: Record, chat: RenderedChat) -> Iterator[LeftOut]:
    """Every text. `chat.turns`: of all of the assistant's turns, in order, or none where they do not matter."""
    turns = iter(chat.turns)
    for number, message in enumerate(record.messages):
        place = f"messages[{number}]"
        if message["role"] == ASSISTANT:
            turn = next(turns, None)
            yield from _of_answer(place, message, chat.text if turn is None else "".join(chat.text[a:b] for a, b in turn))
            continue
        words = (message["content"] or "").strip()
        # What a tool gives back, some templates write as JSON.
        if words not in chat.text and json.dumps(words, ensure_ascii=False)[1:-1] not in chat.text:
            role = message["role"]
            reason = f"of a turn of the role {role!r} is left out or changed by the chat template"
            fix = f"set a spec.data.chatTemplate that writes turns of the role {role!r}, or write it into another turn"
            yield LeftOut(f"{place}.content", words, reason, fix)
    for tool in record.tools:
        name = called_name(tool)
        if name not in chat.text:
            reason = f"{name!r} is left out by the chat template, so the model is not told of it"
            yield LeftOut(TOOLS, name, reason, "set a spec.data.chatTemplate that writes tools, or remove them")
            return


def _of_answer(place: str, message: Message, said: str) -> Iterator[LeftOut]:
    """`said`: what is learnt of the turn."""
    thoughts = [(key, message[key]) for key in THOUGHTS if isinstance(message.get(key), str)]
    words = message["content"] or ""
    if words.strip() not in said and END_OF_THOUGHT in words:
        thought, _, words = words.rpartition(END_OF_THOUGHT)
        thoughts.append(("content", thought.rpartition(START_OF_THOUGHT)[2]))
    for key, thought in thoughts:
        if thought.strip() not in said:
            reason = "holds thoughts that the chat template leaves out, so they are not learnt"
            fix = "write a record for each answer whose thoughts are to be learnt, or set a spec.data.chatTemplate that keeps them"
            yield LeftOut(f"{place}.{key}", thought.strip(), reason, fix)
            break  # the same thoughts may stand under several keys
    if words.strip() not in said:
        reason = "is left out or changed by the chat template, so it is not learnt as it stands there"
        fix = "set a spec.data.chatTemplate that writes what the assistant says as it is, also where it calls tools"
        yield LeftOut(f"{place}.content", words.strip(), reason, fix)
