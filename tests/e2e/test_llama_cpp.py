"""What the report says about llama.cpp, done with llama.cpp: its scripts convert our results, and it computes their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MixtralConfig, Phi3Config, PreTrainedConfig

from finetune_trainer.release.adapter_check import check_adapter
from finetune_trainer.report.summary import commands
from finetune_trainer.roles import merge_command
from tests.e2e.llama_cpp import LlamaCpp, ensure_llama_cpp
from tests.unit.finetune_trainer.release.example import example
from tests.unit.finetune_trainer.release.test_adapter_check import FOR_LLAMA_CPP, LORA, NOT_SERVED, written

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

VOCABULARY = 512
IDS = [1, *(int(number) for number in np.random.default_rng(0).integers(3, VOCABULARY - 12, 20))]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MODELS: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**SHAPE),
    "Llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "Mistral": MistralConfig(**SHAPE),
    "Mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "Phi 3": Phi3Config(**SHAPE),
}
CLOSE = 0.01
"""Of the adapter's effect. By default the script rounds weights to 16 bits."""


@pytest.fixture(scope="module")
def llama_cpp() -> LlamaCpp:
    return ensure_llama_cpp()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the report tells to do with results on a claim."""
    return dict(commands(example(tmp_path_factory.mktemp("example")).facts()))


def write_base(directory: Path, config: PreTrainedConfig, llama_cpp: LlamaCpp) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(directory)
    llama_cpp.write_tokenizer(directory, VOCABULARY)
    return model


def logits_of(model: torch.nn.Module) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        found: npt.NDArray[np.float32] = model.eval()(torch.tensor([IDS])).logits[0].numpy()
        return found


def distance(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> float:
    return float(np.abs(first - second).max())


@pytest.mark.parametrize("name", MODELS)
def test_merged_models_compute_there_what_they_compute_in_transformers(
    name: str, llama_cpp: LlamaCpp, lines: dict[str, str], tmp_path: Path
) -> None:
    model = write_base(tmp_path / "base", MODELS[name], llama_cpp)
    plain = logits_of(model)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    given = ["--base", "base", "--adapter", "adapter", "--output", "merged"]
    arguments = [word if word.startswith("--") else str(tmp_path / word) for word in given]
    assert merge_command.main(arguments) == 0
    llama_cpp.run(lines["Convert the merged model for llama.cpp"], tmp_path)
    wanted = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    effect = distance(wanted, plain)
    assert effect > 0.1
    assert distance(llama_cpp.logits(tmp_path / "tuned.gguf", IDS), wanted) < CLOSE * effect


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, llama_cpp: LlamaCpp) -> Path:
    """With its file for llama.cpp."""
    folder = tmp_path_factory.mktemp("base")
    write_base(folder / "base", MODELS["Llama"], llama_cpp)
    llama_cpp.run("python convert_hf_to_gguf.py ./base --outtype f32 --outfile base.gguf", folder)
    return folder


@pytest.mark.parametrize("name", ["LoRA", "rsLoRA", "embedding", "same scaling", "high rank", "ranks", "alphas"])
def test_adapters_compute_there_what_they_compute_in_peft_or_are_not_offered(
    name: str, base: Path, llama_cpp: LlamaCpp, lines: dict[str, str], tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    plan = written(base / "base", adapter, LORA.get(name) or NOT_SERVED[name][0])
    # As large as trained ones are: larger ones hide their scale behind the norms that follow.
    smaller = {key: tensor * 0.05 for key, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(smaller, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "base").symlink_to(base / "base")
    llama_cpp.run(lines["Convert the adapter for llama.cpp"], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base / "base", dtype=torch.float32)
    plain = logits_of(model)
    wanted = logits_of(PeftModel.from_pretrained(model, adapter))
    found = llama_cpp.logits(base / "base.gguf", IDS, tmp_path / "tuned-lora.gguf")
    is_right = distance(found, wanted) < CLOSE * distance(wanted, plain)
    assert is_right is FOR_LLAMA_CPP[name] is check_adapter(adapter, plan, base / "base").is_for_llama_cpp
