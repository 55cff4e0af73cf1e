"""Every supported PEFT method trains right: on one rank, sharded by either version of FSDP, and into an adapter that PEFT loads.

One gang of one rank and one of two go through all methods, because building a gang costs more than training the tiny model.
"""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from finetune_job.methods import Family, supported
from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.model import sharded
from finetune_trainer.model.adapters import adapter_settings, fixed_tensors, stored_names
from finetune_trainer.model.sharded import TrainedModel
from finetune_trainer.ranks.gang import joined
from tests.support.forked_ranks import run_processes
from tests.support.method_settings import SETTINGS
from tests.support.small_gang import Unchanged, documents, whole
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama

STEPS = 2
ALL = [kind.value for kind in supported(Family.OTHER)]


def spec(method: str, ranks: int, version: int = 2) -> dict[str, Any]:
    return tiny_spec(
        method={"type": method, "lora": None, "settings": SETTINGS.get(method, {})},
        parallelism={"processesPerNode": ranks, "fsdp": {"version": version}},
        merge={"enabled": False},
    )


def train(trained: TrainedModel, rank: int, ranks: int) -> set[str]:
    """What had no gradient at the second step. Adam's epsilon is so large that rounding in a gradient near zero turns no update
    around."""
    model = trained.module
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, weight_decay=0.0)
    without = set()
    for step in range(STEPS):
        for number, tokens in enumerate(documents()):
            if number % ranks == rank:
                torch.manual_seed(100 * step + number)
                logits = model(input_ids=tokens, use_cache=False).logits
                loss = functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum") / 100
                (loss * ranks).backward()
        if step == 1:
            named = model.named_parameters()
            without = {name for name, p in named if p.requires_grad and (p.grad is None or not bool(p.grad.any()))}
        optimizer.step()
        optimizer.zero_grad()
    return without


def loss_of(model: nn.Module) -> float:
    """Without dropout and noise."""
    model.eval()
    with torch.no_grad():
        logits = [(model(input_ids=tokens).logits[0, :-1], tokens[0, 1:]) for tokens in documents()]
    model.train()
    return sum(float(functional.cross_entropy(scores, labels)) for scores, labels in logits)


def _train_all(base: Path, out: Path, methods: list[tuple[str, int]], rank: int, ranks: int, store: str) -> None:
    with joined(rank, ranks, rank, store) as gang:
        for method, version in methods:
            trained = sharded.build(plan_of(spec(method, ranks, version)), base, gang, Unchanged())
            losses = [loss_of(trained.module)] if ranks == 1 else []
            without = train(trained, rank, ranks)
            losses += [loss_of(trained.module)] if ranks == 1 else []
            found = {p.name: (p.shape, p.start, p.parameter_values().clone()) for p in pieces(trained.module)}
            torch.save((losses, without, found), out / f"{method}-{version}-{rank}")
            if ranks == 1:
                _write_adapter(trained, out / "adapters" / method)


def _write_adapter(trained: TrainedModel, directory: Path) -> None:
    model = trained.module
    assert isinstance(model, PeftModel)
    directory.mkdir(parents=True)
    names = stored_names(model)
    tensors = {names[name]: p.detach().clone() for name, p in model.named_parameters() if name in names}
    assert set(trained.fixed) == set(fixed_tensors(model))
    save_file(
        {name: tensor.contiguous() for name, tensor in (tensors | trained.fixed).items()}, directory / "adapter_model.safetensors"
    )
    (directory / "adapter_config.json").write_text(json.dumps(adapter_settings(model, "base")))
    model.eval()
    with torch.no_grad():
        torch.save((dict(model.state_dict()), model(input_ids=documents()[0]).logits), directory / "expected")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    assert run_processes([partial(_train_all, base, out, [(method, 2) for method in ALL], 0, 1, f"file://{out}/store")]) == [0]
    return out


@pytest.fixture(scope="module")
def pair(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pair")
    methods = [(method, version) for method in ALL for version in (1, 2)]
    assert run_processes([partial(_train_all, base, out, methods, rank, 2, f"file://{out}/store") for rank in range(2)]) == [0, 0]
    return out


def ended_on(out: Path, method: str, version: int, ranks: int) -> dict[str, torch.Tensor]:
    return whole(torch.load(out / f"{method}-{version}-{rank}")[2] for rank in range(ranks))


@pytest.mark.parametrize("method", ALL)
def test_every_trained_parameter_gets_a_gradient_and_the_loss_falls(alone: Path, method: str) -> None:
    losses, without, found = torch.load(alone / f"{method}-2-0")
    assert found
    assert without == set()
    assert losses[1] < losses[0]


@pytest.mark.parametrize("method", ALL)
def test_peft_loads_the_adapter_with_every_tensor_equal_and_the_same_logits(base: Path, alone: Path, method: str) -> None:
    directory = alone / "adapters" / method
    state, logits = torch.load(directory / "expected")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory).eval()
    found = loaded.state_dict()
    assert set(found) == set(state)
    assert [name for name in state if not torch.equal(found[name], state[name])] == []
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=documents()[0]).logits, logits)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("method", ALL)
def test_two_ranks_end_on_the_weights_of_one(alone: Path, pair: Path, method: str, version: int) -> None:
    expected, found = ended_on(alone, method, 2, 1), ended_on(pair, method, version, 2)
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert (found[name] - values).abs().max() <= 1e-5, name


def _step_in_bfloat16(base: Path, rank: int, store: str) -> None:
    """One pass of every method where FSDP 2 computes in another type than the base is held in."""
    failed = {}
    with joined(rank, 2, rank, store) as gang:
        for method in ALL:
            wanted = spec(method, 2)
            wanted["parallelism"]["fsdp"]["mixedPrecision"] = {"paramDtype": "bfloat16"}
            trained = sharded.build(plan_of(wanted), base, gang, Unchanged())
            # Checked together at the end: a rank that fails alone leaves the other one waiting.
            try:
                with torch.autocast("cpu", dtype=trained.autocast) if trained.autocast else nullcontext():
                    logits = trained.module(input_ids=documents()[rank], use_cache=False).logits
                torch.autograd.backward(logits.float().square().mean())
            except RuntimeError as error:
                failed[method] = str(error)
    assert failed == {}


def test_every_method_computes_in_another_type_than_the_base_is_held_in(base: Path, tmp_path: Path) -> None:
    assert run_processes([partial(_step_in_bfloat16, base, rank, f"file://{tmp_path}/store") for rank in range(2)]) == [0, 0]
