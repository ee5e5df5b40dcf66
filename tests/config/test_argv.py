from __future__ import annotations

import math

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.config.argv import (
    is_hydra_token,
    is_sweep_of,
    normalise_token,
    pop_override_entrypoint,
    split_argv,
    to_hydra_value,
    tokens_from_dict,
)

KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda key: key.lower() not in {"null", "true", "false", "nan", "inf"}
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


def plain(value: object) -> object:
    """What Hydra parsed, without its wrapper around quoted text."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return getattr(value, "text", value)


def read(token: str) -> object:
    return plain(OverridesParser.create().parse_override(token).value())


@pytest.mark.parametrize(
    ("token", "value"),
    [
        ("dataset_split=train[:200]", "train[:200]"),
        ('kwargs={"backend": "triton", "n": [1, 2]}', {"backend": "triton", "n": [1, 2]}),
        ('kwargs={"a": "b", "n": {"x": [1, 2]}}', {"a": "b", "n": {"x": [1, 2]}}),
        ("path=~/data", "~/data"),
        ("text=a=b", "a=b"),
        ("text=what (now)?", "what (now)?"),
        ("text=it's & more; #1!", "it's & more; #1!"),
        ('kwargs={"lr": 1e-5}', {"lr": 1e-5}),
    ],
)
def test_yaml_values_that_hydra_refuses_are_rewritten(token: str, value: object):
    rewritten = normalise_token(token)
    assert rewritten != token
    assert read(rewritten) == value


@pytest.mark.parametrize(
    "token",
    ["a.b=1", "+a=1e-6", "++a=null", "~a.b", "a=[x,y]", "a={x:1}", "a=1,2", "a='quoted'", "recipe=quickstart", "a="],
)
def test_tokens_that_hydra_reads_stay_byte_identical(token: str):
    assert normalise_token(token) == token


def test_flags_and_words_are_left_alone():
    assert normalise_token("--config-dir=a(b") == "--config-dir=a(b"
    assert normalise_token("just words") == "just words"


@given(st.from_regex(r"[+~]{0,2}[a-z_.]{1,12}=[^\x00]{0,20}", fullmatch=True))
@settings(max_examples=150, deadline=None)
def test_normalising_twice_is_normalising_once(token: str):
    once = normalise_token(token)
    assert normalise_token(once) == once
    if is_hydra_token(token):
        assert once == token


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_plain_values_survive_the_command_line_with_their_types(value: object):
    back = read(f"key={to_hydra_value(value)}")
    assert repr(back) == repr(value)


def test_text_that_looks_like_something_else_stays_text():
    tokens = tokens_from_dict({"a": "true", "b": "null", "c": "1e5", "d": "nan", "e": "😀 é", "f": "\\", "g": ""})
    assert [read(token) for token in tokens] == ["true", "null", "1e5", "nan", "😀 é", "\\", ""]


def test_special_numbers_keep_their_meaning():
    assert read(f"a={to_hydra_value(math.inf)}") == math.inf
    assert to_hydra_value(True) == "true"
    assert to_hydra_value(1) == "1"


def test_a_mapping_key_that_hydra_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="a: b"):
        to_hydra_value({"a: b": 1})


def test_flags_may_stand_anywhere():
    arguments = split_argv(["a=1", "-m", "b=2", "--cfg", "job", "--info", "c=3", "--config-name=x"])
    assert arguments.overrides == ["a=1", "b=2", "c=3"]
    assert arguments.flags == ["-m", "--cfg", "job", "--info", "--config-name=x"]
    assert arguments.is_multirun


def test_info_takes_a_topic_when_one_follows():
    assert split_argv(["--info", "plugins", "a=1"]).flags == ["--info", "plugins"]


def test_the_entry_point_is_found_in_any_position_and_taken_out():
    argv = ["a=1", "trainer.override_entrypoint=my.main", "--cfg", "job"]
    assert pop_override_entrypoint(argv) == ("my.main", ["a=1", "--cfg", "job"])
    assert pop_override_entrypoint(["+trainer.override_entrypoint='my.main'"]) == ("my.main", [])
    assert pop_override_entrypoint(["trainer.override_entrypoint=null"]) == (None, [])
    assert pop_override_entrypoint(["a=1"]) == (None, ["a=1"])


def test_a_sweep_is_told_from_a_value():
    assert is_sweep_of("trainer.seed=1,2", "trainer.seed")
    assert is_sweep_of("trainer.seed=range(3)", "trainer.seed")
    assert not is_sweep_of("trainer.seed=1", "trainer.seed")
    assert not is_sweep_of("trainer.seed=1,2", "trainer.epochs")
    assert not is_sweep_of("x=(", "x")
