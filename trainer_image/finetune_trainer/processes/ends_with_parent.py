"""Makes the process that imports this module end together with its parent.

A fork server imports this module first. Otherwise, the server would wait for its forks to end, and the forks for the server.
"""

import os

from finetune_trainer.processes.start import die_with

die_with(os.getppid())
