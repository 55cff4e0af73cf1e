"""Time of a step, with expectations counted by hand for an 8B Llama at 4,096 tokens on an H100: 989e12 operations, 3.35e12 bytes
a second.
"""

from dataclasses import replace

import pytest

from finetune_memory.devices import ASSUMED, Calibration
from finetune_memory.pace import StepTime, UnknownPaceError, calculated_pace, run_steps
from tests.support.builders import JobBuilder, a_job
from tests.unit.finetune_memory.jobs import judged, shape_of

PEAK = Calibration(flops=1.0, attention=1.0, memory=1.0, link=1.0)
"""What no program can pass."""

TOKENS, HIDDEN, WIDTH, LAYERS, VOCABULARY = 4096, 4096, 14336, 32, 128256
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + 3 * HIDDEN * WIDTH)
HEAD = VOCABULARY * HIDDEN
FLOPS, MEMORY, LINK = 989e12, 3.35e12, 450e9


def job(**fields: object) -> JobBuilder:
    """One sequence in one micro-step."""
    found = a_job().spec("data.maxSequenceLength", TOKENS).spec("training", {"maxSteps": 10, "globalBatchSize": 1})
    written = {"model.attention": "varlen", "training.microBatchSize": 1, "training.activationCheckpointing": "None"}
    for path, value in (written | {path.replace("__", "."): value for path, value in fields.items()}).items():
        found = found.spec(path, value)
    return found


def paced(of: JobBuilder, name: str = "Llama-3.1-8B", product: str | None = "H100") -> StepTime:
    plan = judged(of, name).plan
    return calculated_pace(plan, shape_of(name, plan), "bfloat16", product, PEAK)


def seconds(found: StepTime, name: str) -> float:
    return sum(term.seconds for term in found.terms if term.name == name)


def test_a_frozen_base_takes_four_operations_a_value_and_token() -> None:
    assert seconds(paced(job()), "matrix products") == pytest.approx(4 * (LINEAR + HEAD) * TOKENS / FLOPS, rel=1e-6)
    again = paced(job(training__activationCheckpointing="Full"))
    assert seconds(again, "matrix products") == pytest.approx((6 * LINEAR + 4 * HEAD) * TOKENS / FLOPS, rel=1e-6)
    full = paced(job(method={"type": "Full"}))
    assert seconds(full, "matrix products") == pytest.approx(6 * (LINEAR + HEAD) * TOKENS / FLOPS, rel=1e-6)


def test_attention_computes_half_of_the_pairs_without_a_mask_and_all_with_one() -> None:
    # Two products forward and five backward, two operations each, of pairs of tokens with values of 32 heads of 128.
    causal = 7 * 2 * (TOKENS**2 / 2) * HIDDEN * LAYERS / FLOPS
    assert seconds(paced(job()), "attention") == pytest.approx(causal)
    assert seconds(paced(job(model__attention="sdpa")), "attention") == pytest.approx(2 * causal)
    # Eager attention writes and reads the scores of 32 heads, too: 40 bytes each.
    scores = 40 * TOKENS**2 * 32 * LAYERS / MEMORY
    assert seconds(paced(job(model__attention="eager")), "attention") == pytest.approx(2 * causal + scores)


def test_what_is_bound_by_memory_is_counted_in_bytes() -> None:
    found = paced(job())
    # Outputs of q, k, v, o, gate, up and down: 36 bytes for each value, compiled 10, and a third more where they are made again.
    outputs = 3 * HIDDEN + 2 * 1024 + 2 * WIDTH
    assert seconds(found, "elementwise") == pytest.approx(TOKENS * LAYERS * 36 * outputs / MEMORY)
    by_compiler = paced(job(training__compile=True))
    assert seconds(by_compiler, "elementwise") == pytest.approx(TOKENS * LAYERS * 10 * outputs / MEMORY)
    again = paced(job(training__activationCheckpointing="Selective"))
    assert seconds(again, "elementwise") == pytest.approx(4 / 3 * seconds(found, "elementwise"))
    # Adapters: 6 reads or writes of their inputs and 4 of their outputs.
    inputs = 6 * HIDDEN + WIDTH
    assert seconds(found, "adapters") == pytest.approx(TOKENS * LAYERS * 2 * (6 * inputs + 4 * outputs) / MEMORY)
    assert seconds(found, "logits and loss") == pytest.approx(TOKENS * VOCABULARY * 34 / MEMORY)
    assert seconds(found, "optimizer") == pytest.approx(41_943_040 * 28 / MEMORY)
    by_peft = paced(job(method={"type": "LoRA", "lora": {"peftForward": True}}))
    assert seconds(by_peft, "adapters") == pytest.approx(TOKENS * LAYERS * 2 * (6 * inputs + 11 * outputs) / MEMORY)
    # Half a byte read and two written of each packed value, forward and backward.
    packed = paced(job(method={"type": "QLoRA"}))
    assert seconds(packed, "unpacking") == pytest.approx(2 * 2.5 * LINEAR / MEMORY)


