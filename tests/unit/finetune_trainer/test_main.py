"""The entry point of all roles."""

import sys


def test_reading_roles_needs_no_torch() -> None:
    """The supervisor and its reports must not take torch's seconds and memory in every pod."""
    import subprocess

    code = "import sys, finetune_trainer.__main__, finetune_trainer.roles.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
