"""Builds the Krew plugin `kubectl finetune`: an archive for each platform, and the manifest that names them.

An archive contains the command line and its locked dependencies, without those of the trainer. Archives for Linux also contain
the Python interpreter, and need only `/bin/sh` on the machine; those for macOS need Python 3.11.
"""
