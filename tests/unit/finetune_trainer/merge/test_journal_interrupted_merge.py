"""An interrupted merge leaves nothing under the final name, and the next merge continues only with bytes that are verified."""

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from finetune_trainer.merge import chunks, stream, workspaces
from finetune_trainer.merge.journal import Durable, Journal
from finetune_trainer.merge.merge_adapter import MergeOptions, MergeReport, merge_adapter
from finetune_trainer.merge.shard_file import ShardFile
from finetune_trainer.merge.writer import journal_path, temporary_directory
from finetune_trainer.weights import errors
from tests.unit.finetune_trainer.merge import tiny

MAX_SHARD_BYTES = 300_000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    base = tiny.save_base(directory / "base", tiny.llama(), torch.bfloat16)
    return base, tiny.save_adapter(directory / "adapter", base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))


@pytest.fixture(scope="module")
def undisturbed(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> MergeReport:
    return merge_adapter(options(pair, tmp_path_factory.mktemp("undisturbed") / "merged"))


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "JOURNAL_BYTES", 1)
    for module in (chunks, workspaces):
        monkeypatch.setattr(module, "CHUNK_BYTES", 16 << 10)


def options(pair: tuple[Path, Path], output: Path, dtype: str | None = None) -> MergeOptions:
    return MergeOptions(pair[0], (pair[1],), output, dtype, MAX_SHARD_BYTES)


class Stopped(BaseException):
    """Stands for the sudden end of the process."""


def interrupt(pair: tuple[Path, Path], output: Path, share: float = 0.6, dtype: str | None = None) -> None:
    """Start a merge, and stop it when about this share of the bytes is written."""

    def stop(written: int, total: int) -> None:
        if written >= share * total:
            raise Stopped

    with pytest.raises(Stopped):
        merge_adapter(options(pair, output, dtype), stop)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_next_merge_continues_and_ends_with_the_same_files(
    pair: tuple[Path, Path], tmp_path: Path, undisturbed: MergeReport
) -> None:
    output = tmp_path / "merged"
    interrupt(pair, output)
    assert names(tmp_path) == [journal_path(output).name, temporary_directory(output).name]
    assert not (temporary_directory(output) / "manifest.json").exists()
    seen: list[int] = []
    report = merge_adapter(options(pair, output), lambda written, _: seen.append(written))
    assert report.sha256 == undisturbed.sha256
    assert report.bytes_resumed > 0.3 * undisturbed.bytes_written
    assert report.bytes_written + report.bytes_resumed == undisturbed.bytes_written
    assert report.bytes_read < 0.8 * undisturbed.bytes_read
    assert seen[0] > report.bytes_resumed
    assert names(tmp_path) == ["merged"]


