"""Properties of whole rollouts: what was sent, what is trained, where rewards lie."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.train.generators.output_checks import validate_generator_output
from tests.fakes.environments import EnvScript
from tests.fakes.generators import make_batch, make_generator, roll_out
from tests.fakes.inference_engine import FakeInferenceEngine, Reply
from tests.fakes.tokenizers import EOS, START, make_byte_tokenizer

STYLES = ("chatml", "strips_thinking", "forbids_system", "nothing_after_eos", "other_turn_end")
TOKENIZERS = {style: make_byte_tokenizer(style) for style in STYLES}

# Text with whatever breaks tokenisers: other scripts, emoji, control characters, special tokens, thinking tags.
WILD = st.lists(
    st.sampled_from([EOS, START, "<think>", "</think>", "\n", " ", "é", "日本", "🙂", "\u200d", "\x00", "a", "</a>"]),
    max_size=6,
).map("".join)


@st.composite
def plays(draw):
    turns = draw(st.integers(1, 4))
    replies = []
    for _ in range(turns):
        sampled = draw(st.lists(st.integers(3, 259), min_size=1, max_size=6))
        ends = draw(st.sampled_from(["eos", "bare", "only_eos"]))
        replies.append({"eos": [*sampled, 2], "bare": sampled, "only_eos": [2]}[ends])
    observations = [draw(st.lists(WILD, max_size=2)) for _ in range(turns)]
    rewards = [draw(st.integers(-8, 8)) / 8 for _ in range(turns)]
    return replies, observations, rewards


@pytest.mark.parametrize("conversation", [True, False])
@settings(max_examples=60, deadline=None)
@given(
    style=st.sampled_from(STYLES),
    play=plays(),
    limit=st.integers(20, 400),
    stop=st.sampled_from([None, ["</a>"]]),
)
def test_the_engine_saw_a_prefix_of_the_row_and_rewards_and_masks_add_up(conversation, style, play, limit, stop):
    replies, observations, rewards = play
    tokenizer = TOKENIZERS[style]
    engine = FakeInferenceEngine(lambda call: Reply(replies[call.turn]), tokenizer)
    script = EnvScript(
        observations=tuple([{"role": "user", "content": text} for text in texts[:1]] for texts in observations),
        rewards=tuple(rewards),
        num_steps=len(replies),
    )
    generator = make_generator(
        engine,
        tokenizer,
        use_conversation_multi_turn=conversation,
        max_input_length=limit,
        sampling={"stop": stop},
    )
    output = roll_out(generator, script, make_batch())
    validate_generator_output(1, output)
    row = output["prompt_token_ids"][0] + output["response_ids"][0]
    for call in engine.calls:
        assert row[: len(call.prompt_ids)] == call.prompt_ids
    taken = len(engine.calls)
    if taken == 0:
        assert output["rollout_metrics"]["generate/num_prompt_too_long"] == 1
        return
    assert sum(output["rewards"][0]) == sum(rewards[:taken])
    check_trained_tokens(output, engine, replies[:taken], conversation)


def check_trained_tokens(output, engine, replies, conversation):
    """Slow second account: the trained tokens are the sampled ones, in order, but for end tokens between turns."""
    (response,), (mask,), (logprobs,) = output["response_ids"], output["loss_masks"], output["rollout_logprobs"]
    trained = [token for token, bit in zip(response, mask, strict=True) if bit]
    expected = []
    for index, ids in enumerate(replies):
        last = index == len(replies) - 1
        expected += ids[:-1] if not conversation and not last and ids[-1] == 2 else ids
    assert trained == expected
    assert all((value != 0.0) == bool(bit) for value, bit in zip(logprobs, mask, strict=True))
    start = len(output["prompt_token_ids"][0])
    for call, ids in zip(engine.calls, replies, strict=True):
        begin = len(call.prompt_ids) - start
        kept = response[begin : begin + len(ids)]
        assert kept == ids or kept[: len(ids) - 1] == ids[:-1]
