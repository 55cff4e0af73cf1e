"""Chat templates in the manner of well-known models, each with what makes it hard to tell question and answer apart."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer


def as_is(content):
    return content


def strip(content):
    return content.strip()


def answer_only(content):
    """What is left of an answer when its thoughts are dropped."""
    return content.split("</think>")[-1].lstrip("\n")


def thought_and_answer(content):
    if "</think>" not in content:
        return "<think>\n\n</think>\n\n" + content.lstrip("\n")
    thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].strip("\n")
    return f"<think>\n{thought}\n</think>\n\n{answer_only(content)}"


@dataclass(frozen=True)
class Family:
    """A template, its tokenizer's special tokens, and what it makes of an answer."""

    template: str
    special_tokens: tuple[str, ...]
    stop: str
    eos: str
    bos: str | None = None
    says: Callable[[str], str] = as_is
    says_last: Callable[[str], str] | None = None
    """What it makes of the answer that ends the chat; None: the same."""
    takes_system: bool = True
    alternates: bool = False

    def tokenizer(self, **more):
        roles = {"eos_token": self.eos} | ({"bos_token": self.bos} if self.bos else {})
        return byte_tokenizer(self.special_tokens, chat_template=self.template, **roles, **more)


CHATML = Family(
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    stop="<|im_end|>",
    eos="<|im_end|>",
)

CHATML_GENERATION = Family(
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    stop="<|im_end|>",
    eos="<|im_end|>",
)

# A system turn of its own where the chat has none, tools, and calls of tools after or instead of words.
QWEN25 = Family(
    "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else 'You are helpful.' %}"
    "{{- '<|im_start|>system\n' + system }}"
    "{%- if tools %}{{- '\n\n# Tools' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' and loop.first %}"
    "{%- elif message.role == 'assistant' and message.tool_calls %}"
    "{{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    stop="<|im_end|>",
    eos="<|im_end|>",
)

# Drops the thoughts of all answers but the last, and writes an empty thought where the last has none.
QWEN3 = Family(
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{%- set thought = '' %}{%- set content = message.content %}"
    "{%- if message.reasoning_content %}{%- set thought = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.last %}{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif message.content.startswith('<tool_response>') %}{{- '<|im_start|>tool\n' + message.content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    stop="<|im_end|>",
    eos="<|im_end|>",
    says=lambda content: answer_only(content) if "</think>" in content else content,
    says_last=thought_and_answer,
)

# Begins the answer's thought within the generation prompt, which no earlier turn shows.
THINKING = Family(
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{- '<|assistant|>' + message.content.split('</think>')[-1] + '<|end_of_sentence|>' }}"
    "{%- else %}{{- '<|user|>' + message.content }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}",
    ("<|begin|>", "<|user|>", "<|assistant|>", "<|end_of_sentence|>"),
    stop="<|end_of_sentence|>",
    eos="<|end_of_sentence|>",
    bos="<|begin|>",
    says=lambda content: content.split("</think>")[-1],
)

LLAMA3 = Family(
    "{% for message in messages %}"
    "{% set turn = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + "
    "'<|eot_id|>' %}"
    "{% if loop.first %}{% set turn = bos_token + turn %}{% endif %}{{ turn }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    stop="<|eot_id|>",
    eos="<|eot_id|>",
    bos="<|begin_of_text|>",
    says=strip,
)

LLAMA2 = Family(
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}"
    "{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    ("<s>", "</s>"),
    stop="</s>",
    eos="</s>",
    bos="<s>",
    says=lambda content: f" {content.strip()} ",
    alternates=True,
)

# The system's words go into the last question, out of their order.
MISTRAL = Family(
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set turns = messages %}{%- endif %}{{- bos_token }}"
    "{%- for message in turns %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{{- '[INST] ' }}"
    "{%- if system is defined and loop.index0 >= turns | length - 2 %}{{- system + '\n\n' }}{%- endif %}"
    "{{- message['content'] + '[/INST]' }}"
    "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}"
    "{%- endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    stop="</s>",
    eos="</s>",
    bos="<s>",
    says=lambda content: " " + content,
    alternates=True,
)

GEMMA = Family(
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}"
    "{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    stop="<end_of_turn>",
    eos="<eos>",
    bos="<bos>",
    says=strip,
    takes_system=False,
    alternates=True,
)

# Ends the text with another token after the one that ends the turn.
PHI3 = Family(
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    stop="<|end|>",
    eos="<|endoftext|>",
)

# Another token ends the last turn than the ones before it.
TWO_STOPS = Family(
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] }}"
    "{{ '<|return|>' if loop.last and message['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    ("<|start|>", "<|message|>", "<|end|>", "<|return|>"),
    stop="<|end|>",
    eos="<|return|>",
    says=lambda content: "<|message|>" + content,
)

# Thoughts and answer of one turn are messages of their own, a call ends with a token of its own, and only the last turn thinks.
HARMONY = Family(
    "{% set called = namespace(name='') %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start|>functions.' + called.name + ' to=assistant<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{% elif m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{% if m.thinking and (m.tool_calls or loop.last) %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set called.name = call.name %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|message|>' + (call.arguments | tojson) + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    stop="<|end|>",
    eos="<|return|>",
    says=lambda content: "<|channel|>final<|message|>" + content,
)

FAMILIES = {
    "ChatML": CHATML,
    "ChatML with generation blocks": CHATML_GENERATION,
    "Qwen 2.5": QWEN25,
    "Qwen 3": QWEN3,
    "thinking begun by the prompt": THINKING,
    "Llama 3": LLAMA3,
    "Llama 2": LLAMA2,
    "Mistral": MISTRAL,
    "Gemma": GEMMA,
    "Phi 3": PHI3,
    "two stop tokens": TWO_STOPS,
}
