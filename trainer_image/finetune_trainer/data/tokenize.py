"""Records -> documents: token ids and which of them are supervised.

A prompt is tokenised exactly as a caller will send it later. The end-of-sequence token is appended and supervised, otherwise the
model would never learn to stop. A chat is exactly the text that its template writes; what the template drops of a record is
noted. Called by file_parts.py for records and by tokenizer.py for a plain chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune_job.api.inputs import LossOn
from finetune_trainer.data.chat import ChatTemplate, RenderedChat
from finetune_trainer.data.records import ASSISTANT, TOOLS, Message, Record, RecordProblem, called_name, shown
from finetune_trainer.data.render_chat import ChatError, Tokenizer, endless_template_error, template_source
from finetune_trainer.data.render_limit import RecordNote, RenderTimeoutError, render_limit
from finetune_trainer.data.suggestions import suggest_roles
from finetune_trainer.data.template_probe import chat_template

__all__ = ["EndlessTemplateError", "TokenizedDocument", "Tokenizer", "tokenize"]

WEIGHT = "weight"
"""Key of a turn that some programs read: 0 for a turn that is not to be learnt."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which templates look for the thoughts before an answer."""
END_OF_THOUGHT, START_OF_THOUGHT = "</think>", "<think>"
"""Delimiters of thoughts within a content."""


Encoding = Any
"""tokenizers.Encoding."""


@dataclass(frozen=True)
class TokenizedDocument:
    """`supervised[i]`: the loss counts the prediction of token i. Never true for the first token, which nothing precedes."""

    input_ids: list[int]
    supervised: list[bool]
    left_out: tuple[RecordProblem, ...] = ()
    """Content of the record that the chat template does not write. The record is still used."""


class EndlessTemplateError(Exception):
    """The chat template did not finish for a record, and most likely would not for the next one."""

    def __init__(self, problem: RecordProblem) -> None:
        super().__init__(problem.reason)
        self.problem = problem


def tokenize(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    loss_on: LossOn,
    written_template: str | None = None,
    note: RecordNote | None = None,
    *,
    stop_ids: tuple[int, ...] = (),
) -> list[TokenizedDocument | RecordProblem]:
    """Tokenise each record into a document of any length, in order. A chat that cannot become one gives a problem instead.

    The tokenizer must have an end-of-sequence token, and for chats be a fast one. written_template: spec.data.chatTemplate; None
    chooses the tokenizer's own. All records have one format. note: for a process that the template's time limit may end
    (render_limit.py). stop_ids: tokens at which generation with the model stops.

    Raises EndlessTemplateError.
    """
    if records and records[0].messages:
        return _chats(tokenizer, records, loss_on, written_template, note, stop_ids=stop_ids)
    return list(_texts(tokenizer, records, loss_on))


def _texts(tokenizer: Tokenizer, records: Sequence[Record], loss_on: LossOn) -> Iterable[TokenizedDocument]:
    end = tokenizer.eos_token_id
    (nothing,) = _ids(tokenizer, [""], special=True)
    # If the tokenizer appends an end token to every text, it would stand between prompt and completion.
    adds_end = bool(nothing) and nothing[-1] == end
    no_prompt = nothing[:-1] if adds_end else nothing
    asked = iter(_ids(tokenizer, [record.prompt for record in records if record.prompt], special=True))
    wholes = _ids(tokenizer, [record.prompt + record.completion for record in records], special=True)
    for record, whole in zip(records, wholes, strict=True):
        prompt = next(asked) if record.prompt else no_prompt
        prompt, whole = _begun_once(tokenizer, prompt), _begun_once(tokenizer, whole)
        if adds_end and record.prompt and prompt[-1] == end:
            prompt = prompt[:-1]
        if adds_end and whole[-1] == end:
            whole = whole[:-1]
        # If prompt and completion share a token, the joint ids do not begin with the ids that the model sees for the prompt; then
        # both are tokenised separately. Otherwise the joint form is the natural one, since it adds no space at the seam.
        ids = whole if whole[: len(prompt)] == prompt else prompt + _continued(tokenizer, record.completion)
        if not ids or ids[-1] != end:
            ids.append(end)
        first_supervised = max(len(prompt) if loss_on is LossOn.COMPLETION and record.prompt else 0, 1)
        yield TokenizedDocument(ids, [False] * first_supervised + [True] * (len(ids) - first_supervised))


