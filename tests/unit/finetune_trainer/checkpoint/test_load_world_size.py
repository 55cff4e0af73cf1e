"""A run that continues with another number of ranks sees the same data in the same order and learns the same."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.checkpoint.load import full_parameters
from finetune_trainer.checkpoint.manifest import Origin, read_manifest
from finetune_trainer.checkpoint.retention import checkpoint_directories
from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.train.batches import global_batch
from tests.support.forked_ranks import Fault, run_gang, wrap
from tests.support.tiny_model import run_context, tiny_spec

STEPS = 8
LARGEST_DIFFERENCE = 1e-6
"""Relative, of loss, gradient norm and final weights: float32 sums of other parts in another order."""


@dataclass(frozen=True)
class Seen:
    """Writes down which sequences a rank takes of which global batch."""

    directory: Path

    def arm(self, rank: int) -> None:
        self.directory.mkdir(exist_ok=True)

        def seen(original: Callable[..., list[int]], sequences: list[int], *arguments: Any) -> list[int]:
            part = original(sequences, *arguments)
            with (self.directory / f"{rank}.jsonl").open("a") as file:
                file.write(json.dumps([sequences, part]) + "\n")
            return part

        wrap("train.step:micro_batch", seen)

    def parts(self) -> dict[tuple[int, ...], list[int]]:
        """All parts taken, by global batch."""
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for path in self.directory.iterdir():
            for sequences, part in map(json.loads, path.read_text().splitlines()):
                found[tuple(sequences)] += part
        return found


def test_two_then_four_then_one_rank_learn_what_two_ranks_learn(tmp_path: Path) -> None:
    undisturbed = context_of(tmp_path / "undisturbed", 2)
    assert run_gang(undisturbed) == [0, 0]
    seen = [Seen(tmp_path / f"seen-{number}") for number in range(3)]
    contexts = [context_of(tmp_path / "changed", ranks) for ranks in (2, 4, 1)]
    # Killed in steps 4 and 7, so that the next gang continues after steps 2 and 6.
    assert any(run_gang(contexts[0], [seen[0], Fault("train.step:set_learning_rate", call=4, rank=1)]))
    assert any(run_gang(contexts[1], [seen[1], Fault("train.step:set_learning_rate", call=5, rank=3)]))
    assert run_gang(contexts[2], [seen[2]]) == [0]
    num_sequences = PreparedData.open(undisturbed.workspace.prepared).train.num_sequences
    training = undisturbed.plan.training
    for number, steps in enumerate((range(4), range(2, 7), range(6, STEPS))):
        parts = seen[number].parts()
        for step in steps:
            sequences = global_batch(step, training.global_batch_size, training.seed, num_sequences)
            assert sorted(parts[tuple(sequences)]) == sorted(sequences)
    expected, found = curve(undisturbed), curve(contexts[2])
    assert len(found) == len(expected) == STEPS
    loss, norm = (max(abs(a[kind] / b[kind] - 1) for a, b in zip(found, expected, strict=True)) for kind in (0, 1))
    weights, wanted = (trained_values(context) for context in (contexts[2], undisturbed))
    weight = float((weights - wanted).norm() / wanted.norm())
    print(f"2 -> 4 -> 1 ranks, relative: loss {loss:.1e}, gradient norm {norm:.1e}, final weights (L2) {weight:.1e}")
    assert max(expected)[0] - min(expected)[0] > 0.05
    assert max(loss, norm, weight) < LARGEST_DIFFERENCE


def context_of(claims: Path, ranks: int) -> RunContext:
    method = {"type": "LoRA", "lora": {"r": 4}}
    return run_context(claims, tiny_spec(method=method, training={"maxSteps": STEPS}, parallelism={"processesPerNode": ranks}))


def curve(context: RunContext) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    lines = [json.loads(line) for line in context.workspace.history.read_text().splitlines()]
    by_step = {line["step"]: (line["loss"], line["gradient_norm"]) for line in lines if "loss" in line}
    return [by_step[step] for step in range(1, STEPS + 1)]


def trained_values(context: RunContext) -> torch.Tensor:
    """All trained values of the last checkpoint, in float64."""
    newest = checkpoint_directories(context.workspace.checkpoints)[0]
    manifest = read_manifest(newest, Origin(learning_sha256=context.learning_sha256, data_hash=data_hash(context)))
    return torch.cat([tensor.flatten().double() for _, tensor in full_parameters(newest, manifest)])


def data_hash(context: RunContext) -> str:
    return PreparedData.open(context.workspace.prepared).data_hash


def test_a_run_that_learns_something_else_starts_anew(tmp_path: Path) -> None:
    context = context_of(tmp_path, 1)
    for changes, is_same in (
        ({"training": {"micro_batch_size": 4, "gradient_accumulation_steps": 1}}, True),
        ({"parallelism": {"nodes": 3}}, True),
        ({"checkpoint": {"keep": 5}}, True),
        ({"training": {"seed": 4}}, False),
        ({"training": {"max_steps": 9}}, False),
        ({"job": {"uid": "another"}}, False),
        ({"method": {"type": "DoRA"}}, False),
        ({"data": {"max_sequence_length": 32}}, False),
    ):
        document = context.plan.model_dump()
        for part, values in changes.items():
            document[part].update(values)
        other = replace(context, plan=type(context.plan).model_validate(document))
        assert (other.learning_sha256 == context.learning_sha256) is is_same, changes
