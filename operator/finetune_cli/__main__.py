"""`python -m finetune_cli`."""

from finetune_cli.main import main

main()
