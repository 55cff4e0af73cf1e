"""`python -m finetune_trainer.train`: one rank, as torchrun starts it."""

from finetune_trainer.processes.start import end, preload

if __name__ == "__main__":
    preload("finetune_trainer.train.rank")
    from finetune_trainer.train.rank import main

    end(main())