def _begun_once(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Remove the begin token that the tokenizer put before the one in the record."""
    begin = tokenizer.bos_token_id
    return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids


def _continued(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text that continues another one. Some tokenizers put a space before each text, which is left out here."""
    before, both = _ids(tokenizer, ["\n", f"\n{text}"], special=False)
    if both[: len(before)] == before:
        return both[len(before) :]
    return _ids(tokenizer, [text], special=False)[0]


def _chats(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    loss_on: LossOn,
    written_template: str | None,
    note: RecordNote | None,
    *,
    stop_ids: tuple[int, ...],
) -> list[TokenizedDocument | RecordProblem]:
    made: list[TokenizedDocument | RecordProblem] = []
    rendered: list[tuple[int, RenderedChat, ChatTemplate, tuple[RecordProblem, ...]]] = []
    for number, record in enumerate(records):
        try:
            with render_limit(record.line, note):
                source = template_source(tokenizer, written_template, has_tools=bool(record.tools))
                template = chat_template(tokenizer, source, stop_ids)
                whole = _rendered(template, record, loss_on)
        except ChatError as error:
            made.append(_problem(record, error))
        except RenderTimeoutError as error:
            raise EndlessTemplateError(_problem(record, endless_template_error(str(error)))) from error
        else:
            chat = RenderedChat(whole.text, whole.turns[-1:]) if loss_on is LossOn.COMPLETION else whole
            rendered.append((number, chat, template, _left_out(record, whole)))
            made.append(TokenizedDocument([], []))
    encodings = _encodings(tokenizer, [chat.text for _, chat, _, _ in rendered]) if rendered else []
    for (number, chat, template, unwritten), encoding in zip(rendered, encodings, strict=True):
        try:
            made[number] = replace(_document(encoding, chat, template, loss_on), left_out=unwritten)
        except ChatError as error:
            made[number] = _problem(records[number], error)
    return made


def _rendered(template: ChatTemplate, record: Record, loss_on: LossOn) -> RenderedChat:
    """Render the chat with all turns of the assistant, or without turns if every token is supervised."""
    if loss_on is LossOn.ALL:
        return template.render_whole(record.messages, record.tools)
    if all(message["role"] != ASSISTANT for message in record.messages):
        roles = list(dict.fromkeys(str(message["role"]) for message in record.messages))
        suggestion = suggest_roles(roles)
        fix = (
            f"add the answer as a turn of the role {ASSISTANT!r}, or remove the record" if suggestion is None else suggestion.fix
        )
        reason = f"holds no turn of the assistant, so there is nothing to learn; its roles are {', '.join(map(repr, roles))}"
        raise ChatError("messages", reason, fix, {} if suggestion is None else suggestion.changes)
    last_role = record.messages[-1]["role"]
    if loss_on is LossOn.COMPLETION and last_role != ASSISTANT:
        fix = "end each chat with the assistant's answer, or set spec.data.lossOn: Assistant"
        raise ChatError("messages", f"ends with a turn of the role {last_role!r}, so there is no completion", fix)
    if loss_on is LossOn.ASSISTANT:
        for number, message in enumerate(record.messages):
            if message["role"] == ASSISTANT and message.get(WEIGHT) == 0:
                reason = "is 0, and every turn of the assistant is learnt"
                fix = "end the chat before this turn, or set spec.data.lossOn: Completion, which learns the last turn alone"
                raise ChatError(f"messages[{number}].{WEIGHT}", reason, fix)
    return template.render_turns(record.messages, record.tools)


def _left_out(record: Record, chat: RenderedChat) -> tuple[RecordProblem, ...]:
    return tuple(
        RecordProblem(record.line, dropped.key, shown(dropped.text), dropped.reason, dropped.fix, record.unit, record.file)
        for dropped in dropped_content(record, chat)
    )


def _document(encoding: Encoding, chat: RenderedChat, template: ChatTemplate, loss_on: LossOn) -> TokenizedDocument:
    ids = encoding.ids
    if loss_on is LossOn.ALL:
        return TokenizedDocument(ids, [False] + [True] * (len(ids) - 1))
    supervised = [False] * len(ids)
    for turn in chat.turns:
        stops = set()
        for start, stop in turn:
            tokens = _tokens(encoding, chat.text, start, stop)
            supervised[tokens.start : tokens.stop] = [True] * len(tokens)
            stops.update(ids[tokens.start : tokens.stop])
        if stops.isdisjoint({*template.stops.values(), *template.call_stops.values()}):
            _, end = turn[-1]
            raise ChatError(
                "messages",
                f"the tokenizer splits the token that ends the assistant's turn ({chat.text[max(end - 20, 0) : end]!r})",
                "use a template whose stop token is a special token of the tokenizer",
            )
    if supervised:
        supervised[0] = False
    return TokenizedDocument(ids, supervised)


def _tokens(encoding: Encoding, text: str, start: int, stop: int) -> range:
    """Numbers of the tokens that hold any of the characters [start, stop)."""
    first = next((token for at in range(start, stop) if (token := encoding.char_to_token(at)) is not None), None)
    if first is None:
        return range(0)
    last = next(token for at in range(stop - 1, start - 1, -1) if (token := encoding.char_to_token(at)) is not None)
    if not text[stop - 1].isascii():  # a character may be several tokens, of which only the first was found
        offsets = encoding.offsets
        while last + 1 < len(offsets) and offsets[last + 1][0] < stop:
            last += 1
    return range(first, last + 1)


def _problem(record: Record, error: ChatError) -> RecordProblem:
    value = "" if not record.messages else shown(repr(record.messages[-1].get("content")))
    return RecordProblem(record.line, error.key, value, error.reason, error.fix, record.unit, record.file, changes=error.changes)


def _ids(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    if not tokenizer.is_fast:
        return [list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]) for text in texts]
    return [encoding.ids for encoding in _backend(tokenizer).encode_batch_fast(list(texts), add_special_tokens=special)]


