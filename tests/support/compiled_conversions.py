"""For fork servers to preload: does what each of their forks that loads a model would do again, for 0.1 to 0.4 s."""

from finetune_trainer.processes.start import compile_conversions

compile_conversions()
