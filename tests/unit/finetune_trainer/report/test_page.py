"""The page of a run: everything is on it, nothing of a stranger's is markup, and eyes, mouse or colours are not needed."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_job.finding import Finding
from finetune_job.plan.run_plan import Choice
from finetune_trainer.observe.goodput import Cause, GoodputTotals
from finetune_trainer.release.adapter_check import ServingReport
from finetune_trainer.release.facts import DataSource, Point, RunFacts, SourceFile, TrainingHistory
from finetune_trainer.release.licence import Licence
from finetune_trainer.report.document import MAX_ENTRIES, OutcomeOfMerge
from finetune_trainer.report.page import MAX_ROWS, duration, report_page, shown
from finetune_trainer.report.samples import ModelAnswer, Sample, Samples
from finetune_trainer.report.summary import commands, held_out_loss, run_summary, verdict
from finetune_trainer.report.timeline import Timeline, TrainingAttempt
from tests.unit.finetune_trainer.release.example import BASE_COMMIT, FROM_HUB, example, model_report

VOID = {"meta", "line", "rect", "polyline", "polygon", "circle"}
TAGS = {
    *(
        "html",
        "head",
        "title",
        "style",
        "body",
        "a",
        "header",
        "nav",
        "main",
        "section",
        "article",
        "footer",
        "details",
        "summary",
    ),
    *("h1", "h2", "h3", "h4", "p", "ul", "li", "dl", "div", "dt", "dd", "pre", "code", "strong", "span"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "desc", "text", *VOID),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "href", "id", "role", "tabindex", "scope", "dir"),
    *("aria-label", "aria-labelledby", "aria-hidden", "viewbox", "preserveaspectratio", "focusable"),
    *("width", "height", "x", "x1", "x2", "y", "y1", "y2", "cx", "cy", "r", "points"),
}
ANSWERS = Samples(
    (Sample(3, "def f():\n", "Return one.", ModelAnswer("two two", False), ModelAnswer("Return one.", True)),), max_tokens=24
)


class Page(HTMLParser):
    """Tags in order, texts, and whether tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.errors: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        self.errors += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.errors.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(text for within, text in self.texts if within != "style").split())


def timeline(claims: Path) -> Timeline:
    preflight = model_report(example(claims).context).model_copy(
        update={
            "memory": {"weights": 3 << 30, "activations": 1 << 30},
            "record_lengths": {1: 2, 16: 7, 32: 14},
            "warnings": (Finding(rule="chat-words-left-out", severity="warning", message="a message", fix="a fix"),),
        }
    )
    attempts = (
        TrainingAttempt(0, 0.0, 3725.0, 0, 8, 3, "Preempted", "asked to stop"),
        TrainingAttempt(1, 4000.0, 5.0, 5, 10, 0, "finished"),
    )
    return Timeline(attempts, GoodputTotals(30.0, {Cause.STARTUP: 7.5, Cause.LOST_STEPS: 2.5, Cause.OTHER: 0.0}), preflight)


def history() -> TrainingHistory:
    points = [Point(0, None, 2.5), *(Point(step, 2.5 - step / 10, None, 1e-4, 0.5, 900.0) for step in range(1, 10))]
    return TrainingHistory((*points, Point(10, 1.5, 1.75, 5e-5, 0.25, 1100.0)), 1000, 600, 3 << 30, 1320.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFacts, Timeline]:
    claims = tmp_path_factory.mktemp("claims")
    facts = example(claims, FROM_HUB | {"data.validation": {"source": "pvc://data/held-out"}}).facts()
    return dataclasses.replace(facts, history=history()), timeline(claims)


@pytest.fixture(scope="module")
def page(made: tuple[RunFacts, Timeline]) -> Page:
    return Page(report_page(*made, ANSWERS))


