"""Whether data, model and batches fit each other, from counts alone."""

import pytest

from finetune_trainer.data.prepare import SplitFacts
from finetune_trainer.preflight.fit import fit_findings


def facts(num_sequences=100, largest_token_id=9, longest_document=10):
    return SplitFacts(
        num_records=200,
        num_dropped=20,
        num_occurrences=180,
        num_sequences=num_sequences,
        num_tokens=1000,
        num_supervised_tokens=500,
        longest_document=longest_document,
        largest_token_id=largest_token_id,
    )


@pytest.fixture
def findings(context):
    """`findings(facts, ...)`: by rule, for a plan of 8 sequences per step and 2 ranks."""

    def found(changes=None, vocabulary_size=10, tokenizer_size=10, max_positions=None, max_row=None, **counts):
        splits = {"train": facts(**counts), "validation": facts()}
        listed = fit_findings(context(changes).plan, splits, vocabulary_size, tokenizer_size, max_positions, max_row=max_row)
        return {finding.rule: finding for finding in listed}

    return found


def test_what_fits_has_no_finding(findings):
    assert findings(max_positions=10) == {}
    assert findings(num_sequences=8) == {}


def test_tokens_that_the_embedding_does_not_have_are_an_error_where_the_data_uses_them(findings):
    finding = findings(vocabulary_size=9, tokenizer_size=12)["tokenizer-beyond-vocabulary"]
    assert (finding.severity, finding.value) == ("error", "12")
    assert "the data uses token 9" in finding.message


def test_tokens_beyond_the_embedding_that_no_record_uses_are_a_warning(findings):
    assert findings(vocabulary_size=10, tokenizer_size=12)["tokenizer-beyond-vocabulary"].severity == "warning"


def test_a_record_beyond_the_models_positions_is_an_error(findings):
    finding = findings(max_positions=9)["document-beyond-positions"]
    assert (finding.value, "spec.model.maxPositions to 10" in finding.fix) == ("10", True)


def test_rows_that_packing_fills_beyond_what_the_code_computes_are_an_error(findings):
    longer = {"data.maxSequenceLength": 32}
    assert findings(longer, max_row=16)["sequence-beyond-positions"].value == "32"
    assert findings(longer, max_row=32) == {}
    assert findings({**longer, "data.packing": False}, max_row=16) == {}
    assert findings({**longer, "data.packing": False}, max_row=16, longest_document=17)["sequence-beyond-positions"].value == "17"


@pytest.mark.parametrize(
    ("num_sequences", "packing", "ways"),
    [
        (
            7,
            True,
            "set spec.training.globalBatchSize to 6, or set spec.data.packing: false, which gives 180 sequences, or give more",
        ),
        (7, False, "set spec.training.globalBatchSize to 6, or give more records"),
        (1, False, "give more records"),
    ],
)
def test_fewer_sequences_than_a_step_name_every_way_out(findings, num_sequences, packing, ways):
    finding = findings({"data.packing": packing}, num_sequences=num_sequences)["fewer-sequences-than-batch"]
    assert finding.fix.startswith(ways)


@pytest.mark.parametrize(
    ("evaluation", "field", "soon"),
    [
        # 2 epochs of 100 sequences, 8 to a step: 25 steps.
        ({"everySteps": 24, "loadBestModelAtEnd": True}, None, None),
        ({"everySteps": 25, "loadBestModelAtEnd": True}, "spec.evaluation.loadBestModelAtEnd", 24),
        ({"everySteps": 8, "earlyStopping": {"patience": 2}}, None, None),
        ({"everySteps": 9, "earlyStopping": {"patience": 2}}, "spec.evaluation.earlyStopping", 8),
        ({"everySteps": 100}, None, None),
    ],
)
def test_evaluations_that_come_too_late_for_a_run_of_epochs(findings, evaluation, field, soon):
    changes = {"training.epochs": 2, "training.maxSteps": None, "evaluation": evaluation}
    found = findings(changes)
    if field is None:
        assert found == {}
        return
    finding = found["evaluations-beyond-the-end"]
    assert (finding.severity, finding.field) == ("warning", field)
    assert f"everySteps to {soon} or less" in finding.fix
    assert findings({**changes, "evaluation": {**evaluation, "everySteps": soon}}) == {}
