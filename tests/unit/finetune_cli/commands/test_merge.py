"""`finetune merge`: its arguments, its process and its words; one real merge is a test of its own in tests/e2e."""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.commands.merge import check_order, merge_document, merge_text
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.launch import Interruption
from finetune_cli.local.programs import MergeEnd, MergeOrder, merge_directories
from finetune_job.api.enumerations import MergeBase
from finetune_job.failures import EXIT_CODES, FailureClass

VERIFIED = {
    "output": "/out",
    "bytes_written": 2_500_000_000,
    "seconds": 4.25,
    "verification_page": "/out.verification.md",
    "verification": {"passed": True, "logits": {"mean_kl": 1.5e-6, "top1_agreement": 1.0}},
}


@pytest.fixture
def order(tmp_path: Path) -> MergeOrder:
    for name, file in (("base", "config.json"), ("adapter", "adapter_config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    return MergeOrder(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "merged", None, "5GB", True, None, "cpu")


def program(*statements: str) -> list[str]:
    """A process that says and does this."""
    return [sys.executable, "-c", "\n".join(["import json, os, signal, sys", *statements])]


def say(**content: object) -> str:
    return f"print({json.dumps(json.dumps(content))}, flush=True)"


class Told:
    def __init__(self) -> None:
        self.progress: list[tuple[int, int]] = []
        self.verifying = 0

    def run(self, command: list[str]) -> MergeEnd:
        with Interruption() as interruption:
            return merge_directories(
                command, interruption, lambda written, total: self.progress.append((written, total)), self.count
            )

    def count(self) -> None:
        self.verifying += 1


def test_the_command_names_everything(order):
    full = MergeOrder(Path("b"), [Path("a1"), Path("a2")], Path("o"), "float16", "1Gi", False, Path("p"), "cuda")
    assert full.command()[1:] == [
        *("-m", "finetune_trainer.roles.merge_command", "--parent", str(os.getpid())),
        *("--base", "b", "--adapter", "a1", "--adapter", "a2", "--output", "o"),
        *("--max-shard-size", "1Gi", "--device", "cuda", "--dtype", "float16", "--prompts", "p", "--no-verify"),
    ]
    packed = dataclasses.replace(order, base_form=MergeBase.DEQUANTIZED, quantization='{"quantType": "fp4"}')
    assert packed.command()[-4:] == ["--base-form", "Dequantized", "--quantization", '{"quantType": "fp4"}']
    assert "--base-form" not in order.command()
    assert "--no-verify" not in order.command()
    assert "--dtype" not in order.command()


def test_progress_and_report_are_read_from_lines_of_json():
    told = Told()
    end = told.run(
        program(
            "print('a word of some library')",
            "print('[1, 2]')",
            say(written=1, total=2),
            say(written=2, total=2),
            say(report=VERIFIED),
            "print('a warning', file=sys.stderr)",
        )
    )
    assert told.progress == [(1, 2), (2, 2)]
    assert told.verifying == 1
    assert end == MergeEnd(ExitCode.DONE, VERIFIED, "")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (FailureClass.USER_MODEL, ExitCode.REFUSED),
        (FailureClass.USER_CONFIG, ExitCode.REFUSED),
        (FailureClass.VERIFICATION_FAILED, ExitCode.FAILED),
        (FailureClass.DISK_FULL, ExitCode.FAILED),
    ],
)
def test_a_failure_is_told_in_the_words_of_the_process(failure, expected):
    end = Told().run(program("print('q_proj.lora_A: has no base', file=sys.stderr)", f"sys.exit({EXIT_CODES[failure]})"))
    assert (end.exit_code, end.report, end.said) == (expected, {}, "q_proj.lora_A: has no base")


def test_a_process_that_is_killed_has_failed():
    assert Told().run(program("os.kill(os.getpid(), signal.SIGKILL)")).exit_code is ExitCode.FAILED
    assert Told().run(program("sys.exit(2)")).exit_code is ExitCode.UNUSABLE


def test_an_interruption_reaches_the_process_as_sigterm():
    def interrupt(_written: int, _total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    ending = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(50))"
    with Interruption() as interruption:
        end = merge_directories(program(ending, say(written=0, total=9), "signal.pause()"), interruption, interrupt, lambda: None)
    assert end.exit_code is ExitCode.INTERRUPTED


def test_the_last_words_say_where_and_how_good(order):
    text = merge_text(MergeEnd(ExitCode.DONE, VERIFIED, ""), order)
    for part in ("Merged.", "/out", "passed, mean KL 1.5e-06, same token 100.0%", "/out.verification.md", "2.50 GB in 4.2 s"):
        assert part in text
    # A process that fails has no report: what it knows of the failure, it says.
    text = merge_text(MergeEnd(ExitCode.FAILED, {}, "gate: mean KL 3 > 0.01"), order)
    for part in ("Failed.", "gate: mean KL 3 > 0.01"):
        assert part in text
    assert "continue" in merge_text(MergeEnd(ExitCode.INTERRUPTED, {}, ""), order)
    assert merge_document(MergeEnd(ExitCode.DONE, VERIFIED, "")) == {"outcome": "done", "message": None, **VERIFIED}
    assert merge_document(MergeEnd(ExitCode.FAILED, {}, "gate")) == {"outcome": "failed", "message": "gate"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": Path("/no/such")}, "--base /no/such is not a directory with config.json"),
        ({"adapters": [Path("/no/such")]}, "--adapter /no/such is not a directory with adapter_config.json"),
        ({"prompts": Path("/no/such")}, "--prompts /no/such is not a file"),
        ({"prompts": Path(__file__), "verify": False}, "--no-verify"),
        ({"max_shard_size": "five"}, "--max-shard-size five is not a size"),
        ({"quantization": '{"quantType": "nf5"}'}, "--quantization .*quantType"),
    ],
)
def test_arguments_that_cannot_work_are_named(order, changes, words):
    check_order(order)
    with pytest.raises(LocalError, match=words):
        check_order(MergeOrder(**{**vars(order), **changes}))


@pytest.mark.parametrize("place", ["base", "base/merged", "."])
def test_results_are_not_written_over_inputs(order, tmp_path, place):
    with pytest.raises(LocalError, match="overlaps with"):
        check_order(MergeOrder(**{**vars(order), "output": tmp_path / place}))


def test_the_command_line_answers_wrong_arguments_with_its_own_code(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["merge", "--base", str(tmp_path), "--adapter", "/no/such", "--output", "/tmp/x"])
    assert result.exit_code == ExitCode.UNUSABLE
    assert "/no/such" in result.stderr
    assert CliRunner().invoke(app, ["merge", "--base", str(tmp_path), "--output", "/tmp/x"]).exit_code == ExitCode.UNUSABLE
    packed = ["merge", "--base", str(tmp_path), "--adapter", "/a", "--output", "/tmp/x", "--base-form", "Quantized"]
    result = CliRunner().invoke(app, packed)
    assert result.exit_code == ExitCode.UNUSABLE
    assert "Original" in result.stderr
    assert "Dequantized" in result.stderr
    assert "Trained" not in result.stderr
