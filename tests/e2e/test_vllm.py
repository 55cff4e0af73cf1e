"""What report and pages say about vLLM, asked of vLLM: its own code judges and reads adapters and lines. Nothing is computed."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from finetune_trainer.release.adapter_check import ServingReport, check_adapter
from finetune_trainer.report.summary import commands
from tests.e2e.vllm import VERSION, Loaded, load_adapters, parse_serve
from tests.support.documented import ROOT, blocks_of
from tests.support.tiny_model import write_tiny_llama
from tests.unit.finetune_trainer.release.example import FROM_HUB, example
from tests.unit.finetune_trainer.release.test_adapter_check import LORA, NOT_SERVED, written

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

METHODS = LORA | {name: method for name, (method, _) in NOT_SERVED.items()}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
STRICTER = {"parameters"}
"""It reads these, and what it computes depends on the model."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("base"), attention_bias=True)


@pytest.fixture(scope="module")
def asked(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, ServingReport, Loaded]]:
    """Of each adapter, its directory, what we say, and what vLLM says if it is started as we say."""
    folder = tmp_path_factory.mktemp("adapters")
    places = {name: folder / re.sub(r"\W", "-", name) for name in METHODS}
    reports = {name: check_adapter(place, written(base, place, METHODS[name]), base) for name, place in places.items()}
    given = [(place, reports[name].max_lora_rank or 512, MODULES) for name, place in places.items()]
    return {name: (places[name], reports[name], loaded) for name, loaded in zip(METHODS, load_adapters(given), strict=True)}


@pytest.mark.parametrize("name", METHODS)
def test_vllm_takes_what_is_said_to_load_and_refuses_the_others(
    name: str, asked: dict[str, tuple[Path, ServingReport, Loaded]]
) -> None:
    _, report, loaded = asked[name]
    assert (loaded.refused is None) is (report.is_served or name in STRICTER), loaded.refused


@pytest.mark.parametrize("name", LORA)
def test_vllm_scales_each_module_as_peft_does(
    name: str, base: Path, asked: dict[str, tuple[Path, ServingReport, Loaded]]
) -> None:
    directory, _, loaded = asked[name]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), directory)
    layers = {path: layer for path, layer in model.get_base_model().named_modules() if isinstance(layer, LoraLayer)}
    assert loaded.scales == pytest.approx({path: layer.scaling["default"] for path, layer in layers.items()})


def test_a_lower_rank_than_the_one_that_is_said_is_refused(asked: dict[str, tuple[Path, ServingReport, Loaded]]) -> None:
    directory, report, _ = asked["ranks"]
    assert report.max_lora_rank == 16
    (loaded,) = load_adapters([(directory, 8, MODULES)])
    assert "LoRA rank 9 is greater than max_lora_rank 8" in (loaded.refused or "")


@pytest.mark.parametrize(
    ("destination", "model", "adapter"),
    [("pvc://out/result", "./merged", "./adapter"), ("hf://team/tuned", "team/tuned", "team/tuned-adapter")],
)
def test_vllm_understands_the_lines_of_the_report(destination: str, model: str, adapter: str, tmp_path: Path) -> None:
    lines = dict(commands(example(tmp_path, FROM_HUB | {"output.destination": destination}).facts()))
    merged = parse_serve(lines["Serve the merged model with vLLM"])
    assert (merged["model"], merged["adapters"]) == (model, {})
    adapted = parse_serve(lines["Serve the adapter with vLLM"])
    assert (adapted["model"], adapted["adapters"], adapted["most_rank"]) == ("maker/base", {"tuned": adapter}, 16)


def test_vllm_understands_the_lines_of_the_pages() -> None:
    page = ROOT / "docs" / "tutorial" / "getting-started.md"
    on_one_machine = [line for block in blocks_of(page) for line in block.text.splitlines() if line.startswith("vllm ")]
    found = [parse_serve(line) for line in on_one_machine]
    assert [each["adapters"] for each in found] == [{"support-bot": "runs/claims/results/support-bot/adapter"}, {}]
    assert found[1]["names"] == ["support-bot"]
    (manifest,) = [block.text for block in blocks_of(page) if "name: vllm" in block.text]
    deployment = yaml.safe_load(manifest.partition("<<'EOF'\n")[2].partition("EOF\n")[0])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith(f":v{VERSION}")
    served = parse_serve(shlex.join([*container["command"], *container["args"]]))
    assert served["adapters"] == {"support-bot": "/claims/results/support-bot/adapter"}