def test_a_record_has_the_digest_of_the_bytes_that_it_names(
    pair: tuple[Path, Path], tmp_path: Path, undisturbed: MergeReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk, hashing is ahead of writing, but a record waits until its bytes are written."""
    records: list[str] = []
    append = ShardFile.append

    def append_late(*given: Any) -> None:
        time.sleep(0.02)
        append(*given)

    def record(_: Journal, name: str, durable: Durable) -> None:
        first = (temporary_directory(tmp_path / "merged") / name).read_bytes()[: durable.num_bytes]
        assert (len(first), hashlib.sha256(first).hexdigest()) == (durable.num_bytes, durable.sha256)
        records.append(name)

    monkeypatch.setattr(ShardFile, "append", append_late)
    monkeypatch.setattr(Journal, "record", record)
    report = merge_adapter(options(pair, tmp_path / "merged"))
    assert report.sha256 == undisturbed.sha256
    assert len(records) > 2 * len(set(records))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def damage_durable_bytes(output: Path) -> None:
    for path in temporary_directory(output).glob("*.safetensors"):
        flip(path, 400)


def put_a_link(place: Path) -> None:
    """Replace `place` by a link to a directory with a foreign file, which must not be deleted."""
    elsewhere = place.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_text("somebody else's")
    shutil.rmtree(place)
    place.symlink_to(elsewhere)


def put_directories_for_shards(output: Path) -> None:
    for path in temporary_directory(output).glob("*.safetensors"):
        path.unlink()
        (path / "inside").mkdir(parents=True)


@pytest.mark.parametrize(
    "damage",
    [
        damage_durable_bytes,
        lambda output: flip(journal_path(output), 40),
        lambda output: shutil.rmtree(temporary_directory(output)),
        lambda output: put_a_link(temporary_directory(output)),
        lambda output: (put_a_link(temporary_directory(output)), journal_path(output).unlink()),
        put_directories_for_shards,
    ],
    ids=["bytes", "first record", "no directory", "a link", "a link and no journal", "directories"],
)
def test_damaged_leftovers_are_written_again(
    pair: tuple[Path, Path], tmp_path: Path, undisturbed: MergeReport, damage: Callable[[Path], None]
) -> None:
    output = tmp_path / "merged"
    interrupt(pair, output)
    damage(output)
    report = merge_adapter(options(pair, output))
    assert report.sha256 == undisturbed.sha256
    assert report.bytes_resumed == 0
    assert not output.is_symlink()
    assert [path.read_text() for path in tmp_path.glob("elsewhere/*")] in ([], ["somebody else's"])


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_files_that_the_plan_does_not_have_do_not_get_into_the_output(
    pair: tuple[Path, Path], tmp_path: Path, undisturbed: MergeReport, kind: str
) -> None:
    output = tmp_path / "merged"
    interrupt(pair, output)
    more = temporary_directory(output) / "model-00009-of-00009.safetensors"
    if kind == "file":
        more.write_bytes(b"more")
    elif kind == "directory":
        (more / "inside").mkdir(parents=True)
    else:
        more.symlink_to(tmp_path)
    assert merge_adapter(options(pair, output)).sha256 == undisturbed.sha256
    assert names(output) == [*sorted(undisturbed.sha256 | {"manifest.json": ""})]


@pytest.mark.parametrize("change", ["plan", "base"])
def test_leftovers_of_another_plan_or_base_are_discarded(
    pair: tuple[Path, Path], tmp_path: Path, undisturbed: MergeReport, change: str
) -> None:
    base = shutil.copytree(pair[0], tmp_path / "base")
    interrupt((base, pair[1]), tmp_path / "merged", dtype="float32" if change == "plan" else None)
    if change == "base":
        os.utime(base / "model.safetensors")
    report = merge_adapter(options((base, pair[1]), tmp_path / "merged"))
    assert (report.sha256, report.bytes_resumed) == (undisturbed.sha256, 0)


def test_a_kill_between_the_last_two_steps_is_cleared_away(pair: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "merged"
    merge_adapter(options(pair, output))
    journal_path(output).write_text("left")
    assert merge_adapter(options(pair, output)).was_complete
    assert names(tmp_path) == ["merged"]


def test_a_second_merge_into_the_same_output_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, undisturbed: MergeReport
) -> None:
    refused: list[str] = []

    def merge_as_well(_written: int, _total: int) -> None:
        if not refused:
            with pytest.raises(errors.OutputBusyError, match="another merge into the same output") as raised:
                merge_adapter(options(pair, tmp_path / "merged"))
            refused.append(str(raised.value))

    report = merge_adapter(options(pair, tmp_path / "merged"), merge_as_well)
    assert refused
    assert report.sha256 == undisturbed.sha256


@pytest.mark.parametrize("role", ["base", "adapter"])
def test_an_input_that_changes_while_it_is_merged_is_named_and_nothing_is_kept(
    pair: tuple[Path, Path], tmp_path: Path, role: str
) -> None:
    base, adapter = (shutil.copytree(path, tmp_path / path.name) for path in pair)
    changed = {"base": base / "model.safetensors", "adapter": adapter / "adapter_model.safetensors"}[role]

    def write(written: int, total: int) -> None:
        if written == total:
            flip(changed, changed.stat().st_size - 1)

    with pytest.raises(errors.InputChangedError, match=str(changed)):
        merge_adapter(options((base, adapter), tmp_path / "merged"), write)
    assert names(tmp_path) == ["adapter", "base"]


def test_a_base_that_is_cut_off_while_it_is_merged_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base = shutil.copytree(pair[0], tmp_path / "base")

    def cut(written: int, total: int) -> None:
        os.truncate(base / "model.safetensors", 100_000)

    with pytest.raises(errors.BrokenCheckpointError, match=rf"{base}/model\.safetensors ended inside tensor"):
        merge_adapter(options((base, pair[1]), tmp_path / "merged"), cut)
    assert names(tmp_path) == ["base"]


class Faulty:
    """An os function that fails for files below a directory, after `at` calls."""

    def __init__(self, function: str, code: int, at: int, where: Path) -> None:
        self._original = getattr(os, function)
        self._code, self._left, self._where = code, at, str(where)

    def __call__(self, first: Any, *arguments: Any, **named: Any) -> Any:
        path = str(Path(f"/proc/self/fd/{first}").readlink() if isinstance(first, int) else first)
        if path.startswith(self._where):
            self._left -= 1
            if self._left < 0:
                raise OSError(self._code, os.strerror(self._code), path)
        return self._original(first, *arguments, **named)


FAULTS = [
    (function, code, at)
    for function, code in (
        ("pwrite", errno.ENOSPC),
        ("pwrite", errno.EDQUOT),
        ("pwrite", errno.EIO),
        ("ftruncate", errno.ENOSPC),
        ("fsync", errno.ENOSPC),
        ("open", errno.EACCES),
        ("mkdir", errno.EROFS),
        ("rename", errno.EIO),
    )
    for at in {"mkdir": (0,), "rename": (0,), "ftruncate": (0, 3)}.get(function, (0, 3, 12))
]


@pytest.mark.parametrize(("function", "code", "at"), FAULTS, ids=[f"{f}-{errno.errorcode[c]}-{a}" for f, c, a in FAULTS])
def test_a_failing_disk_is_named_and_the_next_merge_is_right(
    pair: tuple[Path, Path],
    tmp_path: Path,
    undisturbed: MergeReport,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    code: int,
    at: int,
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    expected = errors.NoSpaceError if code in {errno.ENOSPC, errno.EDQUOT} else errors.StorageError
    with monkeypatch.context() as patched:
        patched.setattr(os, function, Faulty(function, code, at, place))
        with pytest.raises(expected, match=str(place)) as raised:
            merge_adapter(options(pair, place / "merged"))
    assert os.strerror(code) in str(raised.value)
    assert ("enlarge the workspace" in str(raised.value)) == (expected is errors.NoSpaceError)
    assert not (place / "merged").exists()
    assert merge_adapter(options(pair, place / "merged")).sha256 == undisturbed.sha256
    assert names(place) == ["merged"]


def test_a_read_error_names_the_file(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", Faulty("preadv", errno.EIO, 5, pair[0]))
    with pytest.raises(errors.StorageError, match=rf"{pair[0]}/model\.safetensors could not be read \(Input/output error\)"):
        merge_adapter(options(pair, tmp_path / "merged"))
    assert not (tmp_path / "merged").exists()


def test_short_reads_and_writes_give_the_same_bytes(
    pair: tuple[Path, Path], tmp_path: Path, undisturbed: MergeReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, position: preadv(file, [buffers[0][:1000]], position))
    monkeypatch.setattr(os, "pwrite", lambda file, data, position: pwrite(file, data[: max(1, len(data) // 2)], position))
    assert merge_adapter(options(pair, tmp_path / "merged")).sha256 == undisturbed.sha256


def test_too_little_space_is_seen_before_anything_is_written(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = list(os.statvfs(tmp_path))
    values[4] = 1  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    with pytest.raises(errors.NoSpaceError, match="enlarge the workspace"):
        merge_adapter(options(pair, tmp_path / "merged"))
    assert names(tmp_path) == []


MERGE = """
import os, sys
from pathlib import Path
from finetune_trainer.merge import chunks, stream, workspaces
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
base, adapter, output, at = sys.argv[1:]
stream.JOURNAL_BYTES = 1
chunks.CHUNK_BYTES = workspaces.CHUNK_BYTES = 16 << 10
def stop(done, total):
    if done >= float(at) * total:
        print("here", flush=True)
        sys.stdin.read()
merge_adapter(MergeOptions(Path(base), (Path(adapter),), Path(output), None, 300_000), stop)
"""


def limit_file_size() -> None:
    """Have the kernel limit files to 200 KB, which is similar to a quota."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))


def test_a_real_limit_is_named_and_leaves_no_output(pair: tuple[Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", MERGE, *map(str, pair), str(tmp_path / "merged"), "2"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit_file_size, check=False)
    assert done.returncode == 1
    assert "NoSpaceError" in done.stderr
    assert "File too large" in done.stderr
    assert not (tmp_path / "merged").exists()


def test_after_a_real_kill_the_lock_is_free_and_the_merge_continues(
    pair: tuple[Path, Path], tmp_path: Path, undisturbed: MergeReport
) -> None:
    output = tmp_path / "merged"
    command = [sys.executable, "-c", MERGE, *map(str, pair), str(output), "0.6"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        with pytest.raises(errors.OutputBusyError):
            merge_adapter(options(pair, output))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not output.exists()
    report = merge_adapter(options(pair, output))
    assert report.sha256 == undisturbed.sha256
    assert report.bytes_resumed > 0
    assert json.loads((output / "manifest.json").read_text())["plan_sha256"] == report.plan_sha256
