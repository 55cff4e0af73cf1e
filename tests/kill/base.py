"""The part of preflight that writes a base with added tokens, killed until that base is there.

It has two processes: one that waits for findings, and a fork of it that writes. A moment by the clock kills the first, and the
other one with it; a call that the other makes kills that one alone.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from finetune_trainer.context import RunContext
from finetune_trainer.preflight import added_tokens
from finetune_trainer.preflight.added_tokens import add_tokens
from finetune_trainer.processes import child
from tests.kill.moments import Moment, OutputTo, hooks_of, random_moment
from tests.support.forked_base import start_forked
from tests.support.forked_ranks import run_processes

USUAL_SECONDS = 0.5
"""Once the server of forks runs."""
MOST_ATTEMPTS = 40
_ONLY = (0,)
HOOKS = hooks_of("BASE", _ONLY)


def make_base(context: RunContext, log: Path, moments: Sequence[Moment] = ()) -> int:
    """The exit code of what writes it."""
    return run_processes([partial(_add_tokens, context, [OutputTo(log), *moments])])[0]


def base_bytes(context: RunContext) -> dict[str, bytes]:
    """All that it has written, by the name below the workspace."""
    root = context.workspace.root
    files = [context.workspace.added_tokens, *context.workspace.base_with_tokens.rglob("*")]
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.is_file()}


def make_base_with_kills(
    context: RunContext, expected: dict[str, bytes], directory: Path, random: Random, *, deadly: bool, most_kills: int
) -> tuple[int, list[str], str]:
    """How often it was hit, what happened, and what was wrong; empty if every byte is as expected.

    directory: of this run, for logs and for what a process that is hit writes down.
    """
    landed = directory / "base-landed"
    landed.mkdir()
    names = {path.name for path in context.workspace.root.iterdir()} | {name.partition("/")[0] for name in expected}
    wanted, story = random.randint(1, most_kills), []
    for attempt in itertools.count():
        hits = len([*landed.iterdir()])
        is_disturbed = hits < wanted and attempt < MOST_ATTEMPTS
        moments = []
        if is_disturbed:
            moment = random_moment(random, attempt, landed, deadly=deadly, usual_seconds=USUAL_SECONDS, hooks=HOOKS, ranks=_ONLY)
            moments = [moment]
        code = make_base(context, directory, moments)
        was_hit = len([*landed.iterdir()]) > hits
        story.append(
            f"base {attempt}: {moments[0] if moments else 'undisturbed'}{'' if was_hit else ', not hit'}; ended with {code}"
        )
        # Its record says that the base is whole.
        if context.workspace.added_tokens.exists() and base_bytes(context) != expected:
            return hits, story, f"attempt {attempt} at the base left a record of another one than the undisturbed"
        if code == 0 and not context.workspace.added_tokens.exists():
            return hits, story, f"attempt {attempt} at the base says that it is there, and it is not"
        if code != 0 and not was_hit:
            return hits, story, f"attempt {attempt} at the base ended with {code}, and was not hit"
        if not is_disturbed:
            break
    left = {path.name for path in context.workspace.root.iterdir()} - names
    return hits, story, f"left next to the base: {sorted(left)}" if left else ""


def _add_tokens(context: RunContext, disturbances: Sequence[OutputTo | Moment]) -> int:
    added_tokens._start = start_forked
    # A moment by the clock waits in a thread of this process, which the product would not fork then.
    child.threads = lambda _pid: {}
    for each in disturbances:
        each.arm(0)
    found, _ = add_tokens(context)
    print(found, flush=True)
    return 1 if found else 0
