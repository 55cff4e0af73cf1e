"""The sweep's oracle on real runs: right ones work, and each planted fault is called silently wrong."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sweep import expected, oracle
from tests.sweep.architectures import ARCHITECTURES, write_base
from tests.sweep.case import Case
from tests.sweep.covering import products
from tests.sweep.gangs import GangPool
from tests.sweep.judge import judged
from tests.sweep.material import plan_of, write_data
from tests.sweep.observation import Failure, Observation, Verdict
from tests.sweep.plain import Plain, plain_base
from tests.sweep.rank import Request
from tests.sweep.session import BODY, run_case

(CASE,) = products([{"stored": ("float32",), "validation": ("some",)}])
(DROPPING,) = products([{"dropout": ("0.1",)}])
(ROUTED,) = products([{"architecture": ("mixtral",)}])
(FLAT,) = products([{"version": ("1",), "use_orig": ("false",), "peft_wrap": ("false",)}])

# FSDP 2 gathers units inside a layer at other moments when selective recomputation computes the layer again.
(INSIDE,) = products(
    [
        {
            "stored": ("float32",),
            "model_dtype": ("bfloat16",),
            "wrap": ("SIZE_BASED_WRAP",),
            "recompute": ("Selective",),
            "tokens": ("some",),
        }
    ]
)
# torch's normalisation takes its weight and a trained bias in one type only, on one rank as on two.
(BIASED,) = products([{"architecture": ("gpt2",), "stored": ("bfloat16",), "ranks": ("1",), "bias": ("all",)}])
(ROUNDED,) = products([{"method": ("VeRA",), "stored": ("bfloat16",)}])
# Each weight is a unit of its own, so that a flat parameter decays as a whole rightly; tied ones lie in the root unit.
(APART,) = products(
    [
        {
            "method": ("Full",),
            "architecture": ("llama_tied",),
            "version": ("1",),
            "use_orig": ("false",),
            "peft_wrap": ("true",),
            "weight_decay": ("0.1",),
        }
    ]
)
(ADDING,) = products([{"added": ("ordinary",)}])


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("material")
    for case in (CASE, DROPPING, ROUTED, FLAT, INSIDE, BIASED, ROUNDED, APART, ADDING):
        write_base(root / "models" / case.base, case.of("architecture"), case.of("stored"))
    write_data(root)
    return root


@pytest.fixture(scope="module")
def pool() -> Iterator[GangPool]:
    pool = GangPool(BODY)
    yield pool
    pool.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [CASE, INSIDE, BIASED, ROUNDED, APART, ADDING],
    ids=["plain", "units inside recomputed layers", "biases", "scales", "weights apart", "added tokens"],
)
def test_a_run_that_is_right_works_and_is_accepted(material: Path, pool: GangPool, case: Case) -> None:
    result = run_case(case, material, pool)
    assert (result.observation.outcome, result.judgement.kind) == ("works", "accepted"), result.judgement.why


@pytest.mark.nightly
def test_what_the_rules_refuse_is_run_behind_the_trainers_own_refusals(material: Path, pool: GangPool) -> None:
    result = run_case(FLAT, material, pool)
    assert result.judgement.kind == "refused", result.judgement.why
    assert "requires_grad" in result.observation.text()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "plant", "problem"),
    [
        (CASE, "wrong_gradient", "gradient of"),
        (CASE, "zeroed_adapter", "adapter file"),
        (CASE, "lost_optimizer_state", "weights at the end of a resumed run"),
        (CASE, "late_rates", "weights after the optimizer's steps"),
        (CASE, "wrong_scaling", "logits of the merged model"),
        # Noise is drawn in all steps but one, and that one is compared.
        (DROPPING, "half_gradient", "step 2: gradient of"),
        (ROUTED, "other_experts", "gradient of"),
        (ADDING, "forgotten_row", "base with added tokens"),
        (ADDING, "swapped_rows", "merged rows: embedding"),
    ],
)
def test_a_planted_fault_is_silently_wrong(
    material: Path, pool: GangPool, tmp_path: Path, case: Case, plant: str, problem: str
) -> None:
    request = Request(dict(case.values), material, tmp_path / "run", plant=f"tests.unit.sweep.plants:{plant}")
    request.directory.mkdir()
    (observation, _), _ = pool.ask(request)  # type: ignore[misc]
    assert observation.failures == ()
    assert observation.outcome == "wrong"
    assert any(problem in text for text in observation.problems), observation.problems


@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if each.experts])
def test_routers_choose_so_clearly_that_rounding_changes_no_choice(tmp_path: Path, architecture: str) -> None:
    write_base(tmp_path, architecture, "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _module, _inputs, answer: found.append(answer[0]))
    with torch.no_grad():
        model(input_ids=torch.randint(0, 256, (16, 20), generator=torch.Generator().manual_seed(0)))
    leads = [ordered[:, 1] - ordered[:, 2] for ordered in (scores.sort(descending=True).values for scores in found)]
    # bfloat16 rounds logits of 3 to 1/128.
    assert min(float(lead.min()) for lead in leads) > 1


def test_the_oracle_imports_nothing_of_the_product() -> None:
    """What a run is compared with would have the fault of the run."""
    tree = ast.parse(Path(expected.__file__).read_text(encoding="utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module.partition(".")[0] for module in modules} == {
        *("collections", "dataclasses", "fractions", "math", "numpy", "torch")
    }


WORKS = Observation()
FAILS = Observation(failures=(Failure(stage="step", kind="IndexError", text="tuple index out of range"),))
WRONG = Observation(problems=("gradient of a is off",))


@pytest.mark.parametrize(
    ("verdict", "observation", "ranks", "kind"),
    [
        (Verdict(), WORKS, 2, "accepted"),
        (Verdict(), FAILS, 2, "false accept"),
        (Verdict(), WRONG, 2, "false accept"),
        (Verdict(), Observation(hung=True), 2, "false accept"),
        (Verdict(rules=("fsdp1-dora-orig-params",)), FAILS, 2, "refused"),
        (Verdict(rules=("fsdp1-dora-orig-params",)), WORKS, 2, "false refusal"),
        (Verdict(rules=("fsdp1-lora-mixed-requires-grad",)), FAILS, 2, "unexplained"),
        (Verdict(rules=("wrap-class-list-empty",)), WORKS, 2, "policy"),
        (Verdict(rules=("wrap-class-list-empty", "fsdp1-dora-orig-params")), WORKS, 2, "false refusal"),
        (Verdict(crashed="ImportError"), FAILS, 2, "unexplained"),
        (None, WORKS, 2, "unexplained"),
        # Settings that fail from two ranks on, tried on one.
        (Verdict(rules=("fsdp1-dora-orig-params",)), WORKS, 1, "policy"),
        (Verdict(rules=("offload-without-gpu",)), WORKS, 1, "policy"),
        (Verdict(rules=("lora-dropout-range",)), WORKS, 1, "false refusal"),
    ],
)
def test_a_verdict_is_judged_by_what_happened(verdict: Verdict | None, observation: Observation, ranks: int, kind: str) -> None:
    assert judged(verdict, observation, ranks).kind == kind


def test_a_gradient_within_the_plain_runs_own_rounding_is_right_and_one_beyond_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = {"a": torch.randn(64, 64, generator=generator), "b": torch.randn(8, generator=generator)}
    coarse = {name: gradient.to(torch.bfloat16).float() for name, gradient in exact.items()}
    assert oracle.compare_gradients(coarse, exact, [coarse], None) == []
    assert len(oracle.compare_gradients(coarse, exact, [], None)) == 2
    assert len(oracle.compare_gradients({"a": exact["a"]}, exact, [coarse], None)) == 1
    off = {**exact, "a": exact["a"] * 1.05}
    assert len(oracle.compare_gradients(off, exact, [coarse], None)) == 1


def test_the_error_of_a_single_number_is_drawn_more_than_once() -> None:
    """A sum that nearly cancels: one coarse run is right by luck, and another order of the same sum is off by as much as it."""
    generator = torch.Generator().manual_seed(0)
    exact = {"many": torch.randn(64, 64, generator=generator), "one": torch.tensor([1e-3])}
    lucky, found, other = ({**exact, "one": exact["one"] + error} for error in (2e-5, 1e-3, -4e-4))
    assert len(oracle.compare_gradients(found, exact, [lucky], None)) == 1
    assert oracle.compare_gradients(found, exact, [lucky], None, [other]) == []
    doubled = {**exact, "one": 2 * exact["one"]}
    assert len(oracle.compare_gradients(doubled, exact, [lucky], None, [lucky])) == 1
    # Of a tensor of many elements one draw says enough.
    off = {**exact, "many": exact["many"] * 1.05}
    assert len(oracle.compare_gradients(off, exact, [exact], None, [off])) == 1


def test_a_factor_of_the_loss_rounds_its_gradients_otherwise_and_changes_nothing_else(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "llama", "bfloat16")
    split = expected.sequences(expected.TRAIN, packs=True)
    model = Plain(ROUNDED, plan_of(ROUNDED), plain_base(ROUNDED, tmp_path / "base", quantized=False))
    for dtype, least, most in ((torch.float32, 0.0, 1e-5), (torch.bfloat16, 1e-4, 0.1)):
        (_, one), (_, other) = (model.gradients(split, 0, dtype, factor=factor) for factor in (1.0, 1.3))
        (name,) = [name for name in one if "0.self_attn.v_proj.vera_lambda_b" in name]
        assert least <= float((one[name] - other[name]).norm() / one[name].norm()) <= most


def test_a_step_below_the_last_bit_of_a_value_is_no_fault_of_an_optimizer_that_scales_gradients() -> None:
    before = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0])}
    gradients = {"a": torch.tensor([1e-6, 0.0]), "b": torch.tensor([1e-3])}
    assert oracle.check_moved(before, before, gradients) == ["2 trained parameters did not move, first a"]
    assert oracle.check_moved(before, before, gradients, 1e-2) == ["1 trained parameters did not move, first b"]
    assert oracle.check_moved(before, {"a": before["a"], "b": before["b"] - 1e-5}, gradients, 1e-2) == []


def test_rounding_excuses_the_positions_that_it_moves_and_no_other():
    wanted = torch.ones(4, 8)
    by_rounding = wanted.clone()
    by_rounding[0] += 0.3
    assert oracle.compare_logits(by_rounding, wanted, 0.03, "logits")
    assert oracle.compare_logits(by_rounding, wanted, 0.03, "logits", [by_rounding]) == []
    wrong = by_rounding.clone()
    wrong[2] += 0.1
    (problem,) = oracle.compare_logits(wrong, wanted, 0.03, "logits", [by_rounding])
    assert problem == "logits: off by 0.1 of the largest, bound 0.03"
    assert oracle.compare_logits(torch.full_like(wanted, math.nan), wanted, 0.03, "logits", [by_rounding])