def test_micro_steps_add_up_and_ranks_go_side_by_side() -> None:
    one = paced(job(method={"type": "QLoRA"}))
    more = paced(job(method={"type": "QLoRA"}, training__globalBatchSize=16).processes_per_node(4))
    assert (more.tokens, more.ranks) == (16 * TOKENS, 4)
    times = {term.name: term.seconds / seconds(one, term.name) for term in more.terms}
    assert times.pop("optimizer") == pytest.approx(1 / 4)
    assert sorted(times) == ["adapters", "attention", "elementwise", "logits and loss", "matrix products", "unpacking"]
    assert list(times.values()) == pytest.approx([4] * 6)
    assert more.tokens_per_second == pytest.approx(16 * TOKENS / more.step_seconds)
    assert more.tokens_per_second_per_device == pytest.approx(more.tokens_per_second / 4)


def test_ranks_send_three_quarters_of_the_weights_in_each_pass() -> None:
    written = {"training__globalBatchSize": 4, "parallelism__fsdp__reshardAfterForward": True}
    found = paced(job(**written).processes_per_node(4))
    weights, adapters = 2 * 8_030_261_248, 41_943_040
    # FSDP gathers adapters as they are held, and reduces their gradients in float32.
    gathered = 2 * (weights + 4 * adapters) + 4 * adapters
    assert found.link_seconds == pytest.approx(0.75 * gathered / LINK)
    twice = paced(job(**written | {"training__globalBatchSize": 8}).processes_per_node(4))
    assert twice.link_seconds == pytest.approx(0.75 * (2 * gathered - 4 * adapters) / LINK)
    kept = paced(job(**written | {"parallelism__fsdp__reshardAfterForward": False}).processes_per_node(4))
    assert kept.link_seconds == pytest.approx(0.75 * (weights + 8 * adapters) / LINK)
    # Between machines the network: 25e9 bytes a second.
    two = paced(job(**written).nodes(2).processes_per_node(2))
    assert two.link_seconds == pytest.approx(0.75 * gathered / 25e9)
    assert (two.step_seconds, two.bound) == (two.link_seconds, "the links between devices")


def test_the_calculated_example_of_the_page() -> None:
    plan = judged(job(training__precision="bf16")).plan
    found = calculated_pace(plan, shape_of("Llama-3.1-8B", plan), "bfloat16", "H100", ASSUMED)
    assert found.tokens_per_second == pytest.approx(10_350, rel=0.01)
    assert TOKENS / seconds(found, "matrix products") == pytest.approx(23_060, rel=0.01)
    assert paced(job(training__precision="bf16")).tokens_per_second == pytest.approx(17_200, rel=0.01)
    assert paced(job(training__compile=True)).tokens_per_second == pytest.approx(21_080, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "product", "said"),
    [
        ({}, None, "no GPU is named, and time is calculated only for GPUs: give --gpu"),
        ({}, "Tesla P100", "no peak rates of 'Tesla P100' are known"),
        ({}, "Tesla T4", "Tesla T4 has no matrix units for bfloat16"),
        ({"training__precision": "fp32", "model__attention": "sdpa"}, "H100", "computes in float32"),
        ({"parallelism__fsdp__offloadParams": True}, "H100", "offloadParams"),
    ],
)
def test_an_unknown_pace_comes_with_what_to_do(fields: dict[str, object], product: str | None, said: str) -> None:
    with pytest.raises(UnknownPaceError, match=said):
        paced(job(**fields), product=product)


def test_a_model_without_layers_is_not_taken_for_a_fast_one() -> None:
    plan = judged(job()).plan
    shape = shape_of("Llama-3.1-8B", plan)
    head = replace(shape, parameters=tuple(each for each in shape.parameters if ".layers." not in each.name))
    with pytest.raises(UnknownPaceError, match="no layers"):
        calculated_pace(plan, head, "bfloat16", "H100")


def test_steps_of_a_run_are_known_with_its_data() -> None:
    by_epochs = a_job().spec("training", {"epochs": 2, "globalBatchSize": 8}).spec("data.maxSequenceLength", 1000).plan()
    # 10,001 tokens are 11 sequences; two passes 22, in steps of 8.
    assert [run_steps(job().plan(), None), run_steps(by_epochs, None), run_steps(by_epochs, 10_001)] == [10, None, 3]
