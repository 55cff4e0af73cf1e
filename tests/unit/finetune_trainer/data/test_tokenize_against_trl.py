"""Chats become the same tokens and masks as TRL's SFTTrainer makes of them, with templates that mark what is generated.

Compared is what SFTTrainer's data preparation gives (`assistant_only_loss`), nothing is trained. The two differ on purpose where
TRL trains on a mask that cannot be right, or refuses a template that can be used:
* a generation block without the token that ends the turn, or a chat of which only some turns are marked: a problem here, while
  TRL refuses a chat only if nothing at all is supervised;
* a template without generation blocks: spans are found here, while TRL swaps in a template of its own for the models that it
  knows and refuses others;
* a token that the tokenizer would make of the first character of an answer and of what stands before it: TRL learns it as a
  part of the answer, while here the answer begins with a token of its own, as it does for a server. No answer here makes one.
The first token's flag differs in form only: nothing precedes it, so neither counts its prediction.
"""

import pytest

from finetune_job.api.inputs import LossOn
from finetune_trainer.data.records import Record
from finetune_trainer.data.tokenize import tokenize
from tests.unit.finetune_trainer.data.chat_templates import CHATML_GENERATION, LLAMA3, PHI3, Family

LLAMA3_GENERATION = Family(
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    LLAMA3.special_tokens,
    stop=LLAMA3.stop,
    eos=LLAMA3.eos,
    bos=LLAMA3.bos,
)
# The line end behind the stop token is marked, too, and another token ends the text.
PHI3_GENERATION = Family(
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|assistant|>\n' }}"
    "{% generation %}{{ message.content + '<|end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% elif messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ eos_token }}{% endif %}",
    PHI3.special_tokens,
    stop=PHI3.stop,
    eos=PHI3.eos,
)
# The words of a turn and its calls of tools in one block, as the training variants of thinking models have them.
TOOLS = Family(
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    stop="<|im_end|>",
    eos="<|im_end|>",
)
FAMILIES = {"ChatML": CHATML_GENERATION, "Llama 3": LLAMA3_GENERATION, "Phi 3": PHI3_GENERATION, "thoughts and tools": TOOLS}
MERGES = [("Ċ", "Ċ"), ("Ġ", "a"), ("a", "b")]

TEXTS = ["a b", " abab ", "größer €", "\n\nab", "assistant\n", "x" * 50, "ends on 😀"]
ANSWERS = [text for text in TEXTS if not text.startswith("\n")]
CHATS = [
    [{"role": "user", "content": TEXTS[n % 7]}, {"role": "assistant", "content": ANSWERS[(5 * n + 1) % 6]}] * (1 + n % 4)
    for n in range(24)
]
CHATS += [[{"role": "system", "content": "be kind"}, *chat] for chat in CHATS[:4]]
CHATS += [[*chat, {"role": "user", "content": "and?"}] for chat in CHATS[:4]]
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TOOL_CHATS = [
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "because"},
    ]
    for content in ("let me see", None)
]


def prepared_by_trl(tokenizer, rows, directory):
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
    tokenizer.pad_token = tokenizer.eos_token
    settings = SFTConfig(str(directory), assistant_only_loss=True, max_length=None, report_to=[], use_cpu=True, bf16=False)
    return SFTTrainer(model, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train_dataset


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_equal_those_of_sfttrainer(tmp_path, name):
    # The two line breaks of Llama 3's header would be one token at the end of a prompt, but not before a word.
    tokenizer = FAMILIES[name].tokenizer(merges=MERGES[1:] if name == "Llama 3" else MERGES)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}] if FAMILIES[name] is TOOLS else []
    rows = [{"messages": chat, **({"tools": tools} if tools else {})} for chat in (TOOL_CHATS if tools else CHATS)]
    theirs = prepared_by_trl(tokenizer, rows, tmp_path)
    records = [Record(line, "", "", tuple(row["messages"]), tuple(tools)) for line, row in enumerate(rows, start=1)]
    ours = tokenize(tokenizer, records, LossOn.ASSISTANT)
    assert [document.input_ids for document in ours] == list(theirs["input_ids"])
    masks = [[label != -100 for label in labels] for labels in theirs["labels"]]
    assert [document.supervised for document in ours] == masks
    assert all(any(mask) and not all(mask) for mask in masks)
