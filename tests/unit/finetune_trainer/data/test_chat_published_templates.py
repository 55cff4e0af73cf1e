"""The templates of published models, which TRL ships next to variants of its own that mark what is generated.

What is found to be the assistant's in the template as it was published has to be marked in TRL's variant of it, and whatever TRL
marks beyond that is the template's own: a header, or the empty thought with which a prompt ends.
"""

import re
from pathlib import Path

import pytest

from finetune_job.api.inputs import LossOn
from finetune_trainer.data.records import Record, RecordProblem
from finetune_trainer.data.tokenize import tokenize
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer

MARKER = re.compile(r"<[|\uff5c][^<>\s'\"{}]{1,40}[|\uff5c]>|<\|?[a-z_/]{1,24}\|?>|\[gMASK\]|<sop>")
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<\uff5cend▁of▁sentence\uff5c>",
    "diffusion_gemma": "<turn|>",
    "gemma": "<end_of_turn>",
    "gptoss": "<|return|>",
    "llama3": "<|eot_id|>",
    "phi3": "<|endoftext|>",
    "muse": "<|eot|>",
}
"""Token that ends a text, by the beginning of a template's name; "<|im_end|>" elsewhere."""
# Made for images (idefics3, llava_next, smolvlm), or without a token that ends a turn (glm4moe).
LEFT_OUT = {"glm4moe", "idefics3", "llava_next", "smolvlm"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}


def user(words):
    return {"role": "user", "content": words}


def says(words, **more):
    return {"role": "assistant", "content": words, **more}


def told(words):
    return {"role": "tool", "content": words, "tool_call_id": "call00001", "name": "add"}


CHATS = {
    "one turn": [user("ask one"), says("say one")],
    "instructed": [{"role": "system", "content": "be kind"}, user("ask one"), says("say one")],
    "three turns": [user("ask one"), says("say one"), user("ask two"), says("say two"), user("ask three"), says("say three")],
    "blank ends": [user(" ask one "), says(" say one "), user("ask two\n"), says("\nsay two\n")],
    "thoughts": [user("ask"), says("say one", reasoning_content="think one"), user("ask"), says("say two", thinking="think two")],
    "calls": [user("ask"), says("", tool_calls=[CALL]), told("2"), says("", tool_calls=[CALL]), told(""), says("say two")],
    "words and calls": [
        user("ask"),
        says("say one", tool_calls=[CALL]),
        told("2"),
        says("say two"),
        user("ask"),
        says("say three"),
    ],
    "thoughts and calls": [
        user("ask"),
        says("", thinking="think add", tool_calls=[CALL]),
        told("2"),
        says("say", thinking="think two"),
    ],
    "a call at the end": [user("ask"), says("", tool_calls=[CALL])],
}


def published():
    """Names of the templates of which TRL has a variant."""
    trl = pytest.importorskip("trl")
    directory = Path(trl.__file__).parent / "chat_templates"
    names = sorted(path.stem.removesuffix("_training") for path in directory.glob("*_training.jinja"))
    return directory, [name for name in names if name not in LEFT_OUT]


DIRECTORY, NAMES = published()


def test_the_templates_are_there():
    assert {"llama3", "qwen2_5", "qwen3", "gemma", "gemma3", "gptoss", "deepseekv3", "phi3", "cohere"} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_found_is_what_trl_marks(name):
    sources = [(DIRECTORY / f"{name}{variant}.jinja").read_text() for variant in ("", "_training")]
    end = next((end for beginning, end in ENDS.items() if name.startswith(beginning)), "<|im_end|>")
    markers = {marker for source in sources for marker in MARKER.findall(source)} | {end}
    tokenizer = byte_tokenizer(sorted(markers), eos_token=end, bos_token=end)
    stops = [token for token in (end, "<|call|>") if token in markers]
    compared = 0
    for kind, messages in CHATS.items():
        record = Record(1, "", "", tuple(messages), (TOOL,) if "call" in kind else ())
        ours, theirs = (
            tokenize(tokenizer, [record], LossOn.ASSISTANT, source, stop_ids=tuple(map(tokenizer.convert_tokens_to_ids, stops)))[
                0
            ]
            for source in sources
        )
        if isinstance(ours, RecordProblem) or isinstance(theirs, RecordProblem) or ours.input_ids != theirs.input_ids:
            continue  # the template takes no such chat, or the variant writes it otherwise
        compared += 1
        found = list(zip(ours.input_ids, ours.supervised, theirs.supervised, strict=True))
        assert all(is_theirs for _, is_ours, is_theirs in found if is_ours), kind
        beyond = tokenizer.decode([token for token, is_ours, is_theirs in found if is_theirs and not is_ours])
        assert not re.search(r"ask|say|think \w|add|be kind", beyond), kind
    assert compared >= 1
