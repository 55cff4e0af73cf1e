"""Importing this module imports what a rank needs of libraries, for the fork server of ranks.

A plan that may pack its base does without it: bitsandbytes, which PEFT imports then, asks for the device when it is imported, and
no fork could use the device afterwards.
"""

import atexit
import os

from finetune_trainer.processes.start import compile_conversions, keep_bitsandbytes_out, preload

# The fork server has nothing to finish, and libraries print what they have leaked when an interpreter ends.
atexit.register(os._exit, 0)
keep_bitsandbytes_out()
preload("finetune_trainer.train.rank")
compile_conversions()
