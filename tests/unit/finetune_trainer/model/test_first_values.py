"""Adapters that start from the base's weights: PEFT's values and PEFT's training, the same bytes after a kill, and a plain LoRA
adapter at the end.
"""

import json
import os
import threading
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from finetune_job.api.method import LoraInit
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_trainer.context import RunContext
from finetune_trainer.errors import ConfigError, InvariantError
from finetune_trainer.files import file_sha256
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.first_values import decompose, ensure_first_values, start_from
from finetune_trainer.model.load import load_base_model
from finetune_trainer.model.load_shards import base_name
from finetune_trainer.preflight.model_process import computed_first_values
from tests.support.forked_ranks import Fault, run_gang, trained_files
from tests.support.tiny_model import plan_of, run_context, tiny_spec, write_tiny_llama

TOKENS = torch.arange(40).view(2, 20)


def lora(init: str, **settings: Any) -> dict[str, Any]:
    return {"type": "LoRA", "lora": {"r": 4, "targetModules": ["q_proj", "down_proj"], "initLoraWeights": init, **settings}}


def base_of(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def started(model: Path, path: Path, method: dict[str, Any]) -> PeftModel:
    """As a rank holds it."""
    plan = plan_of(tiny_spec(method=method))
    ensure_first_values(plan, model, path)
    adapted = attach(base_of(model), plan)
    start_from(adapted, path)
    return adapted


@pytest.mark.parametrize(
    ("init", "is_transposed"),
    # PEFT takes such a weight the wrong way round in olora_init.
    [("pissa", False), ("pissa", True), ("pissa_niter_4", False), ("pissa_niter_4", True), ("olora", False)],
)
def test_a_layer_starts_as_peft_starts_it(init: str, is_transposed: bool) -> None:
    torch.manual_seed(1)
    root = nn.Sequential(nn.Linear(24, 16, bias=False))
    if is_transposed:
        root[0] = Conv1D(16, 24)
        nn.init.normal_(root[0].weight)
    weight = root[0].weight.detach().clone()
    layer = get_peft_model(root, LoraConfig(target_modules=["0"], r=4, lora_alpha=6)).base_model.model[0]
    torch.manual_seed(5)
    getattr(layer, "olora_init" if init == "olora" else "pissa_init")(*["default"] + [init] * (init != "olora"))
    a, b = decompose(weight.T if is_transposed else weight, LoraInit(init), 4, 1.5, seed=5)
    wanted_a, wanted_b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    # A singular vector's sign is free.
    sign = torch.sign((a * wanted_a).sum(dim=1))
    assert torch.allclose(a * sign[:, None], wanted_a, atol=1e-5)
    assert torch.allclose(b * sign, wanted_b, atol=1e-5)
    rest = weight - (1.5 * b @ a).T if is_transposed else weight - 1.5 * b @ a
    assert torch.allclose(rest, layer.base_layer.weight, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_training_is_that_of_peft(model: Path, tmp_path: Path, init: str) -> None:
    ours = started(model, tmp_path / "first", lora(init, loraAlpha=6, loraDropout="0.2", rankPattern={"down_proj": 3}))
    theirs = get_peft_model(
        base_of(model),
        LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=6,
            lora_dropout=0.2,
            rank_pattern={"down_proj": 3},
            target_modules=["q_proj", "down_proj"],
            init_lora_weights=init,
        ),
    )
    losses = [trained_losses(each) for each in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    assert losses[0][-1] < 0.99 * losses[0][0]


def trained_losses(model: PeftModel) -> list[float]:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=30.0)
    found = []
    for _ in range(4):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_training_starts_at_the_base_model_and_leaves_it(model: Path, tmp_path: Path) -> None:
    adapted = started(model, tmp_path / "first", lora("pissa", modulesToSave=["lm_head"], loraDropout="0.5"))
    base = base_of(model)
    held = {base_name(name): value for name, value in adapted.named_parameters()}
    assert all(torch.equal(held[name], value) for name, value in base.named_parameters())
    with torch.no_grad():
        assert torch.allclose(adapted.eval()(input_ids=TOKENS).logits, base(input_ids=TOKENS).logits, atol=1e-5)
    assert not any("first_values" in name for name, value in adapted.named_parameters() if value.requires_grad)
    assert sum(value.numel() for value in adapted.parameters() if value.requires_grad) == 2 * 4 * (64 + 96) + 264 * 32


def test_values_are_computed_once_for_a_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plan = tmp_path / "first", plan_of(tiny_spec(method=lora("olora")))
    (tmp_path / "first.tmp-1").touch()
    digest = ensure_first_values(plan, model, path)
    assert list(tmp_path.iterdir()) == [path]
    with monkeypatch.context() as patched:
        patched.setattr("finetune_trainer.model.first_values.decompose", None)
        assert ensure_first_values(plan, model, path) == digest
    # Cut short, or of another run, it is computed again.
    path.write_bytes(path.read_bytes()[:-1])
    assert ensure_first_values(plan, model, path) == digest
    assert ensure_first_values(plan_of(tiny_spec(method=lora("olora", r=3))), model, path) != digest
    with pytest.raises(InvariantError, match="has shape"):
        start_from(attach(base_of(model), plan), path)
    assert ensure_first_values(plan_of(tiny_spec(method=lora("olora", targetModules=["q_proj"]))), model, path)
    with pytest.raises(InvariantError, match="no first values"):
        start_from(attach(base_of(model), plan), path)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_somebody_else_put_in_their_place_is_replaced(model: Path, tmp_path: Path, kind: str) -> None:
    plan, path, other = plan_of(tiny_spec(method=lora("olora"))), tmp_path / "first-values.safetensors", tmp_path / "other"
    digest = ensure_first_values(plan, model, other)
    if kind == "pipe":
        os.mkfifo(path)
        # Whoever waits for it goes on after a while.
        release = threading.Timer(20, lambda: os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK)))
        release.daemon = True
        release.start()
    else:
        path.symlink_to(other)
    assert ensure_first_values(plan, model, path) == digest
    assert path.is_file()
    assert not path.is_symlink()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"targetModules": ["embed_tokens"]}, "embed_tokens is a Embedding"),
        ({"r": 33}, "starts rank 33 from a weight of rank 32 at most: model.layers.0.mlp.down_proj"),
    ],
)
def test_what_cannot_be_decomposed_is_refused(model: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        attach(base_of(model), plan_of(tiny_spec(method=lora("pissa", **settings))))


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("pissa", {"useRslora": True, "rankPattern": {"down_proj": 2}, "alphaPattern": {"down_proj": 5}}),
    "packed": ("olora", {"modulesToSave": ["lm_head"]}),
}
"""With FSDP 2 the values are packed, too; the sweep resumes such runs with unpacked ones."""


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_on_the_same_bytes_as_a_plain_lora(tmp_path: Path, name: str) -> None:
    init, settings = RUNS[name]
    ranks = 1 if name == "alone" else 2
    method = {**lora(init, **settings), "type": "QLoRA" if name == "packed" else "LoRA"}
    spec = tiny_spec(
        method=method, training={"maxSteps": 4}, checkpoint={"everySteps": 1}, parallelism={"processesPerNode": ranks}
    )
    undisturbed, killed = run_context(tmp_path / "whole", spec), run_context(tmp_path / "killed", spec)
    assert run_gang(undisturbed) == [0] * ranks
    assert run_gang(killed, [Fault("train.step:optimizer_step", call=3)]) != [0] * ranks
    first = killed.workspace.first_values.read_bytes()
    assert run_gang(killed) == [0] * ranks
    assert killed.workspace.first_values.read_bytes() == first
    assert trained_files(killed) == trained_files(undisturbed)
    check_plain(undisturbed)


