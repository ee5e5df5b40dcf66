import pytest

from skyrl.errors import ConfigError
from skyrl.train.generators.messages import (
    encode_messages_subset,
    get_generation_prompt_ids,
    get_response_ids_and_loss_mask_from_messages,
)
from tests.fakes.tokenizers import make_byte_tokenizer

ASSISTANT = {"role": "assistant", "content": "b"}
USER = {"role": "user", "content": "1"}
HEADER = len("assistant\n") + 1  # one token per byte, one for <|im_start|>


def test_the_generation_prompt():
    tokenizer = make_byte_tokenizer()
    assert tokenizer.decode(get_generation_prompt_ids(tokenizer)) == "<|im_start|>assistant\n"
    with pytest.raises(AssertionError, match="enable_thinking"):
        get_generation_prompt_ids(tokenizer, {"enable_thinking": False})


def test_messages_are_encoded_as_a_continuation():
    tokenizer = make_byte_tokenizer()
    text = tokenizer.decode(encode_messages_subset([ASSISTANT, USER], tokenizer))
    assert text == "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\n1<|im_end|>\n"
    with pytest.raises(AssertionError):
        encode_messages_subset([], tokenizer)


def test_content_through_the_end_token_trains_and_the_separator_does_not():
    ids, mask, logprobs = get_response_ids_and_loss_mask_from_messages([ASSISTANT], make_byte_tokenizer())
    assert mask == [0] * HEADER + [1, 1, 0]
    assert len(ids) == len(mask) and logprobs is None


def test_without_text_after_the_end_token_the_mask_ends_with_1():
    tokenizer = make_byte_tokenizer("nothing_after_eos")
    _, mask, _ = get_response_ids_and_loss_mask_from_messages([ASSISTANT], tokenizer)
    assert mask == [0] * (HEADER + 1) + [1, 1]


def test_an_injected_thinking_block_counts_as_content():
    tokenizer = make_byte_tokenizer("strips_thinking")
    ids, mask, _ = get_response_ids_and_loss_mask_from_messages([ASSISTANT], tokenizer)
    assert tokenizer.decode(ids) == "<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n"
    assert mask == [0] * HEADER + [1] * (len("<think>\n\n</think>\n\nb") + 1) + [0]


def test_strict_templates_get_a_question_before_an_answer_and_an_answer_before_a_question():
    tokenizer = make_byte_tokenizer("forbids_system")
    ids, mask, _ = get_response_ids_and_loss_mask_from_messages([ASSISTANT, USER], tokenizer)
    assert tokenizer.decode(ids) == "b<|im_end|>[INST]1[/INST]"
    assert mask == [1, 1] + [0] * len("[INST]1[/INST]")
    with pytest.raises(ConfigError, match="can't encode messages of the roles"):
        encode_messages_subset([USER, USER], tokenizer)


def test_logprobs_lie_where_the_mask_is_1():
    messages = [ASSISTANT, USER, {"role": "assistant", "content": "cd"}]
    given = [[-0.1, -0.2], [-0.3, -0.4, -0.5]]
    _, mask, logprobs = get_response_ids_and_loss_mask_from_messages(messages, make_byte_tokenizer(), given)
    assert [value for value in logprobs if value] == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert [int(value != 0) for value in logprobs] == mask


@pytest.mark.parametrize(
    ("messages", "logprobs", "error"),
    [
        ([], None, AssertionError),
        ([{"role": "system", "content": "x"}], None, ValueError),
        ([ASSISTANT], [], ValueError),
        ([ASSISTANT], [[-0.1]], ValueError),
    ],
)
def test_what_cannot_be_encoded_is_refused(messages, logprobs, error):
    with pytest.raises(error):
        get_response_ids_and_loss_mask_from_messages(messages, make_byte_tokenizer(), logprobs)
