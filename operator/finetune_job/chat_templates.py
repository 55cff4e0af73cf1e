"""Chat templates that a manifest may name, written from the public descriptions of these forms.

For base models, which come without a template. Each ends a turn with a special token of its family, and asks for an answer with
what it writes before one. The plan holds the text, so that a later release changes no run. Who needs tools takes the template of
a model that was made for them.
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
"""For forms without a system turn: its text is put before the first question."""
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

TEMPLATES: Mapping[str, str] = {
    "ChatML": _CHATML,
    "Gemma": _GEMMA,
    "Llama3": _LLAMA3,
    "Mistral": _MISTRAL,
    "Plain": _PLAIN,
}
"""By name. Plain writes words instead of special tokens, but for the one that ends a text, which every model knows."""
TEMPLATE_FORMS: Mapping[str, str] = {
    "ChatML": "turns between <|im_start|> and <|im_end|>, as Qwen and many others have them.",
    "Gemma": "turns between <start_of_turn> and <end_of_turn>.",
    "Llama3": "turns behind headers, each ended by <|eot_id|>.",
    "Mistral": "questions between [INST] and [/INST].",
    "Plain": "words instead of special tokens, for tokenizers that have none of the others'.",
}
"""What each of them writes."""
ENDS: Mapping[str, str] = {"ChatML": "<|im_end|>", "Gemma": "<end_of_turn>", "Llama3": "<|eot_id|>", "Mistral": "[/INST]"}
"""Token by which a tokenizer shows that it knows the form."""
JINJA = ("{{", "{%")
"""One of these is in every template; what has none is meant as a name."""


def name_of(template: str | None) -> str | None:
    """The name of one of ours."""
    return next((name for name, text in TEMPLATES.items() if text == template), None)


def fitting_template(tokens: frozenset[str]) -> str:
    """The name of the template for a tokenizer with these special tokens."""
    return next((name for name, end in ENDS.items() if end in tokens), "Plain")
