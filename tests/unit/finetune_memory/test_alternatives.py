"""Changes of a job that does not fit: the cheapest that makes it fit, or none."""

from __future__ import annotations

from finetune_memory.verdict import (
    memory_finding,
)
from tests.support.builders import a_job
from tests.unit.finetune_memory.jobs import GIB, judged, small_job


def test_the_cheapest_change_comes_first_and_the_batch_stays() -> None:
    job = small_job().spec("training.microBatchSize", 8)
    assert not judged(job, gib=70).fits
    alternative = judged(job, gib=70).alternative
    assert alternative is not None
    assert [change.field for change in alternative.changes] == ["spec.training.microBatchSize"]
    assert alternative.estimate.total <= 70 * GIB
    larger = 2 * alternative.changes[0].value
    assert judged(job.spec("training.microBatchSize", larger)).estimate.total > 70 * GIB


def test_changes_that_a_manifest_takes_make_it_fit() -> None:
    job = a_job().spec("data.maxSequenceLength", 8192).spec("training.microBatchSize", 4).processes_per_node(2)
    for gib in (24, 12, 8):
        alternative = judged(job, "Llama-3.1-8B", gib).alternative
        assert alternative is not None, gib
        fixed = job
        for change in alternative.changes:
            fixed = fixed.spec(change.field.removeprefix("spec."), change.value)
        assert judged(fixed, "Llama-3.1-8B", gib).fits, alternative.text


def test_what_no_change_can_save_is_named() -> None:
    """Of experts that are stored one by one every rank packs the whole base: 8 devices do not load what they could train."""
    finding = memory_finding(judged(small_job().spec("method.type", "QLoRA").processes_per_node(8), "Mixtral-8x7B", 40))
    assert finding is not None
    assert "packed weights (" in finding.fix
    assert not finding.changes


def test_nothing_helps_a_device_that_is_far_too_small() -> None:
    verdict = judged(a_job(), "Llama-3.1-70B", 2)
    assert not verdict.fits
    assert verdict.alternative is None
    finding = memory_finding(verdict)
    assert finding is not None
    assert "larger devices" in finding.fix
