"""Chat templates that a manifest may name, written from the public descriptions of their formats.

They are for base models, which have no template. Each template ends a turn with a special token of its model family, and prompts
for an answer with the text that precedes answers. The plan stores the template's text, so a later release does not change any
run. Users who need tool calls should use the template of a model that was trained for tools.
"""

from __future__ import annotations

from collections.abc import Mapping

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{% set lead = messages[0]['content'] | trim + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set lead = '' %}{% set turns = messages %}{% endif %}"
)
"""Prefix for formats without a system turn: it moves the system text to the start of the first question."""
_GEMMA = (
    "{{ bos_token }}" + _SYSTEM_FIRST + "{% for message in turns %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n'"
    " + (lead if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}" + _SYSTEM_FIRST + "{% for message in turns %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + eos_token }}{% else %}"
    "{{ '[INST] ' + (lead if loop.first else '') + message['content'] | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
_PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '### ' + message['role'] | capitalize + ':\n' + message['content'] | trim }}"
    "{{ eos_token + '\n' if message['role'] == 'assistant' else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)

TEMPLATES: Mapping[str, str] = {"ChatML": _CHATML, "Gemma": _GEMMA, "Llama3": _LLAMA3, "Mistral": _MISTRAL, "Plain": _PLAIN}
"""Name -> template. Plain uses words instead of special tokens, except for the end-of-text token, which every model has."""
TEMPLATE_FORMS: Mapping[str, str] = {
    "ChatML": "turns between <|im_start|> and <|im_end|>, as Qwen and many others have them.",
    "Gemma": "turns between <start_of_turn> and <end_of_turn>.",
    "Llama3": "turns behind headers, each ended by <|eot_id|>.",
    "Mistral": "questions between [INST] and [/INST].",
    "Plain": "words instead of special tokens, for tokenizers that have none of the others'.",
}
"""Name -> description of the format that the template produces."""
ENDS: Mapping[str, str] = {"ChatML": "<|im_end|>", "Gemma": "<end_of_turn>", "Llama3": "<|eot_id|>", "Mistral": "[/INST]"}
"""Name -> special token that identifies tokenizers for this format."""
JINJA = ("{{", "{%")
"""Jinja delimiters. Every template contains at least one; a string without any is treated as the name of a template."""


def name_of(template: str | None) -> str | None:
    """Return the name of the built-in template with this text; None if it is not built in."""
    return next((name for name, text in TEMPLATES.items() if text == template), None)


def fitting_template(tokens: frozenset[str]) -> str:
    """Return the name of the template that fits a tokenizer with these special tokens."""
    return next((name for name, end in ENDS.items() if end in tokens), "Plain")