def _encodings(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    return list(_backend(tokenizer).encode_batch(list(texts), add_special_tokens=False))


def _backend(tokenizer: Tokenizer) -> Any:
    """The tokenizer under transformers' wrapper, which takes half of the time of short records."""
    backend = tokenizer.backend_tokenizer
    # tokenizer.json may ask for both; the wrapper also turns them off on each call.
    backend.no_truncation()
    backend.no_padding()
    return backend


@dataclass(frozen=True)
class DroppedContent:
    """A text of the record that is not in the rendered chat."""

    key: str
    text: str
    reason: str
    fix: str


def dropped_content(record: Record, chat: RenderedChat) -> Iterator[DroppedContent]:
    """Yield every text that the template drops.

    chat.turns: all turns of the assistant, in order, or none if they do not matter.
    """
    turns = iter(chat.turns)
    for number, message in enumerate(record.messages):
        place = f"messages[{number}]"
        if message["role"] == ASSISTANT:
            turn = next(turns, None)
            yield from _of_answer(place, message, chat.text if turn is None else "".join(chat.text[a:b] for a, b in turn))
            continue
        words = (message["content"] or "").strip()
        # Some templates write the result of a tool as JSON.
        if words not in chat.text and json.dumps(words, ensure_ascii=False)[1:-1] not in chat.text:
            role = message["role"]
            reason = f"of a turn of the role {role!r} is left out or changed by the chat template"
            fix = f"set a spec.data.chatTemplate that writes turns of the role {role!r}, or write it into another turn"
            yield DroppedContent(f"{place}.content", words, reason, fix)
    for tool in record.tools:
        name = called_name(tool)
        if name not in chat.text:
            reason = f"{name!r} is left out by the chat template, so the model is not told of it"
            yield DroppedContent(TOOLS, name, reason, "set a spec.data.chatTemplate that writes tools, or remove them")
            return


def _of_answer(place: str, message: Message, said: str) -> Iterator[DroppedContent]:
    """said: the part of the turn that is learnt."""
    thoughts = [(key, message[key]) for key in THOUGHTS if isinstance(message.get(key), str)]
    words = message["content"] or ""
    if words.strip() not in said and END_OF_THOUGHT in words:
        thought, _, words = words.rpartition(END_OF_THOUGHT)
        thoughts.append(("content", thought.rpartition(START_OF_THOUGHT)[2]))
    for key, thought in thoughts:
        if thought.strip() not in said:
            reason = "holds thoughts that the chat template leaves out, so they are not learnt"
            fix = (
                "write a record for each answer whose thoughts are to be learnt, or set a spec.data.chatTemplate that keeps them"
            )
            yield DroppedContent(f"{place}.{key}", thought.strip(), reason, fix)
            break  # several keys may hold the same thoughts
    if words.strip() not in said:
        reason = "is left out or changed by the chat template, so it is not learnt as it is written there"
        fix = "set a spec.data.chatTemplate that writes what the assistant says as it is, also where it calls tools"
        yield DroppedContent(f"{place}.content", words.strip(), reason, fix)
