"""What a job publishes to the Hub loads by the commands of its model cards as they are written, with the real libraries."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune_trainer.credentials import Credentials
from finetune_trainer.release.write import write_release_files
from finetune_trainer.roles.publish import publish
from tests.support.hub import Hub, running_hub
from tests.support.tiny_model import write_tiny_llama
from tests.support.vllm_layout import check_adapter, check_model
from tests.unit.finetune_trainer.release.example import Example, example

PROMPT = [[72, 101, 108, 108, 111]]
SAY = f"\nprint(model(torch.tensor({PROMPT})).logits[0, -1].tolist())\nassert len(tokenizer('Hello')['input_ids']) == 5\n"


def write_results(made: Example, hub: Hub) -> list[float]:
    """Real ones, of a base that the Hub has; the logits of the tuned model after the prompt."""
    base, output = write_tiny_llama(made.context.output.root.parent / "base"), made.context.output
    made.results()
    hub.add("maker/base", {path.name: path.read_bytes() for path in base.iterdir()})
    torch.manual_seed(5)
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages }}"
    for directory in (output.adapter, output.merged):
        for file in directory.iterdir():
            file.unlink()
        (tuned if directory == output.adapter else tuned.merge_and_unload()).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        if directory == output.adapter:
            config = directory / "adapter_config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "maker/base"}))
            (directory / "README.md").unlink()
        digests = {file.name: {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()} for file in directory.iterdir()}
        (directory / "manifest.json").write_text(json.dumps({"files": digests}))
    with torch.no_grad():
        return list(AutoModelForCausalLM.from_pretrained(output.merged)(torch.tensor(PROMPT)).logits[0, -1].tolist())


def copy_of(hub: Hub, name: str, directory: Path) -> Path:
    """The repository's files, as its readers copy them."""
    for file, content in hub.repositories["models", name].files.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / file).write_bytes(content)
    return directory / name


@pytest.mark.nightly
def test_the_commands_of_the_cards_load_what_was_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with running_hub() as hub:
        changes = {"model.source": "hf://maker/base", "model.revision": None, "output.destination": "hf://team/tuned"}
        made = example(tmp_path / "claims", changes, publish={"hubEndpoint": hub.address})
        expected = write_results(made, hub)
        write_release_files(made.context.output, made.facts())
        report = publish(made.context, Credentials(Path("/no/such/directory")))
        assert report.facts["adapter_address"].startswith("hf://team/tuned-adapter@")
        published = [copy_of(hub, name, tmp_path) for name in ("team/tuned", "team/tuned-adapter")]
        check_model(published[0])
        check_adapter(published[1], made.context.output.root.parent / "base")
        cards = [(directory / "README.md").read_text() for directory in published]
        scripts = [script for card in cards for script in re.findall(r"```python\n(.*?)```", card, re.DOTALL)]
        # transformers takes the adapter's repository for a model as well.
        scripts.append(scripts[0].replace("team/tuned", "team/tuned-adapter"))
        assert "AutoPeftModelForCausalLM" in scripts[1]
        assert scripts[1] == scripts[2]
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        answers = subprocess.run(
            [sys.executable, "-c", "import torch\n" + "".join(script + SAY for script in scripts)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=tmp_path,
        )
    assert answers.returncode == 0, answers.stderr
    for answer in answers.stdout.splitlines():
        assert json.loads(answer) == pytest.approx(expected, abs=1e-4)
    assert len(answers.stdout.splitlines()) == 4
