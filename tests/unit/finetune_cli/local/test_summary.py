"""What a run came to."""

import json
from pathlib import Path

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.run_directory import RunRecord
from finetune_cli.local.summary import Losses, losses, read_history, summarise
from finetune_cli.render.run import summary_text
from finetune_job.names import Role
from tests.unit.finetune_cli.local_jobs import PLAN


def test_losses_come_from_the_held_out_records_or_the_history():
    assert losses({"initial_eval_loss": "6.9", "eval_loss": "3.1"}, []) == Losses(6.9, 3.1, held_out=True)
    history = [{"step": 0, "eval_loss": 7.0}, {"step": 1, "loss": 7.0}, {"step": 2, "loss": 5.0}]
    assert losses({}, history) == Losses(7.0, 5.0, held_out=False)
    assert losses({}, [*history, {"step": 3, "eval_loss": 4.5}]) == Losses(7.0, 4.5, held_out=True)
    assert losses({}, []) is None


def test_a_history_that_a_stranger_has_changed_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = [
        "[" * 100_000,
        '{"step": 1, "loss": 1' + "0" * 400 + "}",
        '{"step": [2], "loss": {}}',
        '{"step": 3, "loss": 1.5}',
        "3",
    ]
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    history = read_history(tmp_path / "history.jsonl")
    assert [line["step"] for line in history] == [1, [2], 3]
    assert losses({}, history) == Losses(1.5, 1.5, held_out=False)


def test_the_summary_tells_where_everything_is(tmp_path):
    claims = tmp_path / "claims"
    output = claims / "out" / "tuned"
    for name in ("adapter", "merged"):
        (output / name).mkdir(parents=True)
    figures = {
        "passed": True,
        "tensors": {"num_changed": 28, "num_untouched": 11},
        "logits": {"mean_kl": 1.5e-6, "top1_agreement": 1.0},
        "other_logits": {"mean_kl": 0.02, "top1_agreement": 0.975},
    }
    (output / "verification.json").write_text(json.dumps(figures))
    (output / "report.html").write_text("")
    workspace = claims / "workspace" / "tuned-local"
    workspace.mkdir(parents=True)
    (workspace / "history.jsonl").write_text('{"step": 9, "loss": 1.0}\n{"step": 10, "loss": 0.5}\n{"step": 11, "lo')
    record = RunRecord(
        plan_sha256="x",
        seconds={Role.TRAIN: 20.0, Role.MERGE: 5.0},
        facts={
            Role.TRAIN: {"initial_eval_loss": "6.9", "eval_loss": "3.1"},
            Role.PUBLISH: {"address": "hf://team/a@0", "adapter_address": "hf://team/a-adapter@1"},
        },
    )
    summary = summarise(PLAN, record, claims)
    assert summary.step == 10
    text = summary_text(ExitCode.DONE, summary)
    for part in (
        "held-out loss: 6.9000 before, 3.1000 after",
        str(output / "adapter"),
        str(output / "merged"),
        "published at:  hf://team/a@0",
        "adapter at:    hf://team/a-adapter@1",
        "passed, 28 tensors changed, 11 untouched, mean KL 1.5e-06, same token 100.0%",
        "rounding:      against the adapter on the packed base, whose weights are rounded otherwise: mean KL 0.02, same",
        f"report:        {output / 'report.html'}",
        "25.0 s",
    ):
        assert part in text
    # A later failure is told in the report of the run, too; of another stage's failure an old verification says nothing.
    (output / "verification.json").write_text(json.dumps(figures | {"passed": False}))
    for stage, is_told in ((Role.MERGE, True), (Role.TRAIN, False)):
        failed = summary_text(ExitCode.FAILED, summarise(PLAN, record.model_copy(update={"next_attempt": {stage: 1}}), claims))
        assert (f"report:        {output / 'report.html'}" in failed) is is_told
        assert ("FAILED" in failed) is is_told
