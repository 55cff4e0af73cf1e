"""Forms of saved state that cannot be read back."""

import pytest

from tests.pitfalls.manifests import findings


def test_fsdp_2_has_no_local_state_dict():
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin

    with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")
    assert "local-state-dict" in findings({"version": 2, "stateDictType": "LOCAL_STATE_DICT"})


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_the_other_forms_are_accepted(form):
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin

    FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form)
    assert findings({"version": 2, "stateDictType": form}) == {"no-effect-state-dict-type"}
