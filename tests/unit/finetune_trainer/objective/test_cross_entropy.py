"""Loss and gradients of a few positions at a time are those of whole logits."""

import pytest
import torch
from torch.nn import functional

from finetune_memory.loss import MIN_ROWS_PER_PART, VALUES_PER_PART
from finetune_trainer.objective import cross_entropy
from finetune_trainer.objective.next_token import targets_of
from tests.support.memory_tracking import StorageTracker
from tests.unit.finetune_trainer.train.recorded_steps import distance

CPU = torch.device("cpu")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts for little data."""
    monkeypatch.setitem(VALUES_PER_PART, "cpu", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_parts_give_the_loss_and_the_gradients_of_whole_logits(dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    num_rows, vocabulary, factor = 3 * MIN_ROWS_PER_PART + 7, 301, 0.37
    hidden = torch.randn(2, num_rows, 24).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 24).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary).to(dtype).requires_grad_() if with_bias else None
    labels = torch.randint(0, vocabulary, (2, num_rows))
    labels[:, ::3] = -100
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    targets = targets_of(labels, factor, CPU)
    logits = functional.linear(hidden.flatten(0, 1)[targets.rows], weight, bias)
    plain = functional.cross_entropy(logits.float(), targets.labels, reduction="sum") * factor
    wanted = torch.autograd.grad(plain, leaves)
    found = cross_entropy.cross_entropy_of_linear(hidden, weight, bias, targets, dtype)
    gradients = torch.autograd.grad(found, leaves)
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(plain.item(), rel=1e-6)
    assert torch.equal(gradients[0], wanted[0]), "the gradient of the hidden states is the same, bit for bit"
    # bfloat16 rounds the logits already.
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_logits = functional.linear(exact[0].flatten(0, 1)[targets.rows], *exact[1:])
    truths = torch.autograd.grad(functional.cross_entropy(exact_logits, targets.labels, reduction="sum") * factor, exact)
    bound = 1e-6 if dtype is torch.float32 else 1e-2
    for gradient, truth in zip(gradients, truths, strict=True):
        assert gradient.dtype is dtype
        assert distance(gradient.double(), truth) < bound
    with torch.no_grad():
        without = cross_entropy.cross_entropy_of_linear(hidden, weight, bias, targets, dtype)
    assert without.item() == pytest.approx(found.item(), rel=1e-7)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_nothing_of_a_part_stays_while_the_next_is_computed(dtype: torch.dtype, size: int) -> None:
    """On one H200 the gradient of the part before had been there, of 2^27 logits: 256 MiB above what was planned."""
    vocabulary = 4096
    peaks = []
    for num_parts in (1, 2, 3):
        num_rows = num_parts * MIN_ROWS_PER_PART
        hidden = torch.randn(num_rows, 4).to(dtype).requires_grad_()
        weight = torch.randn(vocabulary, 4).to(dtype)
        targets = cross_entropy.Targets(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64), 1.0)
        with StorageTracker([hidden, weight]) as tracker:
            cross_entropy.cross_entropy_of_linear(hidden, weight, None, targets, dtype)
        peaks.append(tracker.peak)
    # Logits in their own type, and in float32 their log-softmax and the gradients of both; next to nothing for each row.
    logits = MIN_ROWS_PER_PART * vocabulary
    assert peaks == pytest.approx([logits * (size + 3 * 4)] * 3, rel=0.01)


@pytest.mark.usefixtures("small_parts")
def test_the_gradient_of_a_16_bit_head_is_summed_in_float32() -> None:
    """Of many parts that each add little: a sum in bfloat16 would stop growing."""
    torch.manual_seed(0)
    num_rows = 64 * MIN_ROWS_PER_PART
    hidden = torch.randn(1, num_rows, 8, dtype=torch.bfloat16)
    weight = (torch.randn(5, 8) / 10).to(torch.bfloat16).requires_grad_()
    targets = targets_of(torch.zeros(1, num_rows, dtype=torch.int64), 1.0, CPU)
    (found,) = torch.autograd.grad(cross_entropy.cross_entropy_of_linear(hidden, weight, None, targets, torch.bfloat16), weight)
    precise = weight.detach().float().requires_grad_()
    rows = hidden.flatten(0, 1)[targets.rows].float()
    (truth,) = torch.autograd.grad(
        functional.cross_entropy(functional.linear(rows, precise), targets.labels, reduction="sum"), precise
    )
    assert distance(found.float(), truth) < 3e-3


@pytest.mark.parametrize("layer", ["linear", "any"])
def test_no_supervised_token_is_loss_zero_with_gradients(layer: str) -> None:
    hidden, weight = torch.randn(1, 4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    targets = targets_of(torch.full((1, 4), -100), 1.0, CPU)
    if layer == "linear":
        loss = cross_entropy.cross_entropy_of_linear(hidden, weight, None, targets, torch.float32)
    else:
        rows = hidden.flatten(0, 1)[targets.rows]
        loss = cross_entropy.cross_entropy_of(rows, lambda some: some @ weight.t(), targets)
    loss.backward()
    assert loss.item() == 0.0
    for leaf in (hidden, weight):
        # Not None: a rank whose head got no gradient would leave the others waiting for its part.
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))
