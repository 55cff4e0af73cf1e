"""Lines of a damaged journal count up to the damage, whatever byte is damaged."""

from pathlib import Path

import pytest

from finetune_trainer.merge.journal import Durable, Journal

INPUTS = {"base": "b" * 8}
RECORDS = [("model-1.safetensors", Durable(100, "1" * 64)), ("model-1.safetensors", Durable(200, "2" * 64))]


def opened(path: Path) -> tuple[bool, dict[str, Durable]]:
    journal = Journal(path, "plan", INPUTS)
    journal.close()
    return journal.is_continued, journal.durable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    journal = Journal(path, "plan", INPUTS)
    for name, durable in RECORDS:
        journal.record(name, durable)
    journal.close()
    return path


def test_the_last_record_of_a_file_counts(path: Path) -> None:
    assert opened(path) == (True, {"model-1.safetensors": Durable(200, "2" * 64)})


def test_any_changed_byte_of_the_last_line_makes_the_one_before_count(path: Path) -> None:
    whole = path.read_bytes()
    last = len(b"".join(whole.splitlines(keepends=True)[:-1]))
    for place in range(last, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert opened(path) == (True, {"model-1.safetensors": Durable(100, "1" * 64)}), place
        # What is damaged is cut off, so that the next record does not follow it.
        assert path.stat().st_size == last


def test_a_line_that_was_cut_off_anywhere_makes_the_one_before_count(path: Path) -> None:
    whole = path.read_bytes()
    last = len(b"".join(whole.splitlines(keepends=True)[:-1]))
    for length in range(last, len(whole)):
        path.write_bytes(whole[:length])
        assert opened(path) == (True, {"model-1.safetensors": Durable(100, "1" * 64)}), length


def test_a_record_after_the_damage_is_read_again(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])
    journal = Journal(path, "plan", INPUTS)
    journal.record("model-2.safetensors", Durable(7, "3" * 64))
    journal.close()
    assert opened(path)[1] == {"model-1.safetensors": Durable(100, "1" * 64), "model-2.safetensors": Durable(7, "3" * 64)}


@pytest.mark.parametrize("content", [b"", b"\n", b"\x00" * 5000, b"0123456789abcdef {}\n"])
def test_what_is_no_journal_begins_a_new_one(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert opened(path) == (False, {})


def test_another_plan_or_input_begins_anew(path: Path) -> None:
    for plan, inputs in (("other", INPUTS), ("plan", {"base": "c" * 8})):
        journal = Journal(path, plan, inputs)
        journal.close()
        assert not journal.is_continued
        assert journal.durable == {}
