import pytest

from finetune_trainer.likely_name import likely_address


@pytest.mark.parametrize(
    ("address", "names", "likely"),
    [
        ("pvc://data/chta.jsonl", ["chat.jsonl", "other.txt"], "pvc://data/chat.jsonl"),
        ("pvc://models/lama", ["llama", "qwen"], "pvc://models/llama"),
        ("pvc://models/deep/lama/", ["llama"], "pvc://models/deep/llama"),
        ("pvc://models/other", ["llama", "qwen"], None),
        ("pvc://models/lama", [], None),
        ("pvc://models", ["modells"], None),
        ("s3://bucket/train.jsonl", ["trian.jsonl"], "s3://bucket/trian.jsonl"),
    ],
)
def test_the_name_that_was_most_likely_meant(address: str, names: list[str], likely: str | None) -> None:
    assert likely_address(address, names) == likely
