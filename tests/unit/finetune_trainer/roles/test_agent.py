"""torchrun's agent as a program. What it does with real ranks: test_train.py."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from finetune_cli.local.launch import free_port
from finetune_trainer.roles import agent
from tests.unit.finetune_trainer.roles.test_train import eventually

RANK = """
import os, sys, time
directory, rank = sys.argv[1], os.environ["RANK"]
with open(f"{directory}/new-{rank}", "w") as file:
    file.write(f"{os.getpid()} {os.getppid()}")
os.rename(f"{directory}/new-{rank}", f"{directory}/{rank}")
while rank == "0" and not os.path.exists(f"{directory}/go"):
    time.sleep(0.05)
"""


@dataclass
class Agent:
    """A running agent."""

    process: subprocess.Popen[str]
    orders: int
    answers: int

    def order(self, line: str) -> None:
        os.write(self.orders, f"{line}\n".encode())


@contextmanager
def running(scratch: Path) -> Iterator[Agent]:
    reading, writing = os.pipe()
    answer_reading, answer_writing = os.pipe()
    command = [sys.executable, "-m", agent.__name__, "--parent", str(os.getpid()), "--preload", "json", "--scratch", str(scratch)]
    command += ["--orders", str(reading), "--answers", str(answer_writing)]
    process = subprocess.Popen(command, pass_fds=(reading, answer_writing), stderr=subprocess.PIPE, text=True)
    for descriptor in (reading, answer_writing):
        os.close(descriptor)
    with process:
        try:
            yield Agent(process, writing, answer_reading)
        finally:
            process.kill()
            for descriptor in (writing, answer_reading):
                os.close(descriptor)


def state(pid: int) -> str:
    """State of a process as in ps, such as S or Z; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def is_waiting(pid: int, waits: Callable[[str], bool]) -> bool:
    return waits(Path(f"/proc/{pid}/wchan").read_text())


def test_an_agent_that_cannot_read_its_order_ends_with_the_reason(tmp_path: Path) -> None:
    with running(tmp_path) as started:
        started.order("no arguments")
        _, errors = started.process.communicate(timeout=300)
        assert started.process.returncode == 1
        assert "JSONDecodeError" in errors
        assert os.read(started.answers, 10) == b""


def test_a_rank_that_is_killed_while_it_waits_for_the_others_does_not_block_the_end(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    arguments = {"--nnodes": 1, "--nproc-per-node": 2, "--node-rank": 0, "--master-addr": "127.0.0.1", "--max-restarts": 0}
    arguments |= {"--master-port": free_port(), "--start-method": "forkserver", "--log-dir": tmp_path / "log"}
    with running(tmp_path) as started:
        started.order(
            json.dumps([*(str(part) for pair in arguments.items() for part in pair), "--run-path", str(script), str(tmp_path)])
        )
        pids = [eventually((tmp_path / rank).exists) and (tmp_path / rank).read_text().split() for rank in "01"]
        (first, server), (second, _) = ([int(pid) for pid in each] for each in pids)
        # Rank 1 has done its work. While its fork server is stopped, the agent does not hear of its death.
        eventually(lambda: is_waiting(second, lambda wait: "poll" in wait or "futex" in wait))
        os.kill(server, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        (tmp_path / "go").touch()
        eventually(lambda: state(first) == "Z")
        os.kill(server, signal.SIGCONT)
        assert os.read(started.answers, 10) == b"1\n"
