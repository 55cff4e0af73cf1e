"""Settings of optimizers that torch refuses, that destroy the weights, or that the chosen optimizer does not have."""

from typing import Any

import pytest
import torch
from torch import nn

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.model.adapters import attach
from finetune_trainer.train.optimizers import build_optimizer, decays, set_learning_rate
from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import JOB, changed, plans, settled
from tests.pitfalls.one_process import llama, tokens

RATE = 1e-2


def stepped(plan: RunPlan, steps: int = 3, rate: float = RATE) -> tuple[nn.Module, list[float]]:
    """A tiny model after these steps of the trainer's own optimizer, and the loss before each of them."""
    torch.manual_seed(1)
    model = attach(llama(), plan) if plan.method.trains_adapter else llama()
    optimizer = build_optimizer(pieces(model), plan)
    set_learning_rate(optimizer, rate)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def trained_values(plan: RunPlan) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in stepped(plan)[0].parameters() if p.requires_grad])


@pytest.mark.parametrize("beta", ["adamBeta1", "adamBeta2"])
def test_moments_that_never_fade_are_refused_by_torch(beta: str):
    wrong, right = plans("adam-beta-range", {f"training.{beta}": "1"})
    with pytest.raises(ValueError, match="Invalid beta parameter"):
        stepped(wrong)
    assert stepped(right)[1][-1] < stepped(right)[1][0]


def test_an_epsilon_of_0_divides_0_by_0():
    """The gradient of lora_A is exactly zero at the first step, because lora_B is."""
    wrong, right = plans("adam-epsilon-zero", {"training.adamEpsilon": "0"})
    assert trained_values(wrong).isnan().any()
    assert trained_values(right).isfinite().all()


def test_momentum_of_1_grows_without_bound():
    wrong, right = plans("momentum-range", {"training.optimizer": "SGD", "training.momentum": "1"})
    for plan, bounded in ((wrong, False), (right, True)):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=plan.training.momentum)
        sizes = []
        for _ in range(100):
            before = float(weight)
            weight.grad = torch.ones(1)
            optimizer.step()
            sizes.append(before - float(weight))
        assert (sizes[-1] < 1 / (1 - 0.9) + 1e-3) is bounded
        assert bounded or sizes == [pytest.approx(step) for step in range(1, 101)]


@pytest.mark.parametrize(
    ("rule", "deaf", "listening", "setting", "value"),
    [
        ("no-effect-momentum", "AdamW", "SGD", "momentum", "0.5"),
        ("no-effect-momentum", "RAdam", "SGD", "momentum", "0.5"),
        ("no-effect-adam-settings", "SGD", "AdamW", "adamBeta1", "0.5"),
        ("no-effect-adam-settings", "SGD", "AdamW", "adamEpsilon", "1"),
    ],
)
def test_settings_that_an_optimizer_does_not_have(rule: str, deaf: str, listening: str, setting: str, value: str):
    wrong, right = plans(rule, {"training.optimizer": deaf, f"training.{setting}": value})
    assert settled(wrong) != settled(right)
    assert torch.equal(trained_values(wrong), trained_values(right))
    heard = [
        plan.model_copy(update={"training": plan.training.model_copy(update={"optimizer": listening})}) for plan in (wrong, right)
    ]
    assert not torch.equal(*(trained_values(plan) for plan in heard))


def test_lora_b_learns_slower_below_a_ratio_of_1():
    wrong, right = plans("lora-plus-ratio-range", {"method.lora.loraPlusRatio": "0.1"})
    reached = [stepped(plan, steps=12)[1][-1] for plan in (wrong, right)]
    assert reached[0] > reached[1] + 0.05


@pytest.mark.parametrize(
    "changes",
    [
        {"training.learningRate": "50"},
        {"method.lora.r": 1, "method.lora.loraAlpha": 65536, "training.learningRate": "1e-2"},
        {"method.type": "Full", "method.lora": None, "training.learningRate": "1"},
    ],
    ids=["rate", "scaling", "full"],
)
def test_steps_larger_than_the_weights_unlearn(changes: dict[str, Any]):
    """On tokens that a usual rate learns."""
    wrong, right = plans("steps-too-large", changes)
    for plan, learns in ((wrong, False), (right, True)):
        losses = stepped(plan, steps=12, rate=plan.training.learning_rate)[1]
        assert (losses[-1] < losses[0] - 1e-4) is learns


@pytest.mark.parametrize("optimizer", ["AdamW", "RAdam", "SGD"])
def test_decay_of_one_over_the_rate_erases_the_weights(optimizer: str):
    """Whatever a weight was, after the step it is the same."""
    changes = {"method.type": "Full", "training.optimizer": optimizer, "training.learningRate": str(RATE)}
    wrong, right = plans("weight-decay-erases", {**changes, "training.weightDecay": str(1 / RATE)})
    for plan, is_erased in ((wrong, True), (right, False)):
        reached = []
        for start in (1.0, 2.0):
            model = nn.Linear(4, 4, bias=False)
            nn.init.constant_(model.weight, start)
            optimiser = build_optimizer(pieces(model), plan)
            set_learning_rate(optimiser, plan.training.learning_rate)
            model.weight.grad = torch.ones_like(model.weight)
            optimiser.step()
            reached.append(model.weight.detach().clone())
        assert torch.allclose(*reached, atol=1e-6) is is_erased


def decayed(rank: int, plan: RunPlan) -> tuple[bool, str]:
    """Whether weight decay alone moves a normalisation weight, and what the trainer says to such parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        llama(), use_orig_params=bool(plan.parallelism.fsdp.use_orig_params), device_id=torch.device("cpu")
    )
    try:
        build_optimizer(pieces(model), plan)
        said = ""
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        said = f"{type(error).__name__}: {error}"
    # As a script does it that decides by names.
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if decays(name, tuple(p.shape)) is does], "weight_decay": 0.1 * does}
        for does in (True, False)
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1.0)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight")]
        assert norms
        return any(bool((norm != 1).any()) for norm in norms), said


def test_a_flat_parameter_decays_as_a_whole():
    """transformers would decay the normalisation weights, too; this trainer refuses it, preflight before it."""
    changes = {
        "method.type": "Full",
        "training.weightDecay": "0.1",
        "parallelism.processesPerNode": 2,
        "parallelism.fsdp.version": 1,
    }
    wrong, right = (
        resolve(JOB, FineTuneJobSpec.model_validate(changed(changes | {"parallelism.fsdp.useOrigParams": kept})), None)
        for kept in (False, True)
    )
    (moves, said), *_ = [result.value for result in run_ranks(decayed, wrong)]
    assert moves
    assert "shares one flat parameter with others that decay" in said
    assert [result.value for result in run_ranks(decayed, right)] == [(False, "")] * 2
