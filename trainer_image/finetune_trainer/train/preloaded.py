"""Importing this module imports the libraries that a rank needs, for the fork server of ranks.

Plans that may quantize their base do without it: importing bitsandbytes, which PEFT then does, initialises the device, and no
fork could use the device afterwards.
"""

import atexit
import os

from finetune_trainer.processes.start import compile_conversions, keep_bitsandbytes_out, preload

# The fork server has nothing to clean up, and libraries print leaks when an interpreter ends.
atexit.register(os._exit, 0)
keep_bitsandbytes_out()
preload("finetune_trainer.train.rank")
compile_conversions()