@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
def test_fork_counts_from_the_first_values_of_its_start(tmp_path: Path, is_lost: bool) -> None:
    """The weights of the start and its first values give the model that the start had trained."""
    one_rank: dict[str, Any] = {"method": lora("pissa"), "parallelism": {"processesPerNode": 1}}
    other = run_context(tmp_path, tiny_spec(training={"maxSteps": 2, "learningRate": "1e-2"}, **one_rank))
    assert run_gang(other) == [0]
    place = other.workspace.root.with_name("other")
    other.workspace.root.rename(place)
    start = str((place / "checkpoints/step-0000000002").relative_to(other.claims_root / other.plan.workspace.claim))
    if is_lost:
        (place / "first-values.safetensors").unlink()
    still = {"maxSteps": 1, "learningRate": "1e-20", "startFrom": start}
    fork = run_context(tmp_path, tiny_spec(training=still, checkpoint={"everySteps": 1}, **one_rank))
    if is_lost:
        assert run_gang(fork) == [EXIT_CODES[FailureClass.CHECKPOINT_INVALID]]
        return
    assert computed_first_values(fork) == file_sha256(place / "first-values.safetensors")
    assert run_gang(fork, [Fault("train.step:optimizer_step", call=1)]) == [-SIGKILL]
    assert run_gang(fork) == [0]
    trained, started = (
        load_file(directory / "adapter_model.safetensors") for directory in (place / "trained", fork.workspace.adapter)
    )
    assert trained.keys() == started.keys()
    assert all(torch.equal(started[name], values) for name, values in trained.items())


def check_plain(context: RunContext) -> None:
    """PEFT loads it on the stored base, and computes what was trained."""
    directory = context.workspace.adapter
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["init_lora_weights"] is True
    base, plain, started_base = (load_base_model(context.plan, context.base_model, torch.device("cpu")) for _ in range(3))
    loaded = PeftModel.from_pretrained(plain, directory)
    trained = attach(started_base, context.plan)
    start_from(trained, context.workspace.first_values)
    file = load_file(directory / "adapter_model.safetensors")
    assert {name.partition("layers.0.")[2] for name in file if "layers.0" in name} == {
        f"{module}.lora_{side}.weight" for module in ("self_attn.q_proj", "mlp.down_proj") for side in "AB"
    }
    with torch.no_grad():
        for name, value in trained.named_parameters():
            if "modules_to_save" in name:
                value.copy_(file[name.replace("modules_to_save.default.", "")])
            elif value.requires_grad:
                dimension = 0 if "lora_A" in name else 1
                value.copy_(file[name.replace(".default", "")].chunk(2, dimension)[0])
        before, wanted, found = (each(input_ids=TOKENS).logits for each in (base, trained, loaded))
    assert torch.allclose(found, wanted, atol=1e-5)
    assert not torch.allclose(found, before, atol=1e-3)
