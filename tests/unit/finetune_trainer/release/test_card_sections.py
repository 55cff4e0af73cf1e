"""What the parts of the model card say of the run."""

from __future__ import annotations

from finetune_trainer.release.card import model_card
from tests.unit.finetune_trainer.release.example import DATA_COMMIT, FROM_HUB, IMAGE, example

HUB = {"output.destination": "hf://team/tuned"}


def test_everything_about_the_run_is_told(tmp_path):
    made = example(tmp_path, FROM_HUB | HUB)
    card = model_card(made.facts())
    expected = [
        f"`hf://datasets/maker/records/train` at `{DATA_COMMIT}`",
        "| 30 | 4,321 | 1,234 |",
        f"* `a.jsonl`: SHA-256 `{'e' * 64}`",
        "10 optimizer steps over 1,000 tokens, 600 of them supervised.",
        "| base model | 0 | 2.5000 |",
        "| last | 10 | 1.7500 |",
        "held-out loss  █▁  2.5 -> 1.75",
        "| same most likely token | 99.0000% | at least 97.00% |",
        "| mean KL divergence of 90% of positions from base and adapter, nats | 0.0001 | at most 0.005 |",
        f"| plan, SHA-256 | `{made.context.plan_sha256}` |",
        f"| trainer image | `{IMAGE}` |",
        f"| base digest, SHA-256 over configuration, index, headers and sizes | `{'c' * 64}` |",
        "whose licence still applies: `maker-terms`",
        "| `learning_rate` |",
        "| `r` | `16` |",
        "| `weight_decay` | `0` |",
    ]
    assert [part for part in expected if part not in card] == []
