"""In a run in bfloat16 an optimizer step multiplies in bfloat16: forward, backward and loss, counted by operators.

Float32 are sums, norms, softmax, and the weights that are trained; a matrix product of them would take a device 8 to 16 times
as long. Attention by bounds is computed on the CPU by sdpa, whose operators are products, too.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from finetune_memory.choices import choose_precision
from tests.support.shapes import SmallRun, plan_of_shape, write_shape
from tests.support.tiny_model import tiny_spec

PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback", "mv", "addmv", "dot", "vdot",
    "linear", "matmul", "addbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip


class Products(TorchDispatchMode):
    """How many products there were, by operator and by whether anything in them was float32."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: Counter[str] = Counter()
        self.wide: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0].removesuffix("_")
        if name in PRODUCTS:
            # What follows the factors of attention are its sums.
            factors = [each for each in args[:4] if isinstance(each, torch.Tensor) and each.is_floating_point()]
            (self.wide if torch.float32 in {each.dtype for each in factors} else self.narrow)[name] += 1
        return result


def products(directory: Path, kind: str, **settings: Any) -> Products:
    """Of the second step of a model that is stored in bfloat16."""
    run = SmallRun(plan_of_shape(kind, is_fast=True, **settings), write_shape(directory, kind, torch.bfloat16))
    run.step(0)
    with Products() as found:
        run.step(1)
    return found


@pytest.mark.parametrize(
    ("kind", "updates"),
    # In each of two layers and two micro-batches: seven linear layers; those of Mixtral's attention, whose experts are adapted as
    # they are stacked; of GPT-2 four, and what they compute by themselves, which has a bias.
    [("llama", 28), ("qwen3", 28), ("gemma2", 28), ("mixtral", 16), ("gpt2", 32)],
)
def test_lora_has_no_float32_product(tmp_path: Path, kind: str, updates: int) -> None:
    found = products(tmp_path, kind, precision="bf16")
    assert not found.wide
    assert found.narrow["addmm"] == updates
    assert found.narrow["_grouped_mm"] == (24 if kind == "mixtral" else 0)


@pytest.mark.parametrize("method", [{}, {"dropout": "0.1"}, {"method": "QLoRA"}, {"method": "QLoRA", "dropout": "0.1"}], ids=str)
def test_nor_has_it_where_the_precision_is_left_open(tmp_path: Path, method: dict[str, str]) -> None:
    """PEFT's own layers would multiply in float32, in which adapters are held."""
    found = products(tmp_path, "llama", **method)
    assert not found.wide
    # Forward, of each adapter its two products, and the base's; of a packed base inside its own function.
    assert found.narrow["addmm"] == 28


@pytest.mark.parametrize(
    "method",
    [
        {"type": "DoRA", "lora": {"r": 4}},
        {"type": "QDoRA", "lora": {"r": 4}},
        {"type": "QLoRA", "lora": {"r": 4}, "quantization": {"bits": 8}},
        {"type": "LoRA", "lora": {"r": 4, "peftForward": True}},
        {"type": "LoKr", "settings": {"r": 4}},
        {"type": "VeRA", "settings": {"r": 4}},
    ],
    ids=str,
)
def test_what_is_not_fused_is_multiplied_in_the_type_of_the_base_on_a_gpu(tmp_path: Path, method: dict[str, Any]) -> None:
    spec = FineTuneJobSpec.model_validate(tiny_spec(method=method, training={"microBatchSize": 2}))
    base = write_shape(tmp_path, "llama", torch.bfloat16)
    wide = {}
    for has_gpu in (True, False):
        plan = resolve(JobIdentity(namespace="team", name="tune", uid="0123"), spec, None, has_gpu=has_gpu)
        run = SmallRun(plan.with_choices(choose_precision(plan, "bfloat16")), base)
        run.step(0)
        with Products() as found:
            run.step(1)
        wide[has_gpu] = sum(found.wide.values())
    # On a CPU nothing is chosen, and adapters are multiplied as they are held.
    assert wide[True] == 0 < wide[False]


@pytest.mark.parametrize(
    ("kind", "wide"),
    [
        # The gradient of the output layer is summed in float32 over parts of the batch; a CPU has no product of 16 bits that is
        # float32, as a device has (objective/cross_entropy.py::_add_product). Gemma 2 caps its logits, which takes another way.
        ("llama", {"addmm": 2}),
        ("qwen3", {"addmm": 2}),
        ("gemma2", {}),
        ("gpt2", {"addmm": 2}),
        # transformers multiplies experts in the type that they are held in, whatever autocast says. With more ranks FSDP casts
        # them; on one they are products of float32: two, and two of each backwards, in each of two layers of two micro-batches.
        ("mixtral", {"addmm": 2, "_grouped_mm": 24}),
    ],
)
def test_what_is_float32_in_full_fine_tuning(tmp_path: Path, kind: str, wide: dict[str, int]) -> None:
    found = products(tmp_path, kind, method="Full", precision="bf16")
    assert dict(found.wide) == wide
    # The router's, too, and attention's.
    assert found.narrow["mm"] >= 36


def test_every_product_is_counted(tmp_path: Path) -> None:
    """Guards the tests above: of a run in float32 all of them are."""
    found = products(tmp_path, "mixtral", precision="fp32")
    assert not found.narrow
    # Attention's four layers, each with two more of LoRA, in two layers of two micro-batches: forward alone.
    assert found.wide["mm"] > 4 * 2 * 2 * 2
    assert found.wide["_grouped_mm"] == 24
    assert found.wide["baddbmm"] == 16
