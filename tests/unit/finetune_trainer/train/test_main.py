"""What a rank makes sure of before it does anything: the process that it is a fork of has one thread, and its agent lives."""

import subprocess
import sys

import pytest

FORKED = """
import multiprocessing, os, sys, threading
from finetune_trainer.processes.child import ThreadsAtForkError
from finetune_trainer.train import __main__ as rank

class Agent:
    is_alive = staticmethod(lambda: sys.argv[1] != "gone")

if sys.argv[1] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
multiprocessing.parent_process = lambda: Agent
if (pid := os.fork()) == 0:
    try:
        rank.die_with_agent()
    except ThreadsAtForkError as error:
        print(error, flush=True)
        os._exit(3)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(("what", "code"), [("one", 0), ("gone", 1), ("threads", 3)])
def test_a_rank_ends_if_its_agent_is_gone_and_refuses_to_be_a_fork_of_a_process_with_threads(what: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", FORKED, what], capture_output=True, text=True, check=False, timeout=300)
    assert ended.stdout.splitlines()[-1:] == [str(code)], ended.stderr
    assert ("has more than one thread" in ended.stdout) == (what == "threads")
