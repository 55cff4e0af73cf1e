"""The table of settings is that of the locked PEFT, and what it takes is what PEFT's classes declare."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError

from finetune_job.api.method import MethodType
from finetune_job.method_settings import effective_settings, known_settings, peft_fields
from finetune_job.methods import Family, supported
from finetune_trainer.model.adapters import config_class
from finetune_trainer.model.settings_table import camel_case, page
from tests.support.method_settings import SETTINGS

TABLE = Path(__file__).parents[4] / "operator/finetune_job/peft_settings.py"
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
VALUES: tuple[Any, ...] = (None, True, 3, -1, 0.5, "3", "bat", "none", [], [1], ["q"], [1, "q"], {}, {"q": 1})


def test_the_table_is_that_of_the_locked_peft():
    assert TABLE.read_text() == page(), (
        "run: python -m finetune_trainer.model.settings_table > operator/finetune_job/peft_settings.py"
    )


@pytest.mark.parametrize("method", supported(Family.OTHER))
def test_a_value_is_taken_exactly_where_pefts_declaration_takes_it(method: MethodType):
    from typing import get_type_hints

    declared = get_type_hints(config_class(method))
    for setting in known_settings(method).values():
        for value in VALUES:
            try:
                TypeAdapter(declared[setting.peft_name], config=STRICT).validate_python(value)
                fits = True
            except ValidationError:
                fits = False
            wrong = peft_fields(method, {setting.name: value})[1]
            # A fraction is written in quotes, and becomes a number.
            taken = not wrong and not (
                value == "3" and isinstance(peft_fields(method, {setting.name: value})[0][setting.peft_name], float)
            )
            assert taken is fits, (setting, value)


@pytest.mark.parametrize("method", supported(Family.OTHER))
def test_defaults_are_pefts(method: MethodType):
    written = SETTINGS.get(method, {})
    values, wrong = peft_fields(method, written)
    assert not wrong
    config = config_class(method)(task_type="CAUSAL_LM", **values)
    for name, value in effective_settings(method, written).items():
        held = getattr(config, known_settings(method)[name].peft_name)
        assert (sorted(held) if isinstance(held, set) else held) == (sorted(value) if isinstance(held, set) else value), name


def test_a_name_that_was_most_likely_meant():
    (wrong,) = peft_fields(MethodType.VERA, {"dinitial": 5})[1]
    assert (wrong.near, wrong.is_unknown) == ("dInitial", True)
    assert "did you mean dInitial" in wrong.fix
    (wrong,) = peft_fields(MethodType.IA3, {"zzz": 5})[1]
    assert wrong.near is None
    assert camel_case("config_A_B") == "configAB"
