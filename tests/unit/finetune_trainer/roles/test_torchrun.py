"""The arguments of torchrun on a node. What it does with them: test_train.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from finetune_trainer.errors import ConfigError
from finetune_trainer.roles.torchrun import Launch, torchrun_arguments
from finetune_trainer.roles.train import supervise
from tests.support.tiny_model import run_context, tiny_spec


def test_fewer_ranks_than_the_plans_are_all_of_a_gang_that_adds_up_in_order(tmp_path: Path) -> None:
    nodes = {"nodes": 2, "processesPerNode": 4, "fsdp": {"version": 2}}
    ordered = run_context(tmp_path, tiny_spec(parallelism=nodes, training={"reduction": "Ordered", "globalBatchSize": 8}))
    launch = Launch(Path("plan.json"), 0, "train-0.tiny", 29400, 0)
    told = torchrun_arguments(replace(ordered, until_step=4), replace(launch, ranks=3), tmp_path)
    assert told[-2:] == ["--until-step", "4"]
    assert [told[told.index(name) + 1] for name in ("--nnodes", "--nproc-per-node", "--master-addr")] == ["1", "3", "127.0.0.1"]
    told = torchrun_arguments(ordered, launch, tmp_path)
    assert [told[told.index(name) + 1] for name in ("--nnodes", "--nproc-per-node", "--master-addr")] == [
        "2",
        "4",
        "train-0.tiny",
    ]
    # An attempt of an elastic gang: fewer nodes, with all of their processes.
    for nodes, address in ((1, "127.0.0.1"), (2, "train-0.tiny")):
        told = torchrun_arguments(ordered, replace(launch, nodes=nodes), tmp_path)
        assert [told[told.index(name) + 1] for name in ("--nnodes", "--nproc-per-node", "--master-addr")] == [
            str(nodes),
            "4",
            address,
        ]
    for other, said in ((replace(launch, ranks=3), "--ranks 3: "), (replace(launch, nodes=1), "--nodes 1: ")):
        with pytest.raises(ConfigError, match=said):
            supervise(run_context(tmp_path / "fast", tiny_spec()), other)
