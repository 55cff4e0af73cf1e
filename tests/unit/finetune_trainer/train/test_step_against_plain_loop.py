"""Losses and gradients of the real step, against a loop of transformers and PEFT alone: one process, one document at a time.

The loop below shares no code with the trainer: it takes the prepared documents, and makes batches, means and adapters by itself.
The bound is a relative L2 distance per tensor of 1e-6 in float32, over several steps of plain gradient descent, which lets no
difference hide behind Adam's division and none grow.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM

from finetune_trainer.data.batches import PreparedData
from finetune_trainer.train.batches import global_batch
from tests.support.cases import table
from tests.support.tiny_model import plan_of, run_context, tiny_spec
from tests.unit.finetune_trainer.train.recorded_steps import Recorded, distance, recorded_steps

BOUND = 1e-6
STEPS, RATE, SEED = 3, 0.5, 3
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = table(__file__, "CASES")


def ours(tmp_path: Path, method: dict[str, Any], parallelism: dict[str, Any], micro: int) -> Recorded:
    training = {"maxSteps": STEPS, "globalBatchSize": 4, "microBatchSize": micro, "seed": SEED, "maxGradNorm": "0"}
    context = run_context(tmp_path, tiny_spec(method=method, training=training, parallelism=parallelism))
    return recorded_steps(context, tmp_path, STEPS, RATE)


def plain_loop(
    model_directory: Path, documents: list[list[tuple[torch.Tensor, torch.Tensor]]], method: dict[str, Any]
) -> Recorded:
    """`documents`: of each step, ids and labels. Nothing of the trainer."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="sdpa")
    settings = method["lora"]
    if settings is not None:
        torch.manual_seed(SEED)
        model = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=settings["r"],
                lora_alpha=2 * settings["r"],
                lora_dropout=0.0,
                target_modules=settings.get("targetModules", "all-linear"),
                modules_to_save=settings.get("modulesToSave"),
                use_dora=method["type"] == "DoRA",
            ),
        )
    model.train()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=RATE)
    steps: Recorded = []
    for batch in documents:
        count = sum(int((labels[1:] != -100).sum()) for _, labels in batch)
        loss = 0.0
        for tokens, labels in batch:
            logits = model(input_ids=tokens[None]).logits[0]
            part = functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum") / count
            part.backward()
            loss += float(part.detach())
        steps.append((loss, {name: parameter.grad.flatten().clone() for name, parameter in trained.items()}))
        optimizer.step()
        optimizer.zero_grad()
    return steps


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def of(name: str) -> Recorded:
        method = CASES[name][0]
        context = run_context(tmp_path_factory.mktemp("plain"), tiny_spec(method=method))
        data = PreparedData.open(context.workspace.prepared).train
        documents = []
        for step in range(STEPS):
            found = []
            for sequence in global_batch(step, 4, SEED, data.num_sequences):
                batch = data.batch([sequence])
                starts = [place for place, position in enumerate(batch.position_ids[0].tolist()) if position == 0]
                bounds = [*starts, batch.input_ids.shape[1]]
                found += [(batch.input_ids[0, a:b], batch.labels[0, a:b]) for a, b in pairwise(bounds)]
            documents.append([(tokens, labels) for tokens, labels in found if bool((labels[1:] != -100).any())])
        assert sum(map(len, documents)) > 4 * STEPS, "no sequence holds more than one document"
        return plain_loop(context.base_model, documents, method)

    firsts: dict[str, str] = {}
    return lambda name: of(firsts.setdefault(str(CASES[name][0]), name))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_a_plain_loop(expected: Any, tmp_path: Path, name: str) -> None:
    wanted = expected(name)
    found = ours(tmp_path, *CASES[name])
    for step, ((found_loss, found_gradients), (loss, gradients)) in enumerate(zip(found, wanted, strict=True)):
        assert found_loss == pytest.approx(loss, rel=BOUND)
        assert set(found_gradients) == set(gradients)
        for tensor_name, gradient in gradients.items():
            assert distance(found_gradients[tensor_name], gradient) <= BOUND, (tensor_name, step)


def test_plan_defaults_are_those_that_the_plain_loop_assumes() -> None:
    lora = plan_of(tiny_spec(method=CASES["lora-alone"][0])).method.lora
    assert lora is not None
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (4, 8, 0.0)
