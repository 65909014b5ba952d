"""What the package itself says of a name that it does not have."""

from __future__ import annotations

import pytest

import hpctrain


@pytest.mark.parametrize(
    ("name", "words"),
    [("rank", "hpctrain.init().rank"), ("distribut", "'distribute'"), ("__wrapped__", "'__wrapped__'")],
)
def test_a_name_that_it_does_not_have(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match="hpctrain") as caught:
        getattr(hpctrain, name)
    assert str(caught.value).endswith(words) or words in str(caught.value).partition("valid")[0]
