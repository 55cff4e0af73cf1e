"""Renders a chat with the model's template, and finds the spans of the rendered text that the assistant writes.

A span begins after the header of the assistant's turn (the text that the template adds to ask for an answer) and ends after the
token that ends the turn. If the template marks what the assistant generates, the marked parts are the spans. Otherwise the chat
is rendered a second time with marks around each content (sentinels.py), since templates drop, trim and rewrite contents. If a
span is uncertain, the record is rejected: training on wrong tokens is worse than stopping. render_chat.py renders the text;
template_probe.py finds out what a template puts around turns. Called by tokenize.py for records, and by tokenizer.py to check the
template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from finetune_trainer.data.other_keys import WEIGHT
from finetune_trainer.data.records import ASSISTANT, Message, called_name
from finetune_trainer.data.render_chat import ChatError, Span, render_chat
from finetune_trainer.data.sentinels import SentinelPositions, read_sentinels, with_sentinels

_WORD = re.compile(r"\w+")
Turn = tuple[Span, ...]
"""Spans of what the assistant says in one turn, including the token that ends it; several only if the template marks several."""

OWN_TEMPLATE = (
    "write a spec.data.chatTemplate that surrounds what the assistant says with {% generation %} and {% endgeneration %}"
)


@dataclass(frozen=True)
class RenderedChat:
    """The text of a chat as the model sees it, and the spans of the assistant's turns."""

    text: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template, and the texts that a probe showed it to write around turns. Created by `template_probe.chat_template`."""

    source: str
    variables: Mapping[str, Any]
    """Variables of the template: name -> special token or argument."""
    tracks_generation: bool
    asking: str
    """The text that follows a question's words in a prompt: the end of the user's turn, then the generation prompt."""
    asks: bool
    """Whether the template writes a generation prompt."""
    headers: tuple[str, ...]
    """Texts that open a turn of the assistant, the generation prompt first. Empty if the template writes no such text."""
    stops: Mapping[str, int]
    """Text that ends an assistant's turn -> id of its last token. It has two entries if a chat's last turn ends differently."""
    call_stops: Mapping[str, int]
    """Other tokens at which generation stops -> their ids. A turn that calls tools may end with one of them."""

    def mentions(self, name: str) -> bool:
        """Whether the template may read a variable or a key of this name."""
        if _WORD.fullmatch(name):
            return name in self._words
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(_WORD.findall(self.source))

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of a chat. Raises ChatError if the template raises an error."""
        return render_chat(self.source, self.variables, messages, tools)[0]

    def render_whole(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> RenderedChat:
        """Render a chat without looking for turns. Raises ChatError, also if the text lacks a tool call."""
        text = self.render(messages, tools)
        calling = [number for number, message in enumerate(messages) if message.get("tool_calls")]
        if calling:
            # A tool's name may also be in the text for another reason, for example in the tool's description.
            with_marks, first = with_sentinels(messages, text, frozenset(), calls=True)
            marks = read_sentinels(self.render(with_marks, tools), first, len(messages))
            for number in calling:
                check_calls(number, messages[number], text if marks.called[number] else "")
        return RenderedChat(text, ())

    def render_turns(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> RenderedChat:
        """Render a chat and find every turn of the assistant. Raises ChatError."""
        numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        turns: tuple[Turn, ...]
        if self.tracks_generation:
            text, pieces = render_chat(self.source, self.variables, messages, tools, track=True)
            turns = self._tracked(pieces, text, len(numbers), self._stops_of(*(messages[number] for number in numbers)))
        else:
            text = self.render(messages, tools)
            marks = self._marks(messages, tools, text)
            spans: list[Span] = []
            for number in numbers:
                spans.append(self._turn(text, marks, messages, tools, number=number, earliest=spans[-1][1] if spans else 0))
            turns = tuple((span,) for span in spans)
        for number, turn in zip(numbers, turns, strict=True):
            learnt = "".join(text[start:stop] for start, stop in turn)
            if messages[number].get(WEIGHT) == 0:  # this turn is not learnt
                continue
            check_calls(number, messages[number], learnt)
            self._check_not_silent(number, messages[number], learnt, text)
        return RenderedChat(text, turns)

    def _check_not_silent(self, number: int, message: Message, learnt: str, text: str) -> None:
        """Raise ChatError if the model would learn to say nothing, or "None". learnt: the supervised text of the turn."""
        key, words = f"messages[{number}]", (message["content"] or "").strip()
        for token in (*self.stops, *self.call_stops):
            learnt = learnt.replace(token, "")
        if message["content"] is None and learnt.lstrip().startswith(("None", "null")):
            reason = f"is null, and the template writes {learnt.strip()[:4]!r} for it"
            raise ChatError(
                f"{key}.content", reason, 'write "" as the content, or set a spec.data.chatTemplate that asks for content'
            )
        # If the turn's words occur elsewhere in the text, generation blocks are misplaced; tokenizer.py reports that.
        if not learnt.strip() and not (words and words in text):
            reason = (
                "the template writes nothing of what this turn of the assistant says, so the model would learn to say nothing"
            )
            raise ChatError(key, reason, "remove the record, or set a spec.data.chatTemplate that writes it")

    def _stops_of(self, *messages: Message) -> Mapping[str, int]:
        """Tokens that may end the turns of these messages."""
        return {**self.stops, **self.call_stops} if any(message.get("tool_calls") for message in messages) else self.stops

    def _tracked(self, spans: Sequence[Span], text: str, num_turns: int, stops: Mapping[str, int]) -> tuple[Turn, ...]:
        """Group the template's marked spans by turn.

        A turn ends with a stop token. A span that directly follows the turn and holds no stop token (such as an end-of-text token
        after the last turn) belongs to the same turn.
        """

        def has_stop(spans: Sequence[Span]) -> bool:
            return any(token in text[start:stop] for start, stop in spans for token in stops)

        turns: list[list[Span]] = []
        for span in spans:
            if turns and (not has_stop(turns[-1]) or (turns[-1][-1][1] == span[0] and not has_stop([span]))):
                turns[-1].append(span)
            else:
                turns.append([span])
        num_ended = sum(map(has_stop, turns))
        if num_ended != num_turns or num_ended != len(turns):
            raise ChatError(
                "messages",
                f"the template's generation blocks hold the token that ends a turn ({' or '.join(map(repr, stops))}) in "
                f"{num_ended} of {num_turns} turns of the assistant, so the model would not learn to stop",
                "put {% generation %} directly after the header of the assistant's turn and {% endgeneration %} after the "
                "token that ends it",
            )
        return tuple(map(tuple, turns))

    def _marks(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], text: str) -> SentinelPositions:
        # A template may check how a question begins or ends, or the names of called tools, so marks there change its output. In
        # that case fewer marks are tried, finally only those around the answers.
        calls = any(message.get("tool_calls") for message in messages)
        ways = [(None, True)] if calls else []
        for roles, with_calls in [*ways, (None, False), (frozenset({ASSISTANT}), False)]:
            with_marks, first = with_sentinels(messages, text, roles, calls=with_calls)
            marks = read_sentinels(self.render(with_marks, tools), first, len(messages))
            if marks.text == text:
                return marks
        raise ChatError(
            "messages", "the template rewrites what the assistant says, so it cannot be found in the text", OWN_TEMPLATE
        )

    def _turn(
        self,
        text: str,
        marks: SentinelPositions,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        number: int,
        earliest: int,
    ) -> Span:
        opened, closed = marks.opened[number], marks.closed[number]
        key = f"messages[{number}]"
        message = messages[number]
        has_words, calls = bool((message["content"] or "").strip()), message.get("tool_calls") or ()
        if len(closed) > 1 or (has_words and not closed and not calls):
            shown = f"{len(closed)} times" if closed else "not at all"
            raise ChatError(key, f"the template writes the assistant's message {shown} and not exactly once", OWN_TEMPLATE)
        if closed:
            content_end = closed[0]
            before, asker = marks.last_closed(content_end)
            after = marks.first_opened(content_end)
        else:  # the turn only calls tools
            content_end = -1
            before, asker = (max(marks.closed[number - 1], default=0), number - 1) if number else (0, -1)
            after = min((at for places in marks.opened[number + 1 :] for at in places), default=len(text))
        content_start = opened[0] if len(opened) == 1 else -1
        limit = content_start if content_start >= 0 else content_end if content_end >= 0 else after
        start = -1
        if asker >= 0 and before >= earliest:
            start = self._after_question(text, before, messages[asker]["content"] or "", limit)
        if start < 0:
            start = self._after_header(text, max(before, earliest), limit, _is_clear(messages, marks, number, before))
        if start < 0:
            start = self._after_prompt(text, messages[:number], tools, max(before, earliest), limit)
        if start < 0:
            start = content_start
        if start < 0:
            raise ChatError(key, "it is not certain where in the rendered text this turn of the assistant begins", OWN_TEMPLATE)
        # A template may write the names of called tools again after the turn, with the results.
        called = marks.called[number][len(calls) - 1] if 0 < len(calls) <= len(marks.called[number]) else -1
        last = max(content_end, called)
        return start, self._end(text, max(start, last), after, key, message, follows_words=last >= 0)

    def _after_question(self, text: str, end: int, question: str, limit: int) -> int:
        """Position after the text `asking` that follows the question's words, which end at `end`; -1 if that text is missing.

        The text before this position is exactly the prompt that a client will send to a server.
        """
        blank = question[len(question.rstrip()) :]
        # The template may keep the white space at the end of the question.
        for at in (end + len(blank), end):
            start = at + len(self.asking)
            if text.startswith(self.asking, at) and text[end:at] in ("", blank) and start <= limit:
                return start
        return -1

    def _after_header(self, text: str, earliest: int, limit: int, is_clear: bool) -> int:
        """Position after the header between `earliest` and `limit`; -1 if none is found, or if several are and not `is_clear`.

        is_clear: the whole range belongs to this turn, so the first header opens the turn and others are part of it.
        """
        places = [(at, order) for order, header in enumerate(self.headers) if (at := text.find(header, earliest, limit)) >= 0]
        if not is_clear:
            unique = [order for _, order in places if text.count(self.headers[order], earliest, limit) == 1]
            places = [(at, order) for at, order in places if order in unique[:1]]
        if not places:
            return -1
        at, order = min(places)
        return at + len(self.headers[order])

    def _after_prompt(
        self, text: str, asked: Sequence[Message], tools: Sequence[Mapping[str, Any]], earliest: int, limit: int
    ) -> int:
        """Position after the prompt made from the messages before this turn; -1 if this is not how the text begins.

        Some templates write nothing between the result of a tool and the assistant's reply to it.
        """
        if not asked:
            return -1
        try:
            prompt = render_chat(self.source, self.variables, asked, tools, prompt=True)[0]
        except ChatError:
            return -1
        return len(prompt) if text.startswith(prompt) and earliest <= len(prompt) <= limit else -1

    def _end(self, text: str, start: int, after: int, key: str, message: Message, *, follows_words: bool) -> int:
        """Position after the stop token between `start`, where the turn's words end, and `after`, where the next words begin.

        follows_words: whether words or a call end at `start`; if so, the next stop token ends the turn unless it is quoted.
        """
        stops = self._stops_of(message)
        places = [(at, token) for token in stops for at in [text.find(token, start, after)] if at >= 0]
        if not places:
            shown = " or ".join(map(repr, stops))
            raise ChatError(
                key,
                f"the template does not end this turn of the assistant with {shown}, so the model would not learn to stop",
                "write a spec.data.chatTemplate that ends every turn of the assistant with the same special token",
            )
        at, token = min(places, key=lambda place: (place[0], -len(place[1])))
        may_be_quoted = not follows_words or token in str({**message, "content": None})
        if may_be_quoted and text[start:at].strip() and text.count(token, start, after) > 1:
            raise ChatError(key, "it is not certain where in the rendered text this turn of the assistant ends", OWN_TEMPLATE)
        return at + len(token)


def check_calls(number: int, message: Message, learnt: str) -> None:
    """Raise ChatError if `learnt` lacks a tool call of the message, or contains one in a form that no server parses.

    number: index of the message in its chat.
    """
    key = f"messages[{number}].tool_calls"
    calls = message.get("tool_calls") or ()
    names = [called_name(call) for call in calls]
    for name, call in zip(names, calls, strict=True):
        if name and learnt.count(name) < names.count(name):
            reason = f"the template leaves out the call of {name!r}, so it would not be learnt"
            null = "set the content to null (some templates write calls only then), or " if message["content"] == "" else ""
            fix = (
                "write the call into the content as the model is to say it, "
                "or set a spec.data.chatTemplate that writes tool_calls"
            )
            raise ChatError(key, reason, null + fix)
        function = call.get("function")
        arguments = (function if isinstance(function, Mapping) else call).get("arguments")
        try:
            is_text_of_object = isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            is_text_of_object = False
        # A template may encode such JSON text again as a JSON string (transformers' filter keeps non-ASCII characters, Jinja's
        # escapes them), or put it into braces of its own.
        forms = (
            (json.dumps(arguments, ensure_ascii=False), json.dumps(arguments), f"{{{arguments}}}") if is_text_of_object else ()
        )
        if any(form in learnt for form in forms):
            reason = f"the arguments of {name!r} are a string, which the template puts in quotes or braces of its own"
            raise ChatError(key, reason, 'write the arguments as an object ({"name": "value"}) and not as a string')


def _is_clear(messages: Sequence[Message], marks: SentinelPositions, number: int, before: int) -> bool:
    """Whether all text after `before`, or after the assistant's previous turn, belongs to this turn."""
    earlier = reversed(range(number))
    last = next((at for at in earlier if messages[at]["role"] == ASSISTANT or (messages[at]["content"] or "").strip()), None)
    return last is not None and (messages[last]["role"] == ASSISTANT or before in marks.closed[last])
