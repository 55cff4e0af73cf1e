"""Every benchmark from start to end, on toys: what it measures these cannot show, that it still runs, they do.

The operator's pace needs a control plane and is tried in tests/integration/test_operator_pace.py, the chain needs a node and is
tried in tests/e2e/test_chain.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import psutil
import pytest

from bench.chain import __main__ as chain
from bench.gpu import __main__ as gpu
from bench.gpu import check, tiers
from bench.gpu.scale import Scale, Tier
from bench.memory import __main__ as memory
from bench.memory import packed_load
from bench.merge import __main__ as merge
from bench.merge import model
from bench.preflight import __main__ as preflight
from bench.prepare import __main__ as prepare
from bench.spot import __main__ as spot
from bench.starts import __main__ as starts
from bench.trainer import __main__ as trainer
from bench.validate import __main__ as validate
from tests.support.living import living
from tests.support.stack import Stack
from tests.unit.bench import warm_subprocess


def run(monkeypatch: pytest.MonkeyPatch, benchmark: ModuleType, *arguments: str) -> int:
    """As the command is called."""
    monkeypatch.setattr("sys.argv", [benchmark.__name__, *arguments])
    code: int = benchmark.main()
    return code


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trainer, "RESULTS", tmp_path)
    monkeypatch.setattr(trainer, "subprocess", warm_subprocess)
    assert run(monkeypatch, trainer, "--toy", "--ranks", "1", "--runs", "1", "--steps", "6") == 0
    (record,) = tmp_path.iterdir()
    world = json.loads(record.read_text())["worlds"]["1"]
    assert world["problems"] == []
    assert list(world["contenders"]) == ["ours", "bare", "trl"]
    for found in world["contenders"].values():
        assert found["supervised_tokens"] > 0
        assert found["tokens_per_second"][0] > 0
        assert 0 < found["final_loss"] < 10
    assert world["contenders"]["trl"]["stated"]["distribution"] == "one process"
    assert [verdict["target"] for verdict in world["verdicts"]] == ["more than 1", "at least 0.97"]
    assert "ours / trl, tokens_per_cpu_second: median" in capsys.readouterr().out


def test_merging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(merge, "RESULTS", tmp_path)
    monkeypatch.setattr(merge, "subprocess", warm_subprocess)
    for times in ("COPIES", "VERIFICATIONS", "IMPORTS"):
        monkeypatch.setattr(merge, times, 1)
    assert run(monkeypatch, merge, "--parameters", "toy", "--pairs", "1") == 0
    (record,) = tmp_path.iterdir()
    found = json.loads(record.read_text())
    # Embeddings, head and the last norm, and seven linear layers and two norms in each of two.
    assert (found["num_tensors"], found["different_tensors"], found["verdicts"]) == (21, [], [])
    assert all(found[name]["median_seconds"] > 0 for name in ("copy", "ours", "peft"))
    assert found["compute"]["threads"] > 0
    assert {name: len(each["seconds"]) for name, each in found["verification"].items()} == {"alone": 1, "with the merge": 1}
    assert "tensors: 21, different from PEFT's: 0" in capsys.readouterr().out


def test_a_merge_changes_the_layers_that_are_adapted(tmp_path: Path) -> None:
    """What is compared with PEFT's is not the base."""
    base, other = tmp_path / "base", tmp_path / "other"
    model.write_base(base, "toy")
    model.write_base(other, "toy")
    assert merge.different_tensors(base, other) == []
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert merge.different_tensors(base, other) == ["lm_head.weight"]


def test_starting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(starts, "IMPORTS", 1)
    monkeypatch.setattr(starts, "IMPORT", "import pydantic")
    assert run(monkeypatch, starts, "--toy") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"preflight", "train", "all"} <= {line.split()[0] for line in lines}
    assert [line.partition(": ")[0] for line in lines[-3:]] == [
        "processor time of the run, in imports",
        "processor time of preflight with a kept verdict, in imports",
        "seconds from the kill of a rank to the next trained step",
    ]
    assert not any(": none" in line for line in lines[-3:])


def test_predicting_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memory, "CASES", memory.CASES[:2])
    assert run(monkeypatch, memory) == 0
    assert "CPU: 2 cases, largest error " in capsys.readouterr().out


