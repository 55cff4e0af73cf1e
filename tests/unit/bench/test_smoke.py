"""Benchmarks that start processes of their own, on toys: what they measure these cannot show, that they still run, they do.

Those that start several processes with the libraries are left for the night, which also runs the benchmarks themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from bench.chain import __main__ as chain
from bench.gpu import __main__ as gpu
from bench.gpu import check
from bench.memory import packed_load
from bench.merge import __main__ as merge
from bench.merge import model
from bench.preflight import __main__ as preflight
from bench.prepare import __main__ as prepare
from bench.prepare.corpus import WORDS, write_records, write_tokenizer
from bench.trainer import __main__ as trainer
from bench.validate import __main__ as validate
from finetune_trainer.weights.headers import read_checkpoint
from tests.support.living import living
from tests.support.stack import Stack

TOY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512,
}  # fmt: skip


def test_merging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model.SIZES, "toy", TOY)
    base, adapter, output = (tmp_path / name for name in ("base", "adapter", "ours"))
    model.write_base(base, "toy")
    model.write_adapter(adapter, "toy", base)
    assert merge.run_once("ours", base, adapter, output)["seconds"] > 0
    assert read_checkpoint(output).tensors.keys() == read_checkpoint(base).tensors.keys()
    changed = merge.different_tensors(base, output)
    # Seven linear layers in each of two.
    assert len(changed) == 14
    assert all(name.endswith("_proj.weight") for name in changed)


@pytest.mark.nightly
def test_preparing(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    write_records(records, 50_000)
    write_tokenizer(tmp_path / "model", records, WORDS)
    peak, counts = prepare.run_once("ours", records, tmp_path / "model", tmp_path / "output", 1)
    assert peak > 0
    assert counts["records"] == len(records.read_text().splitlines())
    assert counts["tokens"] > 0


def test_the_chain_of_a_job_that_fails_has_no_figures() -> None:
    failed = {"status": {"conditions": [{"type": "Succeeded", "status": "False", "reason": "TrainingFailed"}]}}
    stack = Mock(spec=Stack, **{"wait_for_condition.return_value": failed})
    with pytest.raises(RuntimeError, match=r"(?s)mine did not succeed.*TrainingFailed"):
        chain.on_the_node(stack, "mine")


def run_of(loss: float, seconds: float, tokens: int = 400) -> dict[str, object]:
    """Figures of one rank: two steps to warm up, and two."""
    starts = [0.0, 9.0, 10.0, 10.0 + seconds / 2, 10.0 + seconds]
    return {
        "starts": starts, "busy": [each / 2 for each in starts], "losses": [9.0, loss, loss, loss], "peak_resident_bytes": 10**9,
        "supervised_tokens": tokens,
    }  # fmt: skip


def test_rates_of_training_and_what_makes_them_void(capsys: pytest.CaptureFixture[str]) -> None:
    counts = [[100, 100]] * 4
    ours = trainer.evaluated("ours", [run_of(5.0, 2.0)], counts)
    bare = trainer.evaluated("bare", [run_of(5.2, 4.0)], counts)
    # 200 tokens in the two steps that count.
    assert (ours["tokens_per_second"], ours["tokens_per_cpu_second"], ours["final_loss"]) == (100.0, 200.0, 5.0)
    assert bare["tokens_per_second"] == 50.0
    assert trainer.problems({"ours": [ours], "bare": [bare]}) == ["final loss 5.0000 is not the bare loop's 5.2000 within 3%"]
    short = trainer.evaluated("ours", [run_of(5.1, 2.0, tokens=399)], counts)
    assert trainer.problems({"ours": [short], "bare": [bare]}) == ["ours trained 399 supervised_tokens, expected 400"]
    contenders = {"ours": trainer.summary([ours]), "bare": trainer.summary([bare])}
    trainer.show({"contenders": contenders, "problems": ["one"]}, 1, 2)
    shown = capsys.readouterr().out
    assert "ours / bare, tokens_per_second: median 2.000 (2.000 to 2.000)" in shown
    assert "PROBLEM: one" in shown


TIERS = (
    "kernels", "calibration", "throughput", "waits", "resume", "methods", "out-of-memory", "pod", "launcher", "planner",
    "verification", "stall", "long",
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "contenders", "methods"),
    [
        (["--quick"], {"ours": 2, "trl": 1}, 1),
        # Every branch that a CPU can take.
        pytest.param(
            [], {"ours": 2, "trl": 1, "compiled": 2, "fp8": 1, "deterministic": 1}, 8, marks=pytest.mark.nightly, id="whole"
        ),
    ],
)
def test_what_a_gpu_would_show(
    capfd: pytest.CaptureFixture[str], options: list[str], contenders: dict[str, int], methods: int
) -> None:
    assert check.main(["--toy", *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.removeprefix("== ") for line in lines if line.startswith("== ")] == list(TIERS)
    for tier in TIERS:
        assert [line for line in lines if line.startswith(f"{tier}: passed")]
        assert [line for line in lines if line.startswith(f"{tier}: not shown, because there is no GPU: ")]
    for name, count in contenders.items():
        found = [line for line in lines if line.startswith(f"{name} on 1 x cpu: ")]
        assert len(found) == count
        assert all("MFU unknown" in line for line in found)
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
    from bench.gpu.scale import Tier

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
        os.kill(os.getpid(), 9)
    say({"tier": name, "problem": "other bytes" if name == "wrong" else ""})
"""
"""What plays the process of tiers, one of which hangs and one of which ends its process."""


def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> int:
    monkeypatch.setattr(check, "WORKER", (sys.executable, "-c", PLAYED))
    monkeypatch.setenv("SLEEPER", str(tmp_path / "sleeper"))
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
    with suppress(psutil.NoSuchProcess):
        assert not living([psutil.Process(int((tmp_path / "sleeper").read_text()))])


def test_tiers_for_which_there_is_no_time_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert played(monkeypatch, tmp_path, "--minutes", "0.005", "hangs", "fine") == 0
    assert capfd.readouterr().out.splitlines()[-2:] == [
        "left out, because 0.005 minutes are over: hangs, fine", "all other tiers passed",
    ]  # fmt: skip


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


@pytest.mark.nightly
def test_looking_at_a_declared_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preflight, "MODELS", {"toy": {**preflight.LLAMA_70B, **TOY}})
    monkeypatch.setattr(preflight, "RESULT", tmp_path / "preflight.json")
    monkeypatch.setattr(preflight, "BARE", "import torch")
    # How fast and how large a look at a real model is, the benchmark itself says.
    monkeypatch.setattr(preflight, "LIMIT_SECONDS", 300.0)
    monkeypatch.setattr(preflight, "LIMIT_BYTES", 8 << 30)
    monkeypatch.setattr("sys.argv", ["preflight", "--models", "toy", "--methods", "LoRA"])
    assert preflight.main() == 0
    assert "refused: none" in capsys.readouterr().out
    assert json.loads((tmp_path / "preflight.json").read_text())["models"]["toy LoRA"]["findings"] == []


def test_validating(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(validate, "NUM_MANIFESTS", 3)
    monkeypatch.setattr(validate, "LIMIT_ONE_MS", 60_000.0)
    monkeypatch.setattr("sys.argv", ["validate", "--runs", "1"])
    assert validate.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("finetune validate, ") == 3


def test_a_benchmark_above_its_limit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "NUM_MANIFESTS", 1)
    monkeypatch.setattr(validate, "measured", lambda command: (1.0, 301.0 if "validate" in command else 1.0))
    monkeypatch.setattr("sys.argv", ["validate", "--runs", "1"])
    assert validate.main() == 1
