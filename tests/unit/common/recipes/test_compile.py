"""The key ``compile``: what it accepts, and with what it cannot go."""

from __future__ import annotations

import pytest

from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.smoke import smoke
from support.refusals import refused


@pytest.mark.parametrize(
    ("text", "value"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("true", "on"), ("'off'", "off")]
)
def test_on_and_off_are_words_although_yaml_has_them_as_booleans(text, value):
    found = override_recipe(load_recipe("digits"), [f"compile={text}"])
    assert found.compile == value
    assert smoke(override_recipe(load_recipe("goyal2017"), [f"compile={text}"])).compile == value


def test_another_word_is_refused():
    with refused("HT-file-value", key="compile"):
        override_recipe(load_recipe("digits"), ["compile=fast"])


def test_what_cannot_be_compiled_is_refused_where_it_is_asked_for():
    recipe = smoke(load_recipe("gpt2-124m"))
    assert override_recipe(recipe, ["mesh.tp=2"]).compile == "auto"
    override_recipe(recipe, ["mesh.tp=2", "compile=off"])
    with refused("HT-keys-not-together", "over tp"):
        override_recipe(recipe, ["mesh.tp=2", "compile=on"])


@pytest.mark.parametrize("changes", [["mesh.dp_shard=2"], ["mesh.pp=2"], ["mesh.pp=2", "sharding.recompute=true"]])
def test_other_meshes_can_be_compiled(changes):
    assert override_recipe(smoke(load_recipe("gpt2-124m")), [*changes, "compile=on"]).compile == "on"
