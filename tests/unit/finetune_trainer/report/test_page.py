"""The page of a run: everything is on it, nothing of a stranger's is markup, and eyes, mouse or colours are not needed."""

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
from finetune_trainer.report.document import MAX_ENTRIES, ModelAnswer, OutcomeOfMerge, Sample, Samples, TrainingAttempt
from finetune_trainer.report.page import MAX_ROWS, duration, report_page, shown
from finetune_trainer.report.summary import commands, held_out_loss, run_summary, verdict
from finetune_trainer.report.timeline import Timeline
from tests.support.cases import table
from tests.unit.finetune_trainer.release.example import FROM_HUB, example, model_report

VOID, ATTRIBUTES = set(table(__file__, "VOID")), set(table(__file__, "ATTRIBUTES"))
TAGS = {*table(__file__, "TAGS"), *VOID}


def sample(record: int, prompt: str, reference: str, base: str, tuned: str) -> Sample:
    """A sample whose base model's answer was cut off."""
    answers = {"base": ModelAnswer(text=base, is_complete=False), "tuned": ModelAnswer(text=tuned, is_complete=True)}
    return Sample(record=record, prompt=prompt, reference=reference, **answers)


def attempt(start: float, seconds: float, first: int, last: int, lost: int, ending: str, message: str = "") -> TrainingAttempt:
    """An attempt; the second one has a first step above 0."""
    steps = {"first_step": first, "last_step": last, "lost_steps": lost}
    return TrainingAttempt(number=int(first > 0), start=start, seconds=seconds, ending=ending, message=message, **steps)


def page_of(facts: RunFacts, seen: Timeline, samples: Samples) -> str:
    return report_page(facts, run_summary(facts, seen, samples))


ANSWERS = Samples(answers=(sample(3, "def f():\n", "Return one.", "two two", "Return one."),), max_tokens=24)


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
    attempts = (attempt(0.0, 3725.0, 0, 8, 3, "Preempted", "asked to stop"), attempt(4000.0, 5.0, 5, 10, 0, "finished"))
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
    return Page(page_of(*made, ANSWERS))


@pytest.mark.parametrize("words", table(__file__, "test_it_says"))
def test_it_says(page: Page, words: str) -> None:
    assert words in page.text


def test_curves_have_all_their_points_however_many(made: tuple[RunFacts, Timeline]) -> None:
    steps = tuple(Point(step, 1.0 / step, 2.0 if step % 100 == 1 else None) for step in range(1, 1001))
    facts = dataclasses.replace(made[0], history=TrainingHistory(steps, 1, 1))
    drawn = Page(page_of(facts, made[1], ANSWERS))
    lines = [each["points"].split() for each in drawn.all("polyline")]
    assert [len(line) for line in lines] == [200, 10]
    assert lines[0][-1].startswith("378.0,")
    assert [len(each["points"].split()) for each in drawn.all("polygon")] == [400]
    assert [each["class"] for each in drawn.all("circle")] == ["mark series-2"] * 10


def test_the_page_says_what_is_not_known(tmp_path: Path) -> None:
    facts = example(tmp_path, {"method.type": "Full"}).facts()
    facts = dataclasses.replace(facts, history=TrainingHistory((Point(1, None, None),), 0, 0))
    text = Page(page_of(facts, Timeline(), Samples(reason="nothing was held out"))).text
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


@pytest.mark.parametrize(("destination", "lines"), table(__file__, "test_the_commands_are_those_of_what_was_published"))
def test_the_commands_are_those_of_what_was_published(tmp_path: Path, destination: str, lines: list[str]) -> None:
    made = example(tmp_path, FROM_HUB | {"output.destination": destination})
    assert [line for _, line in commands(made.facts())] == lines
    unserved = made.facts(ServingReport(("it has no DoRA",), None))
    assert [line for _, line in commands(unserved)] == [line for line in lines if "lora" not in line]
    of_llama_cpp_alone = made.facts(ServingReport(("its rank is 600",), None, is_for_llama_cpp=True))
    assert [line for _, line in commands(of_llama_cpp_alone)] == [line for line in lines if "--lora-modules" not in line]
    of_vllm_alone = made.facts(ServingReport((), 16))
    assert [line for _, line in commands(of_vllm_alone)] == [line for line in lines if "convert_lora" not in line]
    assert "vLLM does not serve the adapter as it is: it has no DoRA." in Page(page_of(unserved, Timeline(), Samples())).text


def test_the_page_shows_a_failed_verification_and_a_loss_that_rises_again(made: tuple[RunFacts, Timeline]) -> None:
    failed: Any = SimpleNamespace(**vars(made[0].verification) | {"passed": False, "faults": ("<b>q_proj</b> differs",)})
    facts = dataclasses.replace(made[0], verification=failed)
    assert verdict(facts).outcome is OutcomeOfMerge.FAILED
    assert commands(facts) == []
    text = Page(page_of(facts, made[1], ANSWERS)).text
    assert "The merged model failed its verification, so it is not a result." in text
    assert "<b>q_proj</b> differs" in text
    assert [words for words in ("passed", "byte for byte", "vllm", "hf download") if words in text] == []
    rising = TrainingHistory((Point(0, None, 2.0), Point(5, 1.0, 1.0), Point(10, 0.5, 1.5)), 1, 1)
    losses = held_out_loss(rising)
    assert losses is not None
    assert (losses.best.loss, losses.best.step, losses.rises_again, losses.change) == (1.0, 5, True, -0.25)
    assert (
        "It was lower before: 1 after step 5."
        in Page(page_of(dataclasses.replace(made[0], history=rising), made[1], ANSWERS)).text
    )


