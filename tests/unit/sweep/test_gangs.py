"""When a gang of the sweep takes another case, and when it is replaced."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.sweep import gangs
from tests.sweep.gangs import Answer, GangPool


@dataclass
class Rank:
    """In place of a process: its answer is there before it is asked. If it is killed, `next` answers `then`."""

    connection: Connection
    next: Connection | None = None
    then: Answer | None = None
    is_killed: bool = False

    def kill(self) -> None:
        if self.next is not None and not self.is_killed:
            self.next.send(self.then)
        self.is_killed = True

    def join(self) -> None:
        self.connection.close()


class Pool(GangPool):
    """Each gang answers `answers`; a rank with None answers `late` when the other one has been killed."""

    def __init__(self, *answers: Answer | None, late: Answer | None = None) -> None:
        super().__init__("tests.sweep.rank:answer")
        self.answers, self.late = answers, late
        self.gangs: list[list[Rank]] = []

    def _start(self) -> None:
        self._done = 0
        self._directory = tempfile.TemporaryDirectory()
        pipes = [Pipe() for _ in self.answers]
        ranks = [Rank(theirs) for _, theirs in pipes]
        if self.late is not None:
            ranks[0].next, ranks[0].then = pipes[1][1], self.late
        self.gangs.append(ranks)
        self._ranks = [(rank, ours) for rank, (ours, _) in zip(ranks, pipes, strict=True)]  # type: ignore[misc]

    def ask(self, request: Any) -> list[Any | None]:
        if not self._ranks:
            self._start()
        for rank, answer in zip(self.gangs[-1], self.answers, strict=True):
            if answer is not None:
                rank.connection.send(answer)
        return super().ask(request)


@pytest.mark.parametrize(
    ("answers", "num_gangs"),
    [
        ((Answer("works"), Answer("works")), 1),
        ((Answer("refused", "ConfigError: no"), Answer("refused", "ConfigError: no")), 1),
        ((Answer("refused", "ConfigError: no"), Answer("refused", "RuntimeError: other")), 3),
        ((Answer("refused", "ConfigError: no"), Answer("works")), 3),
    ],
    ids=["both work", "both fail alike", "they fail in different ways", "one fails"],
)
def test_ranks_that_came_equally_far_take_another_case(answers: tuple[Answer, ...], num_gangs: int) -> None:
    pool = Pool(*answers)
    for _ in range(3):
        assert pool.ask("case") == [answer.result for answer in answers]
    assert len(pool.gangs) == num_gangs


def test_a_rank_that_fails_alone_is_ended_so_that_the_other_one_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "SAME_FAILURE_SECONDS", 0.01)
    pool = Pool(Answer("fails", "RuntimeError: one"), None, late=Answer("closed", "RuntimeError: Connection closed"))
    assert pool.ask("case") == ["fails", "closed"]
    assert pool.gangs[0][0].is_killed
    assert pool.ask("case") == ["fails", "closed"]
    assert len(pool.gangs) == 2


def test_a_gang_is_replaced_after_so_many_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "CASES_PER_GANG", 2)
    pool = Pool(Answer("works"), Answer("works"))
    for _ in range(4):
        pool.ask("case")
    assert len(pool.gangs) == 2
