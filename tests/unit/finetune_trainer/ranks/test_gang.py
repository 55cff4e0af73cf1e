"""A rank and what ranks agree on; several ranks are tested where they train."""

import ast
import json
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import finetune_trainer
from finetune_trainer.checkpoint.evidence import Evidence
from finetune_trainer.checkpoint.manifest import FileEntry, RangeEntry
from finetune_trainer.errors import InvariantError
from finetune_trainer.ranks import gang as gang_module
from finetune_trainer.ranks.gang import EntryName, Gang, collective_timeout, joined, launched_rank
from finetune_trainer.ranks.stalls import stall_timeouts


def test_a_gang_of_one_needs_no_messages() -> None:
    with joined(0, 1, 0) as gang:
        assert gang.is_first
        assert gang.messages is None
        assert gang.gather("a", str) == ["a"]
        assert gang.from_first({"b": 1}, dict[str, int]) == {"b": 1}
        assert gang.sum([1.5, 2.0]) == [1.5, 2.0]
        gang.barrier()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("step_timeout", [1.0, 600.0, 7200.0])
def test_collectives_wait_until_the_watchdog_has_had_its_say(step_timeout: float) -> None:
    verdict = timedelta(seconds=stall_timeouts(step_timeout).verdict)
    assert collective_timeout(step_timeout) == verdict + timedelta(minutes=1)


def test_the_rank_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == (5, 8, 1)


class Wire:
    """Collectives between this rank, 0 or 1, and one that sends what it likes."""

    def __init__(self, rank: int, other: bytes, announced: int | None = None) -> None:
        self._rank, self._other, self._announced = rank, other, len(other) if announced is None else announced

    def _sent(self, size: int, *, is_length: bool) -> torch.Tensor:
        if is_length:
            return torch.tensor([self._announced])
        return torch.frombuffer(bytearray(self._other.ljust(size, b" ")[:size]), dtype=torch.uint8)

    def all_gather(self, found: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        found[self._rank].copy_(own)
        found[1 - self._rank].copy_(self._sent(len(own), is_length=own.dtype == torch.int64))

    def broadcast(self, found: torch.Tensor, src: int, group: object) -> None:
        if src != self._rank:
            found.copy_(self._sent(len(found), is_length=found.dtype == torch.int64))


def hears(monkeypatch: pytest.MonkeyPatch, rank: int, other: bytes, announced: int | None = None) -> Gang:
    monkeypatch.setattr(gang_module, "dist", Wire(rank, other, announced))
    return Gang(rank, 2, rank, torch.device("cpu"), None)


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.trap,)


@pytest.mark.parametrize("name", ["gather", "from_first"])
def test_what_another_member_sends_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sent = pickle.dumps(Trap(tmp_path / "was-here"))
    with pytest.raises(InvariantError, match="not of the form"):
        getattr(hears(monkeypatch, 1, sent), name)("mine", str)
    assert list(tmp_path.iterdir()) == []


FILE = FileEntry(
    name="rank-00000.safetensors", size=3, sha256="0" * 64, pieces=[RangeEntry(name="w", shape=[2], dtype="F32", start=0, stop=2)]
)


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (None, float | None),
        (7.0, float | None),
        (1 << 60, int),
        (True, bool),
        ("a problem, ü", str),
        ((FILE, None), tuple[FileEntry | None, tuple[str, int | None] | None]),
        ((None, ("rank 1: full", 28)), tuple[FileEntry | None, tuple[str, int | None] | None]),
        (({"step-1": "broken"}, ["step-2"]), tuple[dict[str, str], list[str]]),
        (Evidence(3, Path("/claims/x/latest")), Evidence | None),
        (["step-0000000003"], list[EntryName]),
        ("step-0000000003.tmp-00ff", EntryName),
    ],
)
def test_what_ranks_tell_each_other_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch, value: object, form: object) -> None:
    sent = gang_module._encoded(value, form)
    json.loads(sent)
    assert hears(monkeypatch, 0, sent).gather(value, form) == [value, value]
    assert hears(monkeypatch, 1, sent).from_first(None, form) == value


@pytest.mark.parametrize(
    ("sent", "form", "words"),
    [
        (b'"1"', int, "not of the form"),
        (b"1.5", int, "not of the form"),
        (b'"../../etc"', EntryName, "not of the form"),
        (b'["step-1", ".."]', list[EntryName], "not of the form"),
        (b'"step-1\\n"', EntryName, "not of the form"),
        (b"[" * 100_000, int, "not of the form"),
        (b"", int, "0 bytes"),
    ],
)
def test_a_message_of_another_form_is_refused_with_its_sender(monkeypatch, sent: bytes, form: object, words: str) -> None:
    with pytest.raises(InvariantError, match=f"rank 0 .*{words}"):
        hears(monkeypatch, 1, sent).from_first(None, form)


@pytest.mark.parametrize("announced", [-1, 0, (16 << 20) + 1, 1 << 62])
def test_no_memory_is_taken_for_a_message_that_is_too_long(monkeypatch: pytest.MonkeyPatch, announced: int) -> None:
    for rank, name in ((1, "gather"), (1, "from_first")):
        with pytest.raises(InvariantError, match=f"announces a message of {announced} bytes"):
            getattr(hears(monkeypatch, rank, b"1", announced), name)(1, int)


UNSAFE = frozenset(
    {
        *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "allow_pickle"),
        *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
        *("send_object_list", "recv_object_list", "ProcessPoolExecutor", "JoinableQueue"),
        *("multiprocessing.Queue", "multiprocessing.SimpleQueue", "multiprocessing.Pool", "multiprocessing.Pipe"),
        *("torch.load", "np.load", "numpy.load", "torch.distributed.checkpoint", "torch.multiprocessing", "dist.checkpoint"),
    }
)
"""What unpickles, by name."""


def test_nothing_in_the_trainer_unpickles() -> None:
    found = []
    root = Path(finetune_trainer.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names: list[str] = []
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom():
                    names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
                    names += [alias.name for alias in node.names]
                case ast.Attribute():
                    names = [node.attr, ast.unparse(node)]
                case ast.Name():
                    names = [node.id]
                case ast.keyword(arg=str(arg)):
                    names = [arg]
            found += [f"{path.relative_to(root)}: {name}" for name in names if name in UNSAFE]
    assert len(list(root.rglob("*.py"))) > 100
    assert found == []
