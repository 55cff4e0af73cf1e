"""Tokens by tokenizer.json alone are those that transformers makes, and templates are found where it looks for them."""

import json
import subprocess
import sys

import pytest

from finetune_job.api.inputs import LossOn
from finetune_trainer.data.records import Record
from finetune_trainer.data.tokenize import tokenize
from finetune_trainer.data.tokenizer_files import FileTokenizer, TokenizerFilesError
from tests.unit.finetune_trainer.data.chat_templates import CHATML, QWEN3
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer, spacing_tokenizer, word_tokenizer

PAIRS = [Record(1, "a b ", "c"), Record(2, "", "d e"), Record(3, "q:", "yes")]
CHAT = Record(1, "", "", ({"role": "user", "content": "q é"}, {"role": "assistant", "content": "a"}))


@pytest.mark.parametrize(
    "tokenizer",
    [
        word_tokenizer(),
        word_tokenizer(start=True, end=True),
        spacing_tokenizer(),
        spacing_tokenizer("first"),
        byte_tokenizer(["<|end|>"], [("a", "b")], eos_token="<|end|>"),
    ],
)
def test_texts_become_the_tokens_of_transformers(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    assert tokenize(FileTokenizer(tmp_path), PAIRS, LossOn.COMPLETION) == tokenize(tokenizer, PAIRS, LossOn.COMPLETION)


@pytest.mark.parametrize("published", [CHATML, QWEN3])
def test_chats_become_the_tokens_of_transformers(tmp_path, published):
    tokenizer = published.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    own = tokenize(FileTokenizer(tmp_path), [CHAT], LossOn.ASSISTANT)
    assert own == tokenize(tokenizer, [CHAT], LossOn.ASSISTANT)
    assert any(own[0].supervised)


def test_a_template_is_found_in_each_of_its_places(tmp_path):
    byte_tokenizer(["<|end|>"], eos_token="<|end|>").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        FileTokenizer(tmp_path).get_chat_template(None, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for written in (
        "in the config",
        [{"name": "default", "template": "in the config"}, {"name": "tool_use", "template": "tools"}],
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": written}))
        tokenizer = FileTokenizer(tmp_path)
        assert tokenizer.get_chat_template(None, None) == "in the config"
    assert tokenizer.get_chat_template(None, [{}]) == "tools"
    assert tokenizer.get_chat_template("written", None) == "written"
    (tmp_path / "chat_template.jinja").write_text("beside it")
    assert FileTokenizer(tmp_path).get_chat_template(None, None) == "beside it"


def test_files_that_make_no_tokenizer_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerFilesError, match=r"tokenizer.json is not a tokenizer"):
        FileTokenizer(tmp_path)
    with pytest.raises(FileNotFoundError):
        FileTokenizer(tmp_path / "none")


def test_templates_run_in_the_sandbox_of_training_without_the_rest_of_transformers():
    program = (
        "import sys; from finetune_trainer.data.tokenizer_files import import_renderer, keep_rest_of_transformers_out as keep\n"
        "keep(); keep(); import_renderer(); import_renderer()\n"
        "from transformers.utils.chat_template_utils import render_jinja_template as render\n"
        "print(render(conversations=[[{'role': 'user', 'content': 'q'}]], chat_template='{{ messages[0].content }}')[0])\n"
        "print(render(conversations=[[]], chat_template='x', return_assistant_tokens_mask=True)[0])\n"
        "print(len([name for name in sys.modules if name.startswith('transformers.')]) < 8)\n"
        "print({'numpy', 'tqdm', 'huggingface_hub', 'importlib.metadata'} & set(sys.modules))\n"
        "import numpy; print(numpy.zeros(1).sum())\n"
        "render(conversations=[[]], chat_template='{{ messages.__class__.__mro__ }}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["['q']", "['x']", "True", "set()", "0.0"]
    assert "does not contain `{% generation %}`" in done.stderr
    assert "SecurityError" in done.stderr
