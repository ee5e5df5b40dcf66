import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.train.generators.transcript import Segment, Transcript, TurnOutput


def turn(ids, obs=(), *, reward=0.0, logprobs=None, added_eos=False, num_replaced=0):
    return TurnOutput(
        output="",
        output_ids=list(ids),
        output_logprobs=logprobs,
        new_obs=[],
        obs_ids=list(obs),
        reward=reward,
        added_eos=added_eos,
        num_replaced=num_replaced,
    )


def test_observation_tokens_do_not_train():
    assert turn([1, 2, 3, 4], [100, 101]).get_turn_loss_mask() == [1, 1, 1, 1, 0, 0]


def test_an_added_end_token_does_not_train():
    assert turn([1, 2, 3, 4], [7, 8, 9], added_eos=True).get_turn_loss_mask() == [1, 1, 1, 0, 0, 0, 0]


def test_logprobs_are_padded_over_the_observation():
    assert turn([1, 2], [7], logprobs=[-0.5, -1.0]).get_turn_rollout_logprobs() == [-0.5, -1.0, 0.0]
    assert turn([1, 2], [7]).get_turn_rollout_logprobs() is None
    assert turn([], [7], logprobs=[]).get_turn_rollout_logprobs() == [0.0]


def test_rewards_lie_on_the_last_sampled_token_of_their_turn():
    transcript = Transcript([1, 2])
    transcript.add_turn(turn([3, 4, 5, 6], [7, 8], reward=0.5))
    transcript.add_turn(turn([3, 4, 5, 6], reward=2.0))
    assert transcript.token_rewards == [0, 0, 0, 0.5, 0, 0, 0, 0, 0, 2.0]
    assert transcript.loss_mask == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1]


def test_an_added_end_token_leaves_the_reward_on_the_sampled_one():
    transcript = Transcript([1])
    transcript.add_turn(turn([3, 4, 9], reward=1.0, added_eos=True, logprobs=[-1.0, -2.0, 0.0]))
    assert transcript.token_rewards == [0, 1.0, 0]
    assert transcript.rollout_logprobs == [-1.0, -2.0, 0.0]


def test_a_turn_that_sampled_nothing_puts_its_reward_on_the_token_before():
    transcript = Transcript([1])
    transcript.add_turn(turn([3], [4], reward=1.0))
    transcript.add_turn(turn([], [5], reward=2.0))
    transcript.add_turn(turn([6], reward=4.0))
    assert transcript.token_rewards == [3.0, 0, 0, 4.0]


def test_a_replaced_response_trains_only_what_was_sampled():
    transcript = Transcript([1])
    transcript.add_turn(turn([3, 4, 5], [6], reward=1.0, num_replaced=2, logprobs=[-1.0, 0.0, 0.0]))
    assert transcript.loss_mask == [1, 0, 0, 0]
    assert transcript.token_rewards == [1.0, 0, 0, 0]


def test_one_turn_without_logprobs_means_none_for_the_row():
    transcript = Transcript([1])
    transcript.add_turn(turn([3], [4], logprobs=[-1.0]))
    transcript.add_turn(turn([5]))
    assert transcript.rollout_logprobs is None


def test_logprobs_of_another_length_are_refused():
    with pytest.raises(ValueError, match="2 tokens came with 1 log-probs"):
        Segment(kind="sampled", ids=(1, 2), logprobs=(-1.0,))


@st.composite
def turns(draw):
    ids = draw(st.lists(st.integers(0, 50), min_size=1, max_size=5))
    obs = draw(st.lists(st.integers(0, 50), max_size=5))
    added_eos = draw(st.booleans())
    replaced = draw(st.integers(0, len(ids)))
    logprobs = [-1.0] * (len(ids) - replaced) + [0.0] * replaced
    return turn(
        [*ids, 2] if added_eos else ids,
        obs,
        reward=draw(st.integers(-4, 4)) / 4,
        logprobs=[*logprobs, 0.0] if added_eos else logprobs,
        added_eos=added_eos,
        num_replaced=replaced,
    )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.lists(turns(), min_size=1, max_size=6))
def test_columns_always_agree_and_no_reward_is_lost(prompt, played):
    transcript = Transcript(prompt)
    for one in played:
        transcript.add_turn(one)
    length = len(transcript.response_ids)
    assert len(transcript.loss_mask) == len(transcript.token_rewards) == len(transcript.rollout_logprobs) == length
    assert sum(transcript.token_rewards) == sum(one.reward for one in played)
    assert transcript.prompt_ids + transcript.response_ids == transcript.tokens
    assert transcript.loss_mask == [bit for one in played for bit in one.get_turn_loss_mask()]
    assert all(
        mask == (value != 0) for mask, value in zip(transcript.loss_mask, transcript.rollout_logprobs, strict=True)
    )