def test_open_fields_are_shown_with_the_reason_of_their_values(made: tuple[RunFacts, Timeline]) -> None:
    choices = (
        Choice(field="spec.training.optimizer", value="AdamW", reason="usual for transformers"),
        Choice(field="spec.training.microBatchSize", value=None, reason="preflight chooses: the largest that fits"),
    )
    facts = dataclasses.replace(made[0], plan=made[0].plan.model_copy(update={"choices": choices}))
    text = Page(page_of(facts, made[1], ANSWERS)).text
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
    for path, value in table(__file__, "test_the_report_for_programs_has_what_the_page_says").items():
        part = found
        for name in path.split("/"):
            part = part[int(name)] if isinstance(part, list) else part[name]
        assert part == value, path
    assert set(found["curves"]) == {"loss", "eval_loss", "learning_rate", "gradient_norm", "tokens_per_second"}
    assert [len(found["curves"][name]) for name in ("loss", "tokens_per_second")] == [10, 10]
    assert "vllm serve ./merged" in [each["line"] for each in found["commands"]]
    assert "spec.method.lora.loraAlpha" in [each["field"] for each in found["choices"]]


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
    assert page_of(*made, ANSWERS) == page_of(*made, ANSWERS)


def test_it_can_be_used_without_seeing_it(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert {each.get("scope") for each in page.all("th")} == {"col", "row"}
    assert len(page.all("caption")) == len(page.all("table")) == len(page.all("tbody"))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    drawings = [each for each in page.all("svg") if each.get("aria-hidden") != "true"]
    assert len(drawings) == 2
    for drawing in drawings:
        assert drawing["role"] == "img"
        assert set(drawing["aria-labelledby"].split()) <= ids
    assert len(page.all("desc")) == 2
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
    attempts = tuple(attempt(1e300, 1e9, 0, 1, 0, say(), say()) for _ in range(rows))
    samples = tuple(sample(1, say(), say(), say(), say()) for _ in range(min(rows, 16)))
    return facts, dataclasses.replace(seen, attempts=attempts, preflight=preflight), Samples(answers=samples, max_tokens=8)


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
    html = page_of(*strange)
    html.encode()
    told = read(run_summary(*strange).json_text())
    assert told["samples"]["answers"][0]["prompt"] == told["job"]["name"] == shown(text)
    page = Page(html)
    check_markup(page)
    # A plain word in its place gives the same tags with the same attributes: nothing of the text is markup.
    assert structure(page) == structure(Page(page_of(*with_texts(made, lambda: "word"))))
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
        (attempt(number, number, 0, whole, whole, "finished"),) * 2,
        GoodputTotals(number, {Cause.OTHER: number}),
        report.model_copy(
            update={"memory": {"weights": whole, "activations": -1, "a": 1 << 30}, "record_lengths": {whole: whole}}
        ),
    )
    told = read(run_summary(facts, seen, ANSWERS).json_text())
    assert (told["training"]["tokens"], told["memory"]["estimate"], told["memory"]["peak"]) == (None, 1 << 30, None)
    assert (told["time"]["attempts"][0]["seconds"], told["time"]["other_seconds"]) == (None, {"other": None})
    page = Page(page_of(facts, seen, ANSWERS))
    check_markup(page)
    assert "Estimated before the start: 1.0 GiB for the fullest rank. The peak was not measured." in page.text


def test_terms_whose_sum_is_no_size_are_no_estimate(made: tuple[RunFacts, Timeline]) -> None:
    report = made[1].preflight
    assert report is not None
    terms = {"weights": 1 << 61, "activations": 1 << 61}
    seen = dataclasses.replace(made[1], preflight=report.model_copy(update={"memory": terms}))
    check_markup(page := Page(page_of(made[0], seen, ANSWERS)))
    assert "There was no estimate." in page.text


@pytest.mark.parametrize("text", ["<" * 5000, "\U0001f600" * 5000, "&amp;" * 3000])
def test_however_much_strangers_say_the_page_stays_below_a_megabyte(made: tuple[RunFacts, Timeline], text: str) -> None:
    strange = with_texts(made, lambda: text, rows=210)
    html = page_of(*strange)
    told = run_summary(*strange).json_text()
    assert len(html.encode()) < 1 << 20
    assert len(told.encode()) < 4 << 20
    assert read(told)["left_out"] == dict.fromkeys(("attempts", "sources", "warnings", "choices"), 210 - MAX_ENTRIES)
    for things in ("attempts", "sources", "warnings", "choices"):
        assert f"{210 - MAX_ROWS} more {things} are not shown" in html
