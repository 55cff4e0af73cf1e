"""Output of ranks, in files of bounded size."""

from pathlib import Path

import pytest

from finetune_trainer.ranks.logs import CappedFile, RankLogs


def test_logs_are_capped_and_keep_the_newest(tmp_path: Path) -> None:
    log = CappedFile(tmp_path / "rank.log", cap_bytes=100)
    for number in range(100):
        log.write(b"line %04d\n" % number)
    log.close()
    kept = (tmp_path / "rank.log.previous").read_bytes() + (tmp_path / "rank.log").read_bytes()
    assert len(kept) <= 200
    assert kept.endswith(b"line 0098\nline 0099\n")
    assert (tmp_path / "rank.log").stat().st_size <= 100


def test_the_output_of_each_local_rank_is_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RankLogs(tmp_path, range(4, 6)) as logs:
        for local_rank, text in enumerate(["one\ntwo", "three\n"]):
            (logs.pipes / str(local_rank)).write_text(text)
    assert (tmp_path / "rank-00004.log").read_text() == "one\ntwo"
    assert (tmp_path / "rank-00005.log").read_text() == "three\n"
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 4] one", "[rank 4] two", "[rank 5] three"]


def test_a_claim_that_takes_no_logs_stops_no_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    with RankLogs(tmp_path / "logs", range(1)) as logs:
        (logs.pipes / "0").write_text("still shown\n")
    assert capsys.readouterr().out == "[rank 0] still shown\n"
