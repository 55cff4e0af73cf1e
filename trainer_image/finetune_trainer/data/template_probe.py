"""Finds out what text a chat template writes around turns, by rendering a plain chat whose words are known.

Such text opens a turn of the assistant, asks for an answer, or ends a turn with a stop token. chat.py uses it to find the turns
of records. Called by tokenize.py before rendering records, by tokenizer.py to check the template, by preflight's token_rows.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from finetune_trainer.data.chat import ChatTemplate
from finetune_trainer.data.records import ASSISTANT, Message
from finetune_trainer.data.render_chat import ChatError, Tokenizer, render_chat
from finetune_trainer.data.sentinels import SentinelPositions, read_sentinels, with_sentinels

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""Start of the block in which a template marks what the assistant generates. Only transformers' renderer knows such blocks."""
PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "first question"},
    {"role": ASSISTANT, "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": ASSISTANT, "content": "second answer"},
)
"""A plain chat that any chat template can render."""


def arguments_key(arguments: Mapping[str, Any]) -> str:
    """Encode a template's arguments for `chat_template`, as a string that can be part of its cache key."""
    return json.dumps(arguments, sort_keys=True) if arguments else ""


@lru_cache(maxsize=64)
def chat_template(tokenizer: Tokenizer, source: str, stop_ids: tuple[int, ...] = (), arguments: str = "") -> ChatTemplate:
    """Probe the template `source` with a plain chat. Raises ChatError with an empty key if training cannot use the template.

    stop_ids: tokens at which generation with the model stops. arguments: further variables of the template, from `arguments_key`.
    """
    if not tokenizer.is_fast:
        fix = "put the tokenizer.json of the model next to its config.json"
        raise ChatError("", "the tokenizer is a slow one, which does not report the characters of a token", fix)
    variables = {**(json.loads(arguments) if arguments else {}), **tokenizer.special_tokens_map}

    def rendered(messages: Sequence[Message], *, prompt: bool = False) -> SentinelPositions:
        with_marks, first = with_sentinels(messages, "", None)
        return read_sentinels(render_chat(source, variables, with_marks, (), prompt=prompt)[0], first, len(messages))

    try:
        whole, question_only, with_prompt = rendered(PROBE), rendered(PROBE[:1]), rendered(PROBE[:1], prompt=True)
    except ChatError as error:
        raise ChatError("", error.reason, error.fix) from error
    places = [*whole.opened, *whole.closed, question_only.closed[0], with_prompt.closed[0]]
    if any(len(place) != 1 for place in places):
        raise ChatError("", "the template does not write each turn of a plain chat once", "write a spec.data.chatTemplate")
    tails = whole.text[whole.closed[1][0] : whole.opened[2][0]], whole.text[whole.closed[3][0] :]
    first_stop, last_stop = (_stop_text(tokenizer, tail, stop_ids) for tail in tails)
    if first_stop is None or last_stop is None:
        tail = tails[0] if first_stop is None else tails[1]
        raise ChatError(
            "",
            f"the template writes {tail[:40]!r} after what the assistant says, which does not begin with a special token of the "
            "tokenizer, so the model could not learn to stop",
            f"write a spec.data.chatTemplate that ends each turn of the assistant with {tokenizer.eos_token!r}",
        )
    stops = dict((first_stop, last_stop))
    added = {
        number: tokenizer.added_tokens_decoder[number].content for number in stop_ids if number in tokenizer.added_tokens_decoder
    }
    asked_text, prompted_text = question_only.text[question_only.closed[0][0] :], with_prompt.text[with_prompt.closed[0][0] :]
    gaps = [whole.text[whole.closed[number][0] : whole.opened[number + 1][0]] for number in (2, 0)]
    return ChatTemplate(
        source=source,
        variables=variables,
        tracks_generation=bool(GENERATION.search(source)),
        asking=prompted_text,
        asks=prompted_text != asked_text,
        headers=_headers(tokenizer, asked_text, prompted_text, gaps),
        stops=stops,
        call_stops={token: number for number, token in added.items() if token.strip() and number not in stops.values()},
    )


def _headers(tokenizer: Tokenizer, asked: str, prompted: str, gaps: Sequence[str]) -> tuple[str, ...]:
    """The texts that open a turn of the assistant: `prompted` and `gaps` without the prefix `asked`, the end of the user's turn.

    The texts are compared by token: "<|endoftext|>" and "<|assistant|>" have their first characters in common, but no token.
    """
    encoded = [tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in (asked, prompted)]
    pairs = zip(encoded[0]["input_ids"], encoded[1]["input_ids"], strict=False)
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    offsets = encoded[1]["offset_mapping"]
    length = offsets[num_shared][0] if num_shared < len(offsets) else len(prompted)
    headers = [text[length:] for text in (prompted, *gaps) if text[:length] == prompted[:length]]
    return tuple(dict.fromkeys(header for header in headers if header.strip()))


def _stop_text(tokenizer: Tokenizer, tail: str, stop_ids: tuple[int, ...]) -> tuple[str, int] | None:
    """The text of the special tokens at the start of `tail` that end a turn, and the id of the last one; None if there are none.

    This is a single token, unless generation does not stop at the first one but at a special token that directly follows.
    """
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    text, first = "", None
    rest = tail.lstrip()
    while token := max((content for content in added if rest.startswith(content)), key=len, default=""):
        text, rest = text + token, rest.removeprefix(token)
        first = first or (text, added[token])
        if added[token] in stop_ids:
            return text, added[token]
    return first