@pytest.mark.parametrize(
    "words",
    [
        "The merged model passed its verification",
        "2.5 → 1.75 -30.0%",
        "75 % time in steps that count",
        "1 3 steps lost",
        "training loss: 2.4 at step 1, 1.5 at step 10; lowest 1.5 at step 10, highest 2.4 at step 1. held-out",
        "tokens per second: 900 at step 1, 1,100 at step 10",
        "fell: 2.5 nats per supervised token before training, 1.75 after step 10",
        "Held-out record 3 def f(): Base model two two cut off Tuned model Return one. The record itself Return one.",
        "0 1970-01-01 00:00:00 1 h 02 min 0 to 8 3 Preempted: asked to stop",
        "The median step computed 900 tokens per second. The planner calculates 1,320 for its device, +47%.",
        "steps that count 30.0 s 75.0 %",
        "steps done again after a restart 2.5 s 6.2 %",
        "Estimated before the start: 4.0 GiB for the fullest rank. Measured: 3.0 GiB at most, 75% of the estimate.",
        "weights 3.0 GiB",
        f"hf://datasets/maker/records/train at {'d' * 40} train 1 30 2 not counted 4,321 1,234",
        "12 sequences with 4,321 tokens in one pass",
        "up to 1 2 9 to 16 7 17 to 32 14",
        "chat-words-left-out : a message; fix: a fix",
        "11 tensors that the adapter does not touch are those of the base byte for byte; 28 that it changes",
        "same most likely token 99.0000% at least 97.00%",
        "vllm serve ./merged",
        "spec.method.lora.loraAlpha",
        f"base revision {BASE_COMMIT}",
        "registry.example/trainer@sha256:" + "a" * 64,
        "a.jsonl " + "e" * 64,
    ],
)
def test_it_says(page: Page, words: str) -> None:
    assert words in page.text


def test_curves_have_all_their_points_however_many(made: tuple[RunFacts, Timeline]) -> None:
    steps = tuple(Point(step, 1.0 / step, 2.0 if step % 100 == 1 else None) for step in range(1, 1001))
    facts = dataclasses.replace(made[0], history=TrainingHistory(steps, 1, 1))
    drawn = Page(report_page(facts, made[1], ANSWERS))
    lines = [each["points"].split() for each in drawn.all("polyline")]
    assert [len(line) for line in lines] == [200, 10]
    assert lines[0][-1].startswith("378.0,")
    assert [len(each["points"].split()) for each in drawn.all("polygon")] == [400]
    assert [each["class"] for each in drawn.all("circle")] == ["mark series-2"] * 10


def test_what_is_not_known_is_said_instead(tmp_path: Path) -> None:
    facts = example(tmp_path, {"method.type": "Full"}).facts()
    facts = dataclasses.replace(facts, history=TrainingHistory((Point(1, None, None),), 0, 0))
    text = Page(report_page(facts, Timeline(), Samples(reason="nothing was held out"))).text
    for words in (
        "The model was trained. Nothing was merged, so there was nothing to verify.",
        "held-out loss not measured",
        "too few steps for a curve",
        "Nothing was held out, so it is not known",
        "None: nothing was held out.",
        "No attempt has written down",
        "Neither estimated nor measured.",
        "Nothing was merged, so nothing was compared.",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("destination", "lines"),
    [
        (
            "pvc://out/result",
            [
                "vllm serve ./merged",
                "vllm serve maker/base --enable-lora --max-lora-rank 16 --lora-modules tuned=./adapter",
                "python convert_hf_to_gguf.py ./merged --outfile tuned.gguf",
                "python convert_lora_to_gguf.py --base ./base ./adapter --outfile tuned-lora.gguf",
            ],
        ),
        (
            "hf://team/tuned",
            [
                "hf download team/tuned --local-dir . && hf download team/tuned-adapter --local-dir adapter",
                "vllm serve team/tuned",
                "vllm serve maker/base --enable-lora --max-lora-rank 16 --lora-modules tuned=team/tuned-adapter",
                "python convert_hf_to_gguf.py . --outfile tuned.gguf",
                "python convert_lora_to_gguf.py --base ./base ./adapter --outfile tuned-lora.gguf",
            ],
        ),
    ],
)
def test_the_commands_are_those_of_what_was_published(tmp_path: Path, destination: str, lines: list[str]) -> None:
    made = example(tmp_path, FROM_HUB | {"output.destination": destination})
    assert [line for _, line in commands(made.facts())] == lines
    unserved = made.facts(ServingReport(("it has no DoRA",), None))
    assert [line for _, line in commands(unserved)] == [line for line in lines if "lora" not in line]
    of_llama_cpp_alone = made.facts(ServingReport(("its rank is 600",), None, is_for_llama_cpp=True))
    assert [line for _, line in commands(of_llama_cpp_alone)] == [line for line in lines if "--lora-modules" not in line]
    of_vllm_alone = made.facts(ServingReport((), 16))
    assert [line for _, line in commands(of_vllm_alone)] == [line for line in lines if "convert_lora" not in line]
    assert "vLLM does not serve the adapter as it is: it has no DoRA." in Page(report_page(unserved, Timeline(), Samples())).text


