"""`kubectl finetune` as Krew installs it: an archive for each platform, and the manifest that names them.

An archive holds the command line with its locked dependencies, without the trainer's. Those for Linux hold the interpreter, too,
and need nothing of the machine but `/bin/sh`; those for macOS need Python 3.11.
"""
