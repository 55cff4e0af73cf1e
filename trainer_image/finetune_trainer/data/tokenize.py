"""Turns records into documents: token ids, and which of them are supervised.

A prompt is tokenised exactly as a client will later send it to a server. The end-of-sequence token is appended and supervised;
otherwise the model would never learn to stop. A chat is exactly the text that its template writes; content that the template
drops is noted. Called by file_parts.py for records and by tokenizer.py for a plain chat.
"""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from finetune_job.api.inputs import LossOn
from finetune_trainer.data.chat import ChatTemplate, RenderedChat
from finetune_trainer.data.left_out import left_out_by
from finetune_trainer.data.other_keys import IGNORED_FIELD, WEIGHT
from finetune_trainer.data.records import ASSISTANT, Record, RecordProblem, shown, with_arguments
from finetune_trainer.data.render_chat import ChatError, Tokenizer, endless_template_error, template_source
from finetune_trainer.data.render_limit import RecordNote, RenderTimeoutError, render_limit
from finetune_trainer.data.suggestions import suggest_roles
from finetune_trainer.data.template_probe import arguments_key, chat_template

__all__ = ["EndlessTemplateError", "TokenizedDocument", "Tokenizer", "tokenize", "with_something_learnt"]

Encoding = Any
"""tokenizers.Encoding, which is not imported here."""
BEFORE_PIECES = ("\n", ".", "")
"""Prefixes for tokenising a text that continues another one. A prefix's tokens are removed afterwards, with any space that the
tokenizer puts before each text. If a prefix and the beginning of the text become one token, the next prefix is used.
"""


_BLANKS = re.compile(r"\s\s")
"""Two white space characters in a row."""


@dataclass(frozen=True)
class TokenizedDocument:
    """A tokenised record. `supervised[i]`: whether the loss counts the prediction of token i; False for the first token."""

    input_ids: list[int]
    supervised: list[bool]
    left_out: tuple[RecordProblem, ...] = ()
    """Content of the record that the chat template does not write. The record is still used."""


class EndlessTemplateError(Exception):
    """The chat template did not finish for a record, and most likely would not finish for the next."""

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
    template_arguments: Mapping[str, Any] | None = None,
) -> list[TokenizedDocument | RecordProblem]:
    """Turn each record into a document of any length, in order. A chat that cannot become a document becomes a problem.

    All records have the same format. The tokenizer must have an end-of-sequence token, and must be a fast tokenizer for chats.
    written_template: spec.data.chatTemplate; None: the tokenizer's own. note: given if the template's time limit may end this
    process (render_limit.py). stop_ids: tokens at which generation with the model stops. template_arguments: the job's arguments
    of the template, which a record's own override.

    Raises EndlessTemplateError.
    """
    if records and records[0].messages:
        arguments = template_arguments or {}
        return _chats(tokenizer, records, loss_on, written_template, note, stop_ids=stop_ids, arguments=arguments)
    return list(_texts(tokenizer, records, loss_on))


def with_something_learnt(record: Record, document: TokenizedDocument | RecordProblem) -> TokenizedDocument | RecordProblem:
    """The document, or a problem if none of its tokens is learnt."""
    if isinstance(document, RecordProblem) or any(document.supervised):
        return document
    text = record.completion or (str(record.messages[-1].get("content")) if record.messages else "")
    reason = "gives no token that is learnt, so it would only cost time"
    fix = "remove the record, or fill it in"
    return RecordProblem(record.line, "", shown(text), reason, fix, record.unit, record.file)


def _texts(tokenizer: Tokenizer, records: Sequence[Record], loss_on: LossOn) -> Iterable[TokenizedDocument]:
    end = tokenizer.eos_token_id
    (nothing,) = _ids(tokenizer, [""], special=True)
    # If the tokenizer appends an end-of-sequence token to every text, the one between prompt and completion must be removed.
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
        ids = whole
        if whole[: len(prompt)] != prompt:
            # A token spans prompt and completion, so they are tokenised separately.
            ids = prompt + _ids_inside(tokenizer, record.completion)
        if not ids or ids[-1] != end:
            ids.append(end)
        first_supervised = max(len(prompt) if loss_on is LossOn.COMPLETION and record.prompt else 0, 1)
        yield TokenizedDocument(ids, [False] * first_supervised + [True] * (len(ids) - first_supervised))


