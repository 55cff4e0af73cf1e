"""What a chat template writes around the turns: can a model tell who speaks, and is it the assistant's words that are learnt?

Judged by what it makes of a plain chat, whose words are known. Called by tokenizer.py for a template that renders it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from finetune_trainer.data.chat import PROBE, ChatError, ChatTemplate, Tokenizer
from finetune_trainer.data.left_out import THOUGHTS

MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>")
"""What is written like a special token."""
QUESTIONS, ANSWERS = ([turn["content"] for turn in PROBE[first::2]] for first in (0, 1))


@dataclass(frozen=True)
class MarkerProblem:
    """Something wrong with what stands around the turns."""

    rule: str
    message: str
    fix: str


def check_markers(template: ChatTemplate, tokenizer: Tokenizer, *, learns_turns: bool) -> Iterator[MarkerProblem]:
    """Every problem. `learns_turns`: only what the assistant says is learnt, so that its spans count."""
    text = template.render(PROBE)
    if learns_turns:
        yield from _wrong_spans(template)
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    split = [marker for marker in dict.fromkeys(MARKER.findall(text)) if marker not in known]
    if split:
        pieces = tokenizer(split[0], add_special_tokens=False)["input_ids"]
        if len(pieces) > 1:
            yield MarkerProblem(
                "chat-marker-split",
                f"the template writes {split[0]!r}, which is no token of the tokenizer but {len(pieces)} pieces of plain text",
                "add it to the tokenizer and train its row, or write a spec.data.chatTemplate with tokens that exist",
            )
    if not template.asks and template.headers:
        yield MarkerProblem(
            "chat-answer-not-asked-for",
            f"the template does not heed add_generation_prompt, so the model has to learn to write {template.headers[0]!r} itself "
            "before each answer",
            f"write {{% if add_generation_prompt %}}{template.headers[0]}{{% endif %}} at the end of the template",
        )
    yield from _asked_otherwise(template)
    gaps = [
        text.partition(first)[2].partition(second)[0] for first, second in ((QUESTIONS[0], ANSWERS[0]), (ANSWERS[0], QUESTIONS[1]))
    ]
    if gaps[0] == gaps[1]:
        yield MarkerProblem(
            "chat-roles-unmarked",
            f"the template writes {gaps[0]!r} both before answers and before questions, so a model cannot tell who speaks",
            "write the role of each turn in the template",
        )


def _asked_otherwise(template: ChatTemplate) -> Iterator[MarkerProblem]:
    """A template may begin a thought where it asks for an answer, and drop the thoughts of every answer that it is given."""
    if not template.asks or not template.headers or any(template.headers[0] in text for text in _answered(template)):
        return
    yield MarkerProblem(
        "chat-asks-otherwise",
        f"the template asks for an answer with {template.headers[0]!r} and never writes that before an answer that it is given, "
        "so what is learnt is not what a server asks for, and thoughts are dropped",
        "set a spec.data.chatTemplate that writes before each answer what it asks for one with, and keeps the thoughts",
    )


def _answered(template: ChatTemplate) -> Iterator[str]:
    """A question and its answer: without thoughts, and with thoughts in each of the places where templates look for them."""
    question, answer = PROBE[:2]
    for changes in ({}, {"content": f"<think>\nthought\n</think>\n\n{answer['content']}"}, dict.fromkeys(THOUGHTS, "thought")):
        try:
            yield template.render([question, {**answer, **changes}])
        except ChatError:
            continue


def _wrong_spans(template: ChatTemplate) -> Iterator[MarkerProblem]:
    try:
        chat = template.render_turns(PROBE)
    except ChatError as error:
        yield MarkerProblem("chat-template-unusable", error.reason, error.fix)
        return
    said = ["".join(chat.text[start:stop] for start, stop in turn) for turn in chat.turns]
    fix = "put {% generation %} before what the assistant says and {% endgeneration %} behind the token that ends its turn"
    if any(answer not in turn for answer, turn in zip(ANSWERS, said, strict=True)):
        reason = "the template's generation blocks leave out what the assistant says, so it would not be learnt"
        yield MarkerProblem("chat-generation-misplaced", reason, fix)
    elif any(question in turn for question in QUESTIONS for turn in said):
        reason = "the template's generation blocks hold what the user says, so the model would learn to ask"
        yield MarkerProblem("chat-generation-misplaced", reason, fix)
