"""The program that looks at first records, with a look that fails as the environment says."""

import os
import signal
import sys
from typing import Any

from finetune_trainer.roles import look

FAILS = "LOOK_FAILS"


def ending(_order: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def raising(_order: Any) -> Any:
    raise ValueError("one\ntwo")


def waiting(_order: Any) -> Any:
    signal.pause()


if __name__ == "__main__":
    look.look = {"ending": ending, "raising": raising, "waiting": waiting}[os.environ[FAILS]]
    sys.exit(look.main())
