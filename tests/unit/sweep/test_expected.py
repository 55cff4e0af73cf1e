"""What the sweep measures a run by: its own figures against numbers by hand, transformers' schedules, and the data on disk."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from finetune_trainer.data.batches import PreparedData
from tests.sweep import added, expected, oracle
from tests.sweep.expected import IGNORED, clipping, gradient_norm, rate, sequences, share
from tests.sweep.material import write_data
from tests.sweep.record import second_looks, second_looks_text


def test_nothing_of_the_product_is_imported() -> None:
    tree = ast.parse(Path(expected.__file__).read_text(encoding="utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module.partition(".")[0] for module in modules} == {
        *("__future__", "collections", "dataclasses", "fractions", "math", "numpy", "torch"),
    }


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("num_added", [0, 10])
def test_documents_and_labels_are_those_on_disk(tmp_path: Path, packs: bool, num_added: int) -> None:
    write_data(tmp_path)
    name = f"{'packed' if packs else 'apart'}-validated{f'-{num_added}' if num_added else ''}"
    data = PreparedData.open(tmp_path / "prepared" / name)
    assert data.validation is not None
    for split, drawn in ((data.train, expected.TRAIN), (data.validation, expected.HELD_OUT)):
        own = sequences(drawn, packs=packs, num_added=num_added)
        assert split.num_sequences == len(own) == drawn[0]
        assert max(map(len, own)) == (3 if packs else 1)
        for number, documents in enumerate(own):
            batch = split.batch([number])
            tokens = [token for document in documents for token in document.tokens]
            labels = [label for document in documents for label in document.labels]
            positions = [place for document in documents for place in range(len(document.tokens))]
            length = len(tokens)
            assert batch.input_ids[0, :length].tolist() == tokens
            assert batch.labels[0].tolist() == labels + [IGNORED] * (batch.labels.shape[1] - length)
            assert batch.position_ids[0, :length].tolist() == positions
            assert batch.document_lengths == tuple(len(document.tokens) for document in documents)


def test_the_first_two_tokens_of_a_document_are_not_supervised() -> None:
    for documents in sequences(expected.TRAIN, packs=True):
        for document in documents:
            assert document.labels == (IGNORED, IGNORED, *document.tokens[2:])
            assert 5 <= len(document.tokens) <= 12


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("tokens", [added.ORDINARY, added.SPECIAL])
def test_each_added_token_is_read_and_learnt(tokens: list[added.Token], packs: bool) -> None:
    """Not as the last one of a document, from which nothing is predicted; and it is predicted somewhere."""
    documents = [document for each in sequences(expected.TRAIN, packs=packs, num_added=len(tokens)) for document in each]
    wanted = set(added.ids_of(tokens))
    assert wanted <= {token for document in documents for token in document.tokens[:-1]}
    assert wanted <= {label for document in documents for label in document.labels}
    assert max(token for document in documents for token in document.tokens) == max(wanted)


@pytest.mark.parametrize(
    ("written", "taken", "is_tied", "rows"),
    [
        ([], set(), False, {"in": [257, 258], "out": [257, 258]}),
        ([5], set(), False, {"in": [5, 257, 258], "out": [257, 258]}),
        ([5], {"out"}, False, {"in": [5, 257, 258]}),
        ([], {"in"}, False, {"out": [257, 258]}),
        ([], {"in", "out"}, False, None),
        ([5], {"other"}, True, [5, 257, 258]),
        ([], {"out"}, True, None),
    ],
)
def test_rows_that_peft_is_told_to_train(written: list[int], taken: set[str], is_tied: bool, rows: object) -> None:
    tokens = [{"content": "a"}, {"content": "b"}]
    assert added.trained_rows(written, tokens, ("in", "out"), taken, is_tied=is_tied) == rows


@pytest.mark.parametrize(
    ("schedule", "more", "rates"),
    [
        ("Constant", {"warmup": 0.5}, [0.5, 1, 1, 1]),
        ("Linear", {"warmup": 0.5}, [0.5, 1, 1, 0.5]),
        ("Cosine", {"warmup": 0.0}, [1, 0.853553, 0.5, 0.146447]),
        ("Cosine", {"warmup": 0.0, "least": 0.2}, [1, 0.882843, 0.6, 0.317157]),
        ("InverseSqrt", {"warmup": 0.5}, [0.5, 1, 1, 0.816497]),
        ("WarmupStableDecay", {"warmup": 0.25, "decay": 0.75}, [1, 1, 0.666667, 0.333333]),
        ("WarmupStableDecay", {"warmup": 0.0, "decay": 0.0}, [1, 1, 1, 1]),
    ],
)
def test_rates_of_four_steps(schedule: str, more: dict[str, float], rates: list[float]) -> None:
    assert [round(rate(step, 4, peak=1.0, schedule=schedule, **more), 6) for step in range(4)] == rates


def test_whole_steps_of_a_share() -> None:
    assert [share(50, 0.14), share(100, 0.03), share(3, 0.03), share(10, 0.31), share(4, 0.0)] == [7, 3, 1, 4, 0]
    with pytest.raises(ValueError, match="no schedule 'Square'"):
        rate(0, 4, peak=1.0, schedule="Square", warmup=0.0)


@pytest.mark.parametrize(
    ("schedule", "name"),
    [("Constant", "constant_with_warmup"), ("Linear", "linear"), ("Cosine", "cosine"), ("InverseSqrt", "inverse_sqrt")],
)
def test_after_the_warm_up_rates_are_those_of_transformers(schedule: str, name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=20)
    for step in range(20):
        if step >= 4:
            assert rate(step, 20, peak=0.5, schedule=schedule, warmup=0.2) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        scheduler.step()


def test_the_norm_and_what_it_clips() -> None:
    gradients = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([4.0], dtype=torch.bfloat16)}
    assert gradient_norm(gradients) == 5.0
    assert [clipping(5.0, largest) for largest in (0.0, 1.0, 5.0, 9.0)] == [1.0, 0.2, 1.0, 1.0]
    assert clipping(0.0, 1.0) == 1.0


def test_a_norm_is_as_far_off_as_its_gradients_may_be_and_no_farther() -> None:
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    plain = oracle.norm_bound(exact, [], None, exact)
    assert plain == pytest.approx(3e-5)
    assert oracle.norm_bound(exact, [], 8, exact) == pytest.approx(3e-5 + 2**-8)
    coarse = {**exact, "b": torch.tensor([4.05])}
    assert oracle.norm_bound(exact, [exact, coarse], None, exact) == pytest.approx(3e-5 + 8 * 0.05 / 5, rel=1e-4)
    in_float16 = {name: gradient.half() for name, gradient in exact.items()}
    assert oracle.norm_bound(exact, [], None, in_float16) == pytest.approx(3e-5 + 2**-24 * 3**0.5 / 5)
    # A loss scale that is not divided out, or a norm of one rank's share, is far beyond.
    assert oracle.compare_losses(5.0 * 65536, 5.0, 8 * 0.05 / 5, "norm")
    assert oracle.compare_losses(5.0 / 2**0.5, 5.0, 8 * 0.05 / 5, "norm")


def test_second_looks_are_told() -> None:
    looks = [
        {"id": "a", "kind": "false accept"},
        {"id": "b", "kind": "accepted", "look": 1},
        {"id": "c", "kind": "false accept", "look": 1},
        {"id": "a", "kind": "accepted", "look": 2},
        {"id": "c", "kind": "false accept", "look": 2},
    ]
    assert second_looks(looks) == {"false accept -> accepted": 1, "false accept -> false accept": 1}
    text = second_looks_text({"a": "false accept", "c": "false accept"}, {"a": "accepted", "b": "accepted", "c": "false accept"})
    assert text == "second looks 2, of which 1 came out otherwise\n    a (false accept, then accepted)"
    assert second_looks_text({}, {}) == "second looks 0, of which 0 came out otherwise"