def _ids_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise `text` as the continuation of an earlier text, without anything that the tokenizer adds at the start."""
    encoded = (_ids(tokenizer, [mark, mark + text], special=False) for mark in BEFORE_PIECES)
    return next(both[len(before) :] for before, both in encoded if both[: len(before)] == before)


def _begun_once(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Remove the beginning-of-sequence token that the tokenizer added, if the record itself begins with one."""
    begin = tokenizer.bos_token_id
    return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids


def _chats(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    loss_on: LossOn,
    written_template: str | None,
    note: RecordNote | None,
    *,
    stop_ids: tuple[int, ...],
    arguments: Mapping[str, Any],
) -> list[TokenizedDocument | RecordProblem]:
    made: list[TokenizedDocument | RecordProblem] = []
    rendered: list[tuple[int, RenderedChat, ChatTemplate, tuple[RecordProblem, ...]]] = []
    for number, record in enumerate(records):
        try:
            with render_limit(record.line, note):
                source = template_source(tokenizer, written_template, has_tools=bool(record.tools))
                own = {**arguments, **record.template_arguments}
                template = chat_template(tokenizer, source, stop_ids, arguments_key(own))
                record, whole = _rendered_in_some_form(template, record, loss_on)
        except ChatError as error:
            made.append(_problem(record, error))
        except RenderTimeoutError as error:
            problem = _problem(record, endless_template_error(str(error)))
            raise EndlessTemplateError(replace(problem, is_of_source=True)) from error
        else:
            unwritten = left_out_by(template, record, whole)
            rendered.append((number, _learnt(whole, record, loss_on), template, unwritten))
            made.append(TokenizedDocument([], []))
    texts = [chat.text for _, chat, _, _ in rendered]
    encodings = _backend(tokenizer).encode_batch(texts, add_special_tokens=False) if texts else []
    for (number, chat, template, unwritten), encoding in zip(rendered, encodings, strict=True):
        pieces = _cut_at_turns(_backend(tokenizer), encoding, chat)
        try:
            made[number] = replace(_document(pieces, chat, template, loss_on), left_out=unwritten)
        except ChatError as error:
            made[number] = _problem(records[number], error)
    return made


def _rendered_in_some_form(template: ChatTemplate, record: Record, loss_on: LossOn) -> tuple[Record, RenderedChat]:
    """Render the chat. If that fails, convert the arguments of its tool calls from JSON strings to objects, or vice versa.

    Records use either form (OpenAI's are strings), but a template may accept only one. Servers also convert them.
    """
    try:
        return record, _rendered(template, record, loss_on)
    except ChatError:
        for convert in (_as_object, _as_text):
            other = replace(record, messages=tuple(with_arguments(message, convert) for message in record.messages))
            if other.messages != record.messages:
                with suppress(ChatError):
                    return other, _rendered(template, other, loss_on)
        raise


