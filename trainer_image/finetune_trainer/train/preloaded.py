"""The fork server of ranks imports this module, which imports the libraries that a rank needs.

This module is not used for plans that may quantize their base: PEFT would import bitsandbytes, which initialises the device, and
then no fork could use the device.
"""

import atexit
import os

from finetune_trainer.processes.start import keep_bitsandbytes_out, preload

# The fork server has nothing to clean up, and libraries would report leaks if the interpreter ended normally.
atexit.register(os._exit, 0)
keep_bitsandbytes_out()
preload("finetune_trainer.train.rank")
