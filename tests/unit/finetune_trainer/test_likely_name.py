"""The name of a source that was most likely meant."""

import pytest

from finetune_trainer.likely_name import likely_address
from tests.support.cases import table


@pytest.mark.parametrize(("address", "names", "likely"), table(__file__, "test_the_name_that_was_most_likely_meant"))
def test_the_name_that_was_most_likely_meant(address: str, names: list[str], likely: str | None) -> None:
    assert likely_address(address, names) == likely