def test_a_failed_verification_and_a_loss_that_rises_again_are_told(made: tuple[RunFacts, Timeline]) -> None:
    failed: Any = SimpleNamespace(**vars(made[0].verification) | {"passed": False, "faults": ("<b>q_proj</b> differs",)})
    facts = dataclasses.replace(made[0], verification=failed)
    assert verdict(facts).outcome is OutcomeOfMerge.FAILED
    assert commands(facts) == []
    text = Page(report_page(facts, made[1], ANSWERS)).text
    assert "The merged model failed its verification, so it is not a result." in text
    assert "<b>q_proj</b> differs" in text
    assert [words for words in ("passed", "byte for byte", "vllm", "hf download") if words in text] == []
    rising = TrainingHistory((Point(0, None, 2.0), Point(5, 1.0, 1.0), Point(10, 0.5, 1.5)), 1, 1)
    losses = held_out_loss(rising)
    assert losses is not None
    assert (losses.best.loss, losses.best.step, losses.rises_again, losses.change) == (1.0, 5, True, -0.25)
    assert (
        "It was lower before: 1 after step 5."
        in Page(report_page(dataclasses.replace(made[0], history=rising), made[1], ANSWERS)).text
    )


def test_what_was_left_open_is_told_with_its_reason_and_what_preflight_chooses_once(made: tuple[RunFacts, Timeline]) -> None:
    choices = (
        Choice(field="spec.training.optimizer", value="AdamW", reason="usual for transformers"),
        Choice(field="spec.training.microBatchSize", value=None, reason="preflight chooses: the largest that fits"),
    )
    facts = dataclasses.replace(made[0], plan=made[0].plan.model_copy(update={"choices": choices}))
    text = Page(report_page(facts, made[1], ANSWERS)).text
    assert "spec.training.optimizer AdamW : usual for transformers" in text
    assert "spec.training.microBatchSize preflight chooses: the largest that fits" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.21, "4.2 s"), (200, "3 min 20 s"), (3900, "1 h 05 min"), (360_000, "100 h 00 min"), (float("nan"), "not known")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# The same for programs


