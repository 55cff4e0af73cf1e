"""docs/tutorial/getting-started.md is followed block by block on one machine and on a cluster.

A tiny Llama and a chat file stand in for the reader's.

Real: the manifest, every `finetune` command, the results, and Python with PEFT and transformers. Stand-ins on the path, because
this machine has no GPU and no network: `make` (says what it would do), `vllm` (keeps its arguments) and `curl` (keeps its). What
vLLM would be given is checked against what its sources ask for.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune_trainer.release.files import ReleaseLayout
from tests.support.documented import ROOT, Reader, blocks_of, cluster_programs, path_with
from tests.support.tiny_model import write_tiny_llama
from tests.support.vllm_layout import check_adapter, check_model
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer
from tools.cluster.images import write_program_image
from tools.cluster.requirements import install_packages
from tools.stack import STORAGE_CLASS, Stack
from tools.volumes import volume

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
PAGE = ROOT / "docs/tutorial/getting-started.md"
BUSYBOX = "docker.io/library/busybox:1.37"
SECTIONS = ("The manifest", "On one machine with GPUs", "Serve it")
KEEPS_ARGUMENTS = '#!{python}\nimport json, sys\nopen("{kept}", "a").write(json.dumps(sys.argv) + "\\n")\n'
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = 200
"""Enough for a step of the default global batch: 16 packed sequences of 2,048 tokens."""


def make_home(home: Path) -> None:
    """What the page says that its reader has."""
    model = home / "models/Llama-3.1-8B-Instruct"
    ids = {"vocab_size": 258, "eos_token_id": 257, "pad_token_id": 257}
    write_tiny_llama(model, torch.bfloat16, **ids)
    byte_tokenizer(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", chat_template=CHATML).save_pretrained(model)
    asked = [f"My parcel number {number} is late, and I have waited for it since last week." for number in range(CHATS)]
    answers = [f"I am sorry. Order {number} has left our store and will come within a week." for number in range(CHATS)]
    (home / "data").mkdir()
    turns = zip(asked, answers, strict=True)
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns]
    (home / "data/chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "arguments"


@pytest.fixture(scope="module")
def follow(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """`follow(section)`: run its blocks; what each printed, by its first line."""
    root = tmp_path_factory.mktemp("reader")
    make_home(root / "home")
    programs = {name: KEEPS_ARGUMENTS.format(python=sys.executable, kept=kept) for name in ("vllm", "curl")}
    programs["make"] = f'#!/bin/sh\nexec /usr/bin/make -n -C {ROOT} "$@"\n'
    path = f"{Path(sys.executable).parent}:{path_with(root / 'bin', programs)}"
    (root / "checkout").mkdir()
    reader = Reader(root / "checkout", os.environ | {"PATH": path, "HOME": str(root / "home")}, played=tuple(programs))
    return lambda section: (
        {block.text.partition("\n")[0]: reader.run(PAGE, block) for block in blocks_of(PAGE, section=section)}
        | {"directory": str(root / "checkout")}
    )


@dataclass(frozen=True)
class Trained:
    """What the reader has after the run."""

    checkout: Path
    said: dict[str, str]

    @property
    def base(self) -> Path:
        return self.checkout.parent / "home/models/Llama-3.1-8B-Instruct"

    @property
    def result(self) -> Path:
        return self.checkout / "runs/claims/results/support-bot"


@pytest.fixture(scope="module")
def trained(follow: Callable[[str], dict[str, str]]) -> Trained:
    follow("The manifest")
    said = follow("On one machine with GPUs")
    return Trained(Path(said["directory"]), said)


def test_every_section_with_commands_is_followed() -> None:
    of_all = [block.line for block in blocks_of(PAGE)]
    followed = [block.line for section in (*SECTIONS, "On a cluster") for block in blocks_of(PAGE, section=section)]
    assert of_all == followed, "a section has commands that no test runs"


@pytest.mark.nightly
def test_from_a_llama_and_a_chat_file_to_a_served_adapter(
    trained: Trained, follow: Callable[[str], dict[str, str]], kept: Path
) -> None:
    looked, ran, results = (
        next(text for first, text in trained.said.items() if first.startswith(beginning))
        for beginning in ("finetune validate", "finetune run", "ls runs")
    )
    assert "FineTuneJob support-bot: accepted" in looked
    assert "[[I am sorry." in looked
    assert "limit                   80.0 GiB  --gpu-memory" in looked
    assert "verification:  passed" in ran
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "config.json"} <= set(results.split())
    assert "# Verification of the merge: passed" in results

    served = follow("Serve it")
    assert any("<|im_start|>assistant\n" in text for text in served.values())
    with_adapter, merged, asked = [json.loads(line)[1:] for line in kept.read_text().splitlines()]
    assert with_adapter == [
        *("serve", str(trained.base), "--enable-lora", "--lora-modules"),
        "support-bot=runs/claims/results/support-bot/adapter",
    ]
    assert merged == ["serve", "runs/claims/results/support-bot/merged", "--served-model-name", "support-bot"]
    assert json.loads(asked[asked.index("--data") + 1])["model"] == "support-bot"
    assert asked[0] == "http://localhost:8000/v1/chat/completions"


@pytest.fixture
def busybox(stack: Stack, tmp_path: Path) -> Iterator[None]:
    """The image that the page names, made of Debian's program: the nodes have no way to a registry."""
    if shutil.which("busybox") is None:
        install_packages(["busybox-static"])
    archive = tmp_path / "busybox.tar"
    write_program_image(archive, Path(shutil.which("busybox") or ""), ["sh"], names=("sleep", "tar", "test"))
    for node in stack.cluster.nodes:
        node.images.load(archive, BUSYBOX)
    yield
    for node in stack.cluster.nodes:
        node.images.untag(BUSYBOX)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("busybox")
