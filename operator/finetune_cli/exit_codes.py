"""Exit codes of `finetune`."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the caller of a command may rely on."""

    DONE = 0
    """Accepted, or run to the end."""
    REFUSED = 1
    """A rule or preflight says that the job cannot work."""
    UNUSABLE = 2
    """The input cannot be read as what it should be; also wrong arguments."""
    FAILED = 3
    """A run failed."""
    INTERRUPTED = 130
    """Ended by SIGINT or SIGTERM; a run can be continued."""
