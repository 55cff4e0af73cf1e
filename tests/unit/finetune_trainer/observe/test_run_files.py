"""The history: what a resumed run keeps of it."""

from pathlib import Path

import pytest

from finetune_trainer.json_lines import read_lines
from finetune_trainer.observe.run_files import History


@pytest.mark.parametrize("resumed_step", [0, 2])
def test_history_keeps_lines_up_to_the_resumed_step(tmp_path: Path, resumed_step: int) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\nnoise\n[]\n{"ste')
    History(path, resumed_step).close()
    assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in range(resumed_step + 1))


def test_a_resumed_history_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    first = History(path, None)
    for step in range(6):
        first.append(step=step, tokens=10, mfu=None)
    path.write_text(path.read_text()[:-4])
    resumed = History(path, 3)
    assert resumed.tokens == 40
    for step in range(4, 7):
        resumed.append(step=step, tokens=10)
    resumed.close()
    assert [line["step"] for line in read_lines(path.read_text())] == list(range(7))
    assert "mfu" not in path.read_text()
    assert resumed.tokens == 70


def test_a_run_from_the_start_has_no_history(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1}\n')
    History(path, None).append(step=1, tokens=1)
    assert path.read_text() == '{"step": 1, "tokens": 1}\n'