def _as_object(_name: str, arguments: Any) -> Any:
    """The object that a string of arguments holds as JSON; arguments of another form stay as they are."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(_name: str, arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def _rendered(template: ChatTemplate, record: Record, loss_on: LossOn) -> RenderedChat:
    """Render the chat and find all turns of the assistant, or no turns if every token is supervised."""
    if loss_on is LossOn.ALL:
        unlearnt = next((number for number, message in enumerate(record.messages) if message.get(WEIGHT) == 0), None)
        if unlearnt is not None:
            reason = "says that this turn is not learnt, but spec.data.lossOn: All learns every token"
            fix = f"set spec.data.lossOn: Assistant, or name the key in {IGNORED_FIELD}"
            raise ChatError(f"messages[{unlearnt}].{WEIGHT}", reason, fix)
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
    if loss_on is LossOn.COMPLETION and record.messages[-1].get(WEIGHT) == 0:
        reason = "says that this turn is not learnt, but spec.data.lossOn: Completion learns nothing else"
        fix = "remove the record, or set spec.data.lossOn: Assistant"
        raise ChatError(f"messages[{len(record.messages) - 1}].{WEIGHT}", reason, fix)
    return template.render_turns(record.messages, record.tools)


def _learnt(chat: RenderedChat, record: Record, loss_on: LossOn) -> RenderedChat:
    """The chat with only the turns that are learnt."""
    if loss_on is LossOn.ALL:
        return chat
    if loss_on is LossOn.COMPLETION:
        return RenderedChat(chat.text, chat.turns[-1:])
    answers = (message for message in record.messages if message["role"] == ASSISTANT)
    learnt = (turn for turn, message in zip(chat.turns, answers, strict=True) if message.get(WEIGHT) != 0)
    return RenderedChat(chat.text, tuple(learnt))


class _Pieces:
    """The tokens of a text that was tokenised in pieces, with their offsets in the whole text. It is used like an Encoding."""

    def __init__(self, pieces: Sequence[tuple[int, Encoding, int]]) -> None:
        """pieces: for each piece, its place in the text, its encoding, and how many of its first tokens are left out."""
        self.ids = [token for _, encoding, skipped in pieces for token in encoding.ids[skipped:]]
        self.offsets = [
            (place + start, place + stop) for place, encoding, skipped in pieces for start, stop in encoding.offsets[skipped:]
        ]
        self._stops = [stop for _, stop in self.offsets]

    def char_to_token(self, at: int) -> int | None:
        """Return the index of the first token that holds the character at `at`."""
        token = bisect_right(self._stops, at)
        return token if token < len(self.offsets) and self.offsets[token][0] <= at else None


def _cut_at_turns(backend: Any, encoding: Encoding, chat: RenderedChat) -> Encoding:
    """Tokenise the text again in pieces if a learnt span begins inside a token, or after a run of white space.

    A server tokenises the text before the answer separately, so the answer always begins with a new token.
    """
    starts = sorted(start for turn in chat.turns for start, _ in turn)
    # Tokenizers like GPT-2's split a run of white space before a word, but not at the end of a text.
    cuts = [start for start in starts if _is_inside_token(encoding, start) or _BLANKS.match(chat.text, max(start - 2, 0))]
    if not cuts:
        return encoding
    pieces = []
    for start, stop in itertools.pairwise([0, *cuts, len(chat.text)]):
        piece = chat.text[start:stop]
        marks = BEFORE_PIECES if start > 0 else ("",)
        encoded = ((mark, *backend.encode_batch([mark, mark + piece], add_special_tokens=False)) for mark in marks)
        pieces.append(
            next(
                (start - len(mark), both, len(before.ids))
                for mark, before, both in encoded
                if both.ids[: len(before.ids)] == before.ids
            )
        )
    return _Pieces(pieces)


def _is_inside_token(encoding: Encoding, at: int) -> bool:
    """Whether the token that holds the character `at` may begin before it."""
    token = encoding.char_to_token(at)
    if token is not None and encoding.token_to_chars(token)[0] < at:
        return True
    # Some tokenizers leave white space out of the offsets of the token that holds it.
    return at > 0 and encoding.char_to_token(at - 1) is None


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
    """Range of the tokens that contain any of the characters [start, stop)."""
    first = next((token for at in range(start, stop) if (token := encoding.char_to_token(at)) is not None), None)
    if first is None:
        return range(0)
    last = next(token for at in range(stop - 1, start - 1, -1) if (token := encoding.char_to_token(at)) is not None)
    if not text[stop - 1].isascii():  # a character may consist of several tokens, of which only the first was found
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


def _backend(tokenizer: Tokenizer) -> Any:
    """The tokenizer inside transformers' wrapper. For short records, the wrapper would take half of the time."""
    backend = tokenizer.backend_tokenizer
    # tokenizer.json may enable truncation and padding. The wrapper also turns them off on each call.
    backend.no_truncation()
    backend.no_padding()
    return backend