def test_spot_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(spot, "RESULTS", Path("/nowhere"))
    # It would be that of all tests to come in this process.
    monkeypatch.setattr(spot, "configure_logs", lambda _level: None)
    assert run(monkeypatch, spot, "--runs", "1", "--node-hours", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = [number for number, line in enumerate(lines) if "1 node hours of work on 8 spot nodes, 1 traces" in line]
    assert [line.split("  ")[1] for line in lines[first + 1 : first + 4]] == ["fixed size", "elastic", "elastic, adaptive saves"]


def test_preparing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prepare, "RESULT", tmp_path / "prepare.json")
    monkeypatch.setattr(prepare, "subprocess", warm_subprocess)
    arguments = ("--bytes", "0.05MB", "--runs", "1", "--processes", "1", "--tokenizer", "words")
    assert run(monkeypatch, prepare, *arguments) == 0
    found = json.loads((tmp_path / "prepare.json").read_text())
    assert found["different_counts"] == []
    assert found["ours"]["counts"]["records"] > 10
    assert found["ours"]["peak_bytes"][0] > 0
    assert "different counts: none" in capsys.readouterr().out


def test_the_chain_keeps_the_parts_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a run on the node is measured by, tests/e2e/test_chain.py shows; the local one is that of `make demo`."""
    monkeypatch.setattr(chain, "RESULT", tmp_path / "results" / "chain.json")
    monkeypatch.setattr(chain, "Stack", MagicMock())
    started: list[list[object]] = []
    stand_in = SimpleNamespace(run=lambda command, **_: started.append(command), DEVNULL=None)
    monkeypatch.setattr(chain, "subprocess", stand_in)
    monkeypatch.setattr(chain, "on_the_node", lambda _, name: {"first_step": 9.0, "succeeded": 20.0 + len(name)})
    monkeypatch.setattr("sys.argv", ["chain", "--runs", "2"])
    chain.main()
    found = json.loads((tmp_path / "results" / "chain.json").read_text())
    assert found["seconds"]["succeeded"] == {"median": 27.0, "min": 27.0, "max": 27.0}
    assert found["ratio_to_local"]["min"] > 0
    # The claims of the quick start, and a local run for each on the node.
    assert [str(command[1]) for command in started] == ["-m", "run", "run"]
    assert capsys.readouterr().out.startswith("run 1: first_step 9.0 s, succeeded 27.0 s; local ")


def test_the_night_runs_every_benchmark() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    targets = set(re.findall(r"^(bench-[a-z0-9-]+): environment ##", makefile, re.MULTILINE))
    nightly = makefile[makefile.index("\nnightly-pace:") : makefile.index("\n.PHONY: clean")]
    # Tens of GB of disk, and a quarter of an hour each.
    assert targets - set(re.findall(r"bench-[a-z0-9-]+", nightly)) == {"bench-merge-7b", "bench-prepare-memory"}


def test_the_chain_of_a_job_that_fails_has_no_figures() -> None:
    failed = {"status": {"conditions": [{"type": "Succeeded", "status": "False", "reason": "TrainingFailed"}]}}
    stack = Mock(spec=Stack, **{"wait_for_condition.return_value": failed})
    with pytest.raises(RuntimeError, match=r"(?s)mine did not succeed.*TrainingFailed"):
        chain.on_the_node(stack, "mine")


TIERS = (
    "kernels", "calibration", "throughput", "waits", "paths", "resume", "methods", "out-of-memory", "pod", "launcher", "planner",
    "verification", "stall", "settings", "long", "longest",
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "contenders", "methods"),
    [
        (["--quick"], {"ours": 2, "trl": 1, "deterministic": 1}, 1),
        # Every branch that a CPU can take.
        pytest.param([], {"ours": 2, "trl": 1, "compiled": 2, "deterministic": 1}, 8, marks=pytest.mark.nightly, id="whole"),
    ],
)
def test_what_a_gpu_would_show(
    capfd: pytest.CaptureFixture[str], options: list[str], contenders: dict[str, int], methods: int
) -> None:
    assert check.main(["--toy", *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.removeprefix("== ") for line in lines if line.startswith("== ")] == list(TIERS)
    assert lines[-1] == f"{len(TIERS)} of {len(TIERS)} tiers passed"
    for tier in TIERS:
        assert [line for line in lines if line.startswith(f"{tier}: passed")]
        assert [line for line in lines if line.startswith(f"{tier}: not shown, because there is no GPU: ")]
    for name, count in contenders.items():
        found = [line for line in lines if line.startswith(f"{name} on 1 x cpu: ")]
        assert len(found) == count
        assert all("MFU unknown" in line for line in found)
    # What an H100 would be compared with; of its 79 GiB.
    assert "   contender ours, size 8B, by calculation on NVIDIA H100 80GB HBM3, tokens per second 10360, GiB 66.8" in lines
    assert (
        "   contender compiled, size 8B-128k, by calculation on NVIDIA H100 80GB HBM3, tokens per second 2079, GiB 84.1" in lines
    )
    assert len([line for line in lines if line.startswith("   method ")]) == methods
    assert any("class HostOutOfMemory" in line for line in lines)
    assert any("   model gemma2" in line and "caps its attention scores, is_within_bound True" in line for line in lines)
    assert len([line for line in lines if line.startswith("   case GPU: ")]) == 30
    for part in ("flops", "attention", "memory"):
        assert any(line.startswith(f"   part {part}, reached ") and "share None, assumed 0." in line for line in lines)


def test_a_tier_that_fails_says_so_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.gpu import worker

    def breaks(_: object, rows: list[dict[str, object]]) -> str:
        rows.append({"loss": 1.5})
        raise RuntimeError("no kernel")

    monkeypatch.setattr(worker, "RESULTS", tmp_path / "gpu")
    scale: Any = SimpleNamespace(is_toy=False, name="H100")
    assert worker.run("broken", Tier(breaks, 1, "nothing"), scale) == "RuntimeError: no kernel"
    assert worker.run("wrong", Tier(lambda *_: "other bytes", 1, ""), scale) == "other bytes"
    assert worker.run("fine", Tier(lambda *_: "", 1, ""), scale) == ""
    lines = capsys.readouterr().out.splitlines()
    assert [line[:34] for line in lines if "FAILED" in line or "passed" in line] == [
        "broken: FAILED: RuntimeError: no k", "wrong: FAILED: other bytes (0.0 s)", "fine: passed (0.0 s)",
    ]  # fmt: skip
    kept = json.loads((tmp_path / "gpu/broken.json").read_text())
    assert (kept["problem"], kept["rows"]) == ("RuntimeError: no kernel", [{"loss": 1.5}])


PLAYED = """
import json, os, subprocess, sys, time
from multiprocessing.connection import Connection
limits = {"fine": 60, "hangs": 0.5, "wrong": 60, "dies": 60, "last": 60}
names = sys.argv[2:] or list(limits)
reports = Connection(int(sys.argv[1]), readable=False)
say = lambda what: reports.send_bytes(json.dumps(what).encode())
say({"on_device": True, "limits": {name: limits[name] for name in names}})
for name in names:
    print("==", name, flush=True)
    if name == "hangs":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open(os.environ["SLEEPER"], "w").write(str(child.pid))
        child.wait()
    if name == "dies":
        open(os.environ["LEFT"], "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
        os.kill(os.getpid(), 9)
    say({"tier": name, "problem": "other bytes" if name == "wrong" else ""})
"""
"""What plays the process of tiers, one of which hangs and one of which ends its process."""


def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> int:
    monkeypatch.setattr(check, "WORKER", (sys.executable, "-c", PLAYED))
    monkeypatch.setenv("SLEEPER", str(tmp_path / "sleeper"))
    monkeypatch.setenv("LEFT", str(tmp_path / "left"))
    return check.main(list(arguments))


def test_a_tier_that_hangs_or_ends_its_process_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert played(monkeypatch, tmp_path) == 1
    lines = capfd.readouterr().out.splitlines()
    assert [line[3:] for line in lines if line.startswith("== ")] == ["fine", "hangs", "wrong", "dies", "last"]
    assert "hangs: FAILED: not done after 0 s" in lines
    assert "dies: FAILED: its process ended with -9" in lines
    assert lines[-1] == "failed: hangs, wrong, dies"
    for started in ("sleeper", "left"):
        with suppress(psutil.NoSuchProcess):
            assert not living([psutil.Process(int((tmp_path / started).read_text()))]), started


def test_tiers_for_which_there_is_no_time_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # None was run: that proves nothing.
    assert played(monkeypatch, tmp_path, "--minutes", "0.005", "hangs", "fine") == 1
    assert capfd.readouterr().out.splitlines()[-3:] == [
        "left out, because 0.005 minutes are over: hangs, fine", "they run with: python -m bench.gpu.check hangs fine",
        "0 of 2 tiers passed",
    ]  # fmt: skip


def test_models_that_a_kernel_refuses_are_the_expected_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"model": "llama", "is_within_bound": True, "refused": "no kernel here"},
        {"model": "qwen3", "is_within_bound": True},
        {"model": "gemma2", "is_within_bound": False},
    ]
    monkeypatch.setattr(tiers, "kernel_rows", lambda _device: rows)
    assert tiers.kernels(Scale.of_this_machine(is_quick=True), []) == (
        "further from float32 on the CPU than they may be: gemma2; refused or taken against expectation: llama, gemma2"
    )


def test_a_tier_is_quick_by_its_name_too(capfd: pytest.CaptureFixture[str]) -> None:
    """So are those that are left when the process of a tier has ended."""
    assert check.main(["--toy", "--quick", "calibration"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "1 of 1 tiers passed"


def test_a_tier_that_nobody_knows_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--toy", "speed"]) == 1
    shown = capfd.readouterr()
    assert "invalid choice: 'speed'" in shown.err
    assert "tiers cannot run: its process ended with 2" in shown.out


def test_a_contender_that_hangs_is_ended_and_the_others_have_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def contender(name: str, directory: Path, *_: object, **__: object) -> subprocess.Popen[bytes]:
        (directory / "models").mkdir(exist_ok=True)
        (directory / "workspace").mkdir(exist_ok=True)
        figures = {"starts": [0.0, 1.0, 2.0, 3.0], "loss": 5.0, "peak_memory_bytes": None, "device": "cpu"}
        (directory / "figures-0.json").write_text(json.dumps(figures))
        return subprocess.Popen(["sleep", "1000" if name == "trl" else "0"])

    monkeypatch.setattr(gpu, "contender", contender)
    command = ["--size", "tiny", "--runs", "1", "--steps", "3", "--run-seconds", "2", "--contenders", "trl", "ours"]
    assert gpu.main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run 1/1: trl ended with [-9]"
    assert [line.partition(" on ")[0] for line in lines[2:]] == ["ours"]


def test_loading_a_packed_base(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(packed_load, "SIZES", {"num_attention_heads": 4, "num_key_value_heads": 2})
    monkeypatch.setattr("sys.argv", ["packed_load", "--ranks", "2", "--layers", "1", "--versions", "2"])
    assert packed_load.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["2", "2"]] * 2


def test_looking_at_a_declared_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preflight, "MODELS", {"toy": {**preflight.LLAMA_70B, **model.SIZES["toy"]}})
    monkeypatch.setattr(preflight, "RESULT", tmp_path / "preflight.json")
    monkeypatch.setattr(preflight, "BARE", "import pydantic")
    # How fast and how large a look at a real model is, the benchmark itself says.
    monkeypatch.setattr(preflight, "LIMIT_SECONDS", 300.0)
    monkeypatch.setattr(preflight, "LIMIT_BYTES", 8 << 30)
    monkeypatch.setattr("sys.argv", ["preflight", "--models", "toy", "--methods", "LoRA"])
    assert preflight.main() == 0
    assert "refused: none" in capsys.readouterr().out
    assert json.loads((tmp_path / "preflight.json").read_text())["models"]["toy LoRA"]["findings"] == []


def test_validating(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(validate, "NUM_MANIFESTS", 3)
    monkeypatch.setattr(validate, "VOCABULARY", 1000)
    for limit in ("LIMIT_ONE_MS", "LIMIT_CHATS_MS"):
        monkeypatch.setattr(validate, limit, 60_000.0)
    monkeypatch.setattr("sys.argv", ["validate", "--runs", "1"])
    assert validate.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("finetune validate, ") == 3
    assert shown.count("finetune data, 1,000 chats") == 1


def test_a_benchmark_above_its_limit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "NUM_MANIFESTS", 1)
    monkeypatch.setattr(validate, "VOCABULARY", 1000)
    monkeypatch.setattr(validate, "measured", lambda command: (1.0, 301.0 if "validate" in command else 1.0))
    monkeypatch.setattr("sys.argv", ["validate", "--runs", "1"])
    assert validate.main() == 1
