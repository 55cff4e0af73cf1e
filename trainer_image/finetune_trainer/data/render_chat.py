"""Renders a chat with transformers' own template renderer, or raises ChatError, which says what to change.

Called by chat.py for records, and by template_probe.py for a plain chat. tokenize.py and tokenizer.py use it to choose the
template. Every step that works on a chat may raise ChatError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune_job.chat_templates import fitting_template
from finetune_trainer.data.records import MAX_RECORD_BYTES, Message

Tokenizer = Any
"""transformers.PreTrainedTokenizerBase, not imported here because it takes seconds to load."""
Span = tuple[int, int]
"""A range [start, stop) of characters of the rendered text."""


class ChatError(ValueError):
    """A chat cannot be rendered, or questions and answers cannot be separated in its text."""

    def __init__(self, key: str, reason: str, fix: str, changes: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{reason}; {fix}")
        self.key = key
        """Key of the record that has the problem; empty if the template cannot be used for any record."""
        self.reason = reason
        self.fix = fix
        self.changes = changes or {}
        """The fix as changes of the manifest, as in RecordProblem."""


def endless_template_error(reason: str) -> ChatError:
    """The error for a template that does not finish. reason: says which limit the template exceeds."""
    fix = "set spec.data.chatTemplate to a template without loops within loops or huge texts, or remove the record"
    return ChatError("messages", f"the chat template {reason} for this chat", fix)


def template_source(tokenizer: Tokenizer, written: str | None, *, has_tools: bool = False) -> str:
    """Return `written` (from the spec) or the tokenizer's template, which may depend on `has_tools`. Raises ChatError."""
    try:
        return str(tokenizer.get_chat_template(written, [{}] if has_tools else None))
    except ValueError as error:
        name = fitting_template(frozenset(token.content for token in tokenizer.added_tokens_decoder.values()))
        raise ChatError(
            "",
            "the tokenizer has no chat template, as is usual for a base model",
            f"use a model made for chats, or set spec.data.chatTemplate: {name}",
            {"spec.data.chatTemplate": name},
        ) from error


def render_chat(
    source: str,
    variables: Mapping[str, Any],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    prompt: bool = False,
    track: bool = False,
) -> tuple[str, list[Span]]:
    """Render a chat with `source`. Returns the text and, with `track`, the spans marked as generated. Raises ChatError.

    variables: the template's variables, such as special tokens. prompt: whether to end with the generation prompt.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # The renderer is sandboxed and limits range(); render_limit.py stops nested loops that run too long.
    try:
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) or None,
            chat_template=source,
            return_assistant_tokens_mask=track,
            add_generation_prompt=prompt,
            **variables,
        )
    except Exception as error:
        null = 'write "" for a content that is null, or ' if any(message["content"] is None for message in messages) else ""
        roles = ", ".join(str(message["role"]) for message in messages[:8])
        raise ChatError(
            "messages",
            f"the chat template refuses a chat of the roles {roles}{' ...' if len(messages) > 8 else ''} "
            f"({type(error).__name__}: {str(error)[:200]})",
            null + "change the record to what the template accepts, or set spec.data.chatTemplate",
        ) from error
    if len(texts[0]) > MAX_RECORD_BYTES:
        raise endless_template_error(f"writes {len(texts[0])} characters, more than {MAX_RECORD_BYTES},")
    return texts[0], spans[0] if track else []