def test_the_same_manifest_succeeds_on_a_cluster_and_its_results_are_downloaded(stack: Stack, tmp_path: Path) -> None:
    """Volumes are root's, 0755, as new ones are."""
    make_home(tmp_path / "home")
    path = f"{Path(sys.executable).parent}:{path_with(tmp_path / 'bin', cluster_programs(stack.cluster))}"
    (tmp_path / "checkout").mkdir()
    environment = stack.cluster.environment | {"PATH": path, "HOME": str(tmp_path / "home")}
    reader = Reader(tmp_path / "checkout", environment, patience_seconds=1500.0)
    for number in range(4):
        directory = stack.directory / "claims" / f"support-{number}"
        directory.mkdir(mode=0o755)
        stack.apply(volume("support", directory.name, directory, storage_class=STORAGE_CLASS, size="100Gi"))
    (manifest,) = blocks_of(PAGE, section="The manifest")
    *before, ended, served = blocks_of(PAGE, section="On a cluster")
    for block in (manifest, *before):
        reader.run(PAGE, block)
    assert "Succeeded" in reader.run(PAGE, ended)
    reader.run(PAGE, served)
    (download,) = re.findall(r"`(finetune download\s[^`]+)`", PAGE.read_text())
    reader.run(PAGE, " ".join(download.split()))
    results = reader.checkout / "results"
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=results, check=True)
    assert json.loads((results / "verification.json").read_text())["passed"] is True
    check_adapter(results / "adapter", tmp_path / "home/models/Llama-3.1-8B-Instruct")
    check_model(results / "merged")
    stack.cluster.kubectl("delete", "namespace", "support", "--timeout=200s")


LAYOUTS = {
    # Which results there are, whether the destination is a repository (Hub, registry), and where adapter and merged model are.
    "a directory": (ReleaseLayout(has_adapter=True, has_merged=True, is_repository=False), "adapter", "merged"),
    "a directory with the adapter alone": (
        ReleaseLayout(has_adapter=True, has_merged=False, is_repository=False),
        "adapter",
        None,
    ),
    "a repository": (ReleaseLayout(has_adapter=True, has_merged=True, is_repository=True), "adapter", ""),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_published_loads_as_it_is(name: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PEFT, transformers and, by its files, vLLM, in the layout that readers of each kind of destination see.

    The repositories of the Hub are in tests/unit/finetune_trainer/roles/test_publish_loading.py.
    """
    layout, adapter, merged = LAYOUTS[name]
    published = tmp_path / "published"
    for local in (path.relative_to(trained.result) for path in trained.result.rglob("*") if path.is_file()):
        if local.parts[0] in layout.directories:
            target = published / layout.at_destination(local.as_posix())
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(trained.result / local)
    # As the Hub would answer for the base's name.
    (tmp_path / "meta-llama").mkdir()
    (tmp_path / "meta-llama/Llama-3.1-8B-Instruct").symlink_to(trained.base)
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "My parcel is late."}]
    check_adapter(published / adapter, trained.base)
    model = AutoPeftModelForCausalLM.from_pretrained(published / adapter)
    assert any(values.any() for name, values in model.named_parameters() if "lora_B" in name)
    assert model.peft_config["default"].base_model_name_or_path == "meta-llama/Llama-3.1-8B-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(published / adapter)
    assert "<|im_start|>user\nMy parcel" in tokenizer.apply_chat_template(turns, tokenize=False)
    if merged is not None:
        check_model(published / merged)
        model = AutoModelForCausalLM.from_pretrained(published / merged)
        tokenizer = AutoTokenizer.from_pretrained(published / merged)
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert model.generate(**asked, max_new_tokens=2).shape[1] > asked["input_ids"].shape[1]