def read(text: str) -> Any:
    """As a program does that takes the standard at its word: no NaN, no half of a character."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(text, parse_constant=refuse)
    json.dumps(found, ensure_ascii=False).encode()
    return found


def test_the_report_for_programs_has_what_the_page_says(made: tuple[RunFacts, Timeline]) -> None:
    found = read(run_summary(*made, ANSWERS).json_text())
    assert found["version"] == 1
    assert found["job"] == {"namespace": "team", "name": "tuned", "uid": "0123456789"}
    assert (found["method"], found["model"], found["revision"]) == ("LoRA", "maker/base", BASE_COMMIT)
    assert found["verdict"]["outcome"] == "Passed"
    losses = found["held_out_loss"]
    assert losses["first"] == {"step": 0, "loss": 2.5}
    assert losses["best"] == losses["last"] == {"step": 10, "loss": 1.75}
    assert (losses["change"], losses["has_fallen"], losses["rises_again"]) == (pytest.approx(-0.3), True, False)
    assert found["training"] == {
        "steps": 10,
        "tokens": 1000,
        "supervised_tokens": 600,
        "tokens_per_second": 900.0,
        "calculated_tokens_per_second": 1320.0,
    }
    assert set(found["curves"]) == {"loss", "eval_loss", "learning_rate", "gradient_norm", "tokens_per_second"}
    assert found["curves"]["eval_loss"] == [
        {"step": 0.0, "value": 2.5, "lowest": 2.5, "highest": 2.5},
        {"step": 10.0, "value": 1.75, "lowest": 1.75, "highest": 1.75},
    ]
    assert [len(found["curves"][name]) for name in ("loss", "tokens_per_second")] == [10, 10]
    assert found["samples"] == {
        "answers": [
            {
                "record": 3,
                "prompt": "def f():\n",
                "reference": "Return one.",
                "base": {"text": "two two", "is_complete": False},
                "tuned": {"text": "Return one.", "is_complete": True},
            }
        ],
        "reason": "",
        "max_tokens": 24,
    }
    first, second = found["time"]["attempts"]
    assert (first["seconds"], first["lost_steps"], first["ending"], first["message"]) == (3725.0, 3, "Preempted", "asked to stop")
    assert (second["number"], second["first_step"], second["last_step"]) == (1, 5, 10)
    assert (found["time"]["goodput"], found["time"]["productive_seconds"], found["time"]["lost_steps"]) == (0.75, 30.0, 3)
    assert found["time"]["other_seconds"] == {"startup": 7.5, "lost_steps": 2.5, "other": 0.0}
    assert (found["memory"]["estimate"], found["memory"]["peak"]) == (4 << 30, 3 << 30)
    assert found["memory"]["terms"] == {"weights": 3 << 30, "activations": 1 << 30}
    (source, held_out) = found["data"]["sources"]
    assert source == {
        "source": "hf://datasets/maker/records/train",
        "split": "train",
        "revision": "d" * 40,
        "weight": 1.0,
        "files": 2,
        "counts": {
            "num_records": 30,
            "num_dropped": 2,
            "num_repeated": None,
            "num_tokens": 4321,
            "num_supervised_tokens": 1234,
        },
    }
    assert held_out["source"] == "pvc://data/held-out"
    assert found["data"]["splits"] == {"train": {"num_sequences": 12, "num_dropped": 2, "num_tokens": 4321}}
    assert found["data"]["record_lengths"] == {"1": 2, "16": 7, "32": 14}
    assert found["data"]["warnings"] == [{"rule": "chat-words-left-out", "message": "a message", "fix": "a fix"}]
    verified = found["verification"]
    assert (verified["passed"], verified["faults"]) == (True, [])
    assert (verified["untouched_tensors"], verified["changed_tensors"]) == (11, 28)
    assert (verified["mean_kl"], verified["top1_agreement"], verified["min_top1_agreement"]) == (1e-4, 0.99, 0.97)
    assert "vllm serve ./merged" in [each["line"] for each in found["commands"]]
    assert found["settings"]["r"] == "16"
    assert "spec.method.lora.loraAlpha" in [each["field"] for each in found["choices"]]
    assert found["provenance"]["base revision"] == BASE_COMMIT
    assert found["left_out"] == {}


def test_what_is_not_known_is_null_for_programs(tmp_path: Path) -> None:
    facts = example(tmp_path, {"method.type": "Full"}).facts()
    facts = dataclasses.replace(facts, history=TrainingHistory((Point(1, None, None),), 0, 0))
    found = read(run_summary(facts, Timeline(), Samples(reason="nothing was held out")).json_text())
    assert [found[name] for name in ("held_out_loss", "memory", "verification")] == [None, None, None]
    assert (found["verdict"]["outcome"], found["samples"]["reason"]) == ("NotMerged", "nothing was held out")
    assert (found["curves"]["loss"], found["time"]["attempts"], found["time"]["goodput"]) == ([], [], None)


# Markup


def check_markup(page: Page) -> None:
    assert page.errors == []
    assert {tag for tag, _ in page.tags} <= TAGS
    assert {name for _, attributes in page.tags for name in attributes} <= ATTRIBUTES
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in page.all("a")]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert all(link.startswith("#") for link in links)


def test_nothing_runs_and_nothing_is_loaded(page: Page, made: tuple[RunFacts, Timeline]) -> None:
    check_markup(page)
    (style,) = (text for within, text in page.texts if within == "style")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = (each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style
    assert "@import" not in style
    assert report_page(*made, ANSWERS) == report_page(*made, ANSWERS)


def test_it_can_be_used_without_seeing_it(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert {each.get("scope") for each in page.all("th")} == {"col", "row"}
    assert len(page.all("caption")) == len(page.all("table")) == len(page.all("tbody"))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    drawings = [each for each in page.all("svg") if each.get("aria-hidden") != "true"]
    assert len(drawings) == 4
    for drawing in drawings:
        assert drawing["role"] == "img"
        assert set(drawing["aria-labelledby"].split()) <= ids
    assert len(page.all("desc")) == 4
    assert all("aria-label" in each for each in page.all("div") if each.get("role") == "region")
    assert page.all("html") == [{"lang": "en"}]
    assert page.tags[[tag for tag, _ in page.tags].index("body") + 1] == ("a", {"class": "skip", "href": "#verdict"})


def colours(style: str) -> list[dict[str, str]]:
    """Of light and dark."""
    return [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)]


def luminance(colour: str) -> float:
    values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_stands_out_from_what_is_behind_it_in_both_schemes(page: Page) -> None:
    """WCAG 2.2: 4.5 to 1 for text, 3 to 1 for curves and bars."""
    (style,) = (text for within, text in page.texts if within == "style")
    schemes = colours(style)
    assert len(schemes) == 2
    for scheme in schemes:
        for text, behind, least in (
            *((text, behind, 4.5) for text in ("text", "soft", "link") for behind in ("page", "card")),
            *(("text", "code", 4.5), ("good", "code", 4.5), ("bad", "code", 4.5), ("warn", "card", 4.5)),
            *(("one", "card", 3.0), ("two", "card", 3.0), ("one", "track", 3.0)),
        ):
            lighter, darker = sorted((luminance(scheme[text]), luminance(scheme[behind])), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= least, (text, behind)
    assert "prefers-reduced-motion: no-preference" in style


# Strangers


def with_texts(made: tuple[RunFacts, Timeline], say: Callable[[], str], rows: int = 1) -> tuple[RunFacts, Timeline, Samples]:
    """The run with another text wherever a stranger can put one."""
    facts, seen = made
    plan = facts.plan.model_copy(
        update={
            "job": facts.plan.job.model_copy(update={"name": say(), "namespace": say(), "uid": say()}),
            "model": facts.plan.model.model_copy(update={"name": say(), "revision": say()}),
            "placement": facts.plan.placement.model_copy(update={"trainer_image": say()}),
            "choices": tuple(Choice(field=say(), value=say(), reason=say()) for _ in range(rows)),
        }
    )
    sources = tuple(
        DataSource(say(), say(), say(), 1.0, (SourceFile(say(), say()),), {"num_records": say()}) for _ in range(rows)
    )
    facts = dataclasses.replace(
        facts,
        plan=plan,
        plan_sha256=say(),
        base_source=say(),
        model_digest=say(),
        data_hash=say(),
        licence=Licence("other", say(), say(), (say(),)),
        sources=sources,
        splits={f"{say()}{number}": {"num_tokens": say()} for number in range(rows)},
        serving=ServingReport((), 8, (say(),)),
    )
    report = seen.preflight
    assert report is not None
    warnings = tuple(Finding(rule=say(), severity="warning", message=say(), fix=say()) for _ in range(rows))
    preflight = report.model_copy(update={"memory": {f"{say()}{number}": 1 for number in range(rows)}, "warnings": warnings})
    attempts = tuple(TrainingAttempt(number, 1e300, 1e9, 0, 1, 0, say(), say()) for number in range(rows))
    samples = tuple(Sample(1, say(), say(), ModelAnswer(say(), True), ModelAnswer(say(), False)) for _ in range(min(rows, 16)))
    return facts, dataclasses.replace(seen, attempts=attempts, preflight=preflight), Samples(samples, max_tokens=8)


HOSTILE = st.sampled_from(
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</pre></style></title><svg onload=x>",
        "' onmouseover='x",
        "{{ 7 * 7 }}{% raw %}",
        "<!--",
        "]]>",
        "&lt;b&gt;&amp;",
        "\u202egnp.exe\u2066",
        "\x00\x1b[31m\x08\x7f\x9b",
        "\ud800\udfff",
        "\u200b\ufeff\U000e0041",
        "a\u2028b",
        "javascript:alert(1)",
        "-->",
    ]
) | st.text(st.characters(), min_size=1, max_size=40)


def structure(page: Page) -> list[tuple[str, dict[str, str]]]:
    return [(tag, attributes) for tag, attributes in page.tags if tag != "meta"]


@settings(max_examples=60, deadline=None)
@given(text=HOSTILE)
def test_no_text_of_a_stranger_is_markup_and_none_hides(made: tuple[RunFacts, Timeline], text: str) -> None:
    strange = with_texts(made, lambda: text)
    html = report_page(*strange)
    html.encode()
    told = read(run_summary(*strange).json_text())
    assert told["samples"]["answers"][0]["prompt"] == told["job"]["name"] == shown(text)
    page = Page(html)
    check_markup(page)
    # A plain word in its place gives the same tags with the same attributes: nothing of the text is markup.
    assert structure(page) == structure(Page(report_page(*with_texts(made, lambda: "word"))))
    assert not re.search("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]", html)
    visible = "".join(text for within, text in page.texts if within == "pre")
    assert shown(text).replace("\r", "\n").strip() in visible.replace("\r", "\n")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e300, 1e300])
def test_no_number_of_a_stranger_ends_the_run(made: tuple[RunFacts, Timeline], number: float) -> None:
    whole = 10**400
    points = (Point(0, None, number), Point(5, number, 1.0, number, number, number), Point(10, 1.0, number))
    facts = dataclasses.replace(made[0], history=TrainingHistory(points, whole, whole, whole))
    report = made[1].preflight
    assert report is not None
    seen = Timeline(
        (TrainingAttempt(0, number, number, 0, whole, whole, "finished"),) * 2,
        GoodputTotals(number, {Cause.OTHER: number}),
        report.model_copy(
            update={"memory": {"weights": whole, "activations": -1, "a": 1 << 30}, "record_lengths": {whole: whole}}
        ),
    )
    told = read(run_summary(facts, seen, ANSWERS).json_text())
    assert (told["training"]["tokens"], told["memory"]["estimate"], told["memory"]["peak"]) == (None, 1 << 30, None)
    assert (told["time"]["attempts"][0]["seconds"], told["time"]["other_seconds"]) == (None, {"other": None})
    page = Page(report_page(facts, seen, ANSWERS))
    check_markup(page)
    assert "Estimated before the start: 1.0 GiB for the fullest rank. The peak was not measured." in page.text


@pytest.mark.parametrize("text", ["<" * 5000, "\U0001f600" * 5000, "&amp;" * 3000])
def test_however_much_strangers_say_the_page_stays_below_a_megabyte(made: tuple[RunFacts, Timeline], text: str) -> None:
    strange = with_texts(made, lambda: text, rows=210)
    html = report_page(*strange)
    told = run_summary(*strange).json_text()
    assert len(html.encode()) < 1 << 20
    assert len(told.encode()) < 4 << 20
    assert read(told)["left_out"] == dict.fromkeys(("attempts", "sources", "warnings", "choices"), 210 - MAX_ENTRIES)
    for things in ("attempts", "sources", "warnings", "choices"):
        assert f"{210 - MAX_ROWS} more {things} are not shown" in html
