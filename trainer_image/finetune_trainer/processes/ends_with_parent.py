"""The process that imports this module ends with its parent.

A fork server imports it first. Otherwise the server would wait for its forks to end, and they for the server.
"""

import os

from finetune_trainer.processes.start import die_with

die_with(os.getppid())
