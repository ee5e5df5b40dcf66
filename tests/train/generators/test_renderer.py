import pytest

from skyrl.errors import ConfigError
from skyrl.train.generators.renderer import ChatRenderer
from tests.fakes.tokenizers import make_byte_tokenizer

USER = [{"role": "user", "content": "1"}]


def renderer(style, *, multi_turn=True, **kwargs):
    return ChatRenderer(make_byte_tokenizer(style), kwargs, multi_turn=multi_turn)


def text(made, ids):
    return made.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("chatml", "\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"),
        ("strips_thinking", "\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"),
        ("nothing_after_eos", "<|im_start|>user\n\n1<|im_end|><|im_start|>assistant\n\n"),
        ("forbids_system", "[INST]1[/INST]"),
        ("other_turn_end", "\n<|im_start|>user\n1<|turn_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_an_observation_is_what_the_template_puts_after_an_answer(style, expected):
    made = renderer(style)
    assert text(made, made.observation(USER)) == expected


def test_the_fixed_conversation_fits_the_template():
    assert [m["role"] for m in renderer("chatml").base_conversation] == ["system", "user", "assistant"]
    assert [m["role"] for m in renderer("forbids_system").base_conversation] == ["user", "assistant"]
    assert [m["role"] for m in renderer("strips_thinking").base_conversation] == ["system", "user"]


def test_a_template_that_cannot_be_continued_is_refused_at_the_start_when_needed():
    with pytest.raises(ConfigError, match="use_conversation_multi_turn=false"):
        renderer("one_message")
    single = renderer("one_message", multi_turn=False)
    assert text(single, single.prompt(USER)) == "11<|im_end|>>"
    with pytest.raises(ConfigError, match="can't be continued"):
        single.observation(USER)


def test_an_observation_that_changes_what_stands_before_is_refused():
    made = renderer("chatml")
    made.base_token_ids = [9, 9, 9]
    with pytest.raises(ConfigError, match="changes earlier messages when messages of the roles \\['user'\\]"):
        made.observation(USER)


def test_template_variables_reach_every_call():
    plain, quiet = renderer("strips_thinking"), renderer("strips_thinking", enable_thinking=False)
    assert text(plain, plain.generation_prompt_ids) == "<|im_start|>assistant\n"
    for ids in (quiet.generation_prompt_ids, quiet.prompt(USER), quiet.observation(USER)):
        assert text(quiet, ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_end_of_a_turn_is_the_templates_not_the_tokenizers():
    made = renderer("other_turn_end")
    assert made.turn_end_id == 3 and made.tokenizer.eos_token_id == 2
    assert renderer("chatml").turn_end_id == 2


def test_an_empty_fixed_conversation_cuts_nothing():
    made = renderer("chatml")
    made.base_conversation, made.base_token_ids = [], []
    assert text(made, made.observation(USER)) == "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"
