"""What a template writes around turns is learnt from what it makes of a plain chat."""

from finetune_trainer.data.template_probe import chat_template
from tests.unit.finetune_trainer.data.chat_templates import PHI3, QWEN3, QWEN25, TWO_STOPS
from tests.unit.finetune_trainer.data.chats_by_hand import TOKENIZERS


def test_the_stop_tokens_and_headers_are_learnt_from_the_template():
    seen = chat_template(TOKENIZERS["bytes"]["Phi 3"], PHI3.template)
    assert (seen.asking, seen.headers[0], list(seen.stops)) == ("<|end|>\n<|assistant|>\n", "<|assistant|>\n", ["<|end|>"])
    seen = chat_template(TOKENIZERS["bytes"]["Qwen 3"], QWEN3.template)
    assert seen.headers[0] == "<|im_start|>assistant\n"
    assert list(chat_template(TOKENIZERS["bytes"]["two stop tokens"], TWO_STOPS.template).stops) == ["<|end|>", "<|return|>"]
    assert not chat_template(TOKENIZERS["bytes"]["Qwen 2.5"], QWEN25.template).tracks_generation
