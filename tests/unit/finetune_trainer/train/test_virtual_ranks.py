"""With an ordered reduction a job has the same bytes on any number of ranks, also if it changes within the run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch

from finetune_trainer.context import RunContext
from finetune_trainer.errors import InvariantError
from finetune_trainer.json_lines import read_lines
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.train import virtual_ranks
from finetune_trainer.train.virtual_ranks import VirtualRanks, ordered_sum
from tests.support.forked_ranks import Fault, run_gang, trained_files, wrap
from tests.support.tiny_model import run_context, tiny_spec, write_model_report

RANKS, STEPS = 4, 3


@dataclass(frozen=True)
class ManyThreads:
    """A rank's operations could be shared among threads, and say so when they are at work."""

    def arm(self, _rank: int) -> None:
        torch.set_num_threads(2)

        def checked(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            assert torch.get_num_threads() == 1, "sums would depend on the processors"
            return original(*arguments, **named)

        wrap("train.step:set_learning_rate", checked)


def spec(method: dict[str, Any], **training: Any) -> dict[str, Any]:
    return tiny_spec(
        method=method,
        training={"maxSteps": STEPS, "globalBatchSize": 8, "microBatchSize": 1, "reduction": "Ordered", **training},
        parallelism={"processesPerNode": RANKS, "fsdp": {"version": 2}},
        checkpoint={"everySteps": 2, "keep": 2},
        evaluation={"everySteps": 2},
    )


def trained(directory: Path, of: dict[str, Any], world_size: int, dtype: torch.dtype) -> tuple[dict[str, bytes], list[Any]]:
    """Files of a run on so many ranks, and loss, norm and held-out loss of each line of its history."""
    context = run_context(directory, of, dtype=dtype)
    write_model_report(context, reshard_after_forward=True)
    assert run_gang(context, [ManyThreads()] if is_ordered(of) else [], world_size=world_size) == [0] * world_size
    return trained_files(context), told(context)


def is_ordered(of: dict[str, Any]) -> bool:
    return bool(of["training"]["reduction"] == "Ordered")


def told(context: RunContext) -> list[Any]:
    lines = read_lines(context.workspace.history.read_text())
    return [tuple(line.get(name) for name in ("step", "loss", "gradient_norm", "eval_loss", "tokens")) for line in lines]


def test_any_number_of_ranks_trains_the_same_bytes(tmp_path: Path) -> None:
    """The sweep trains other methods."""
    method = {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1"}}
    first, *others = (trained(tmp_path / str(count), spec(method), count, torch.bfloat16) for count in (4, 3, 1))
    assert "adapter_model.safetensors" in first[0]
    assert [line[0] for line in first[1]] == list(range(STEPS + 1))
    assert all(None not in line[1:3] for line in first[1][1:])
    assert first[1][-1][3] is not None
    assert others == [first] * len(others)


def test_a_run_that_is_killed_goes_on_with_the_same_bytes_on_fewer_ranks(tmp_path: Path) -> None:
    method = {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1"}}
    undisturbed, history = trained(tmp_path / "undisturbed", spec(method), RANKS, torch.float32)
    context = run_context(tmp_path / "killed", spec(method))
    write_model_report(context, reshard_after_forward=True)
    assert -SIGKILL in run_gang(context, [Fault("train.step:set_learning_rate", call=3)])
    assert run_gang(context, world_size=2) == [0, 0]
    assert trained_files(context) == undisturbed
    assert told(context)[-1] == history[-1]


def test_without_an_ordered_reduction_the_number_of_ranks_decides(tmp_path: Path) -> None:
    """Or the tests above could not fail."""
    method = {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1"}}
    runs = [
        trained(tmp_path / f"{count}", spec(method, reduction="Fast") | {"parallelism": ranks(count)}, count, torch.float32)[0]
        for count in (2, 1)
    ]
    assert runs[0] != runs[1]


def ranks(count: int) -> dict[str, Any]:
    return {"processesPerNode": count, "fsdp": {"version": 2}}


@pytest.mark.parametrize(("count", "world_size", "expected"), [
    (4, 4, [[0], [1], [2], [3]]), (4, 3, [[0], [1], [2, 3]]), (4, 2, [[0, 1], [2, 3]]), (5, 2, [[0, 1], [2, 3, 4]]),
    (8, 3, [[0, 1], [2, 3, 4], [5, 6, 7]]), (4, 1, [[0, 1, 2, 3]]),
])  # fmt: skip
def test_each_virtual_rank_is_computed_once_and_each_rank_has_as_many_rounds(
    count: int, world_size: int, expected: list[list[int]]
) -> None:
    gangs = [VirtualRanks(count, Gang(rank, world_size, rank, torch.device("cpu"), None)) for rank in range(world_size)]
    assert [list(virtual.of(rank)) for rank, virtual in enumerate(gangs)] == expected
    most = max(map(len, expected))
    assert {virtual.rounds for virtual in gangs} == {most}
    for virtual, own in zip(gangs, expected, strict=True):
        rounds = [virtual.in_round(number) for number in range(most)]
        assert [rank for rank, counts in rounds if counts] == own
        assert all(rank == own[-1] for rank, counts in rounds if not counts)


def test_more_ranks_than_virtual_ones_are_refused() -> None:
    with pytest.raises(InvariantError, match="3 ranks cannot share 2 virtual ranks"):
        VirtualRanks(2, Gang(0, 3, 0, torch.device("cpu"), None))


@pytest.mark.parametrize("at_once", [1, 3, 7, 8])
def test_gradients_are_summed_some_values_at_a_time(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(virtual_ranks, "ORDERED_VALUES_AT_ONCE", at_once)
    alone = VirtualRanks(3, Gang(0, 1, 0, torch.device("cpu"), None))
    own = [torch.arange(7.0), 10 * torch.arange(7.0), torch.full((7,), 100.0)]
    assert ordered_sum(own, alone).tolist() == [100.0, 111.0, 122.0, 133.0, 144.0, 155.0, 166.0]
