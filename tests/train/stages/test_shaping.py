"""Rewards and masks before they become a batch."""

import copy

import pytest

from skyrl.errors import ConfigError
from skyrl.train.stages.shaping import mask_flat_groups, row_scores, shape_rewards, valid_mask
from tests.fakes.trainer import make_cfg


def make_output(rewards, *, masks=None, reasons=None):
    lengths = [1 if isinstance(reward, float) else len(reward) for reward in rewards]
    output = {
        "prompt_token_ids": [[1]] * len(rewards),
        "response_ids": [[2] * length for length in lengths],
        "rewards": rewards,
        "loss_masks": masks or [[1] * length for length in lengths],
    }
    return output | ({"stop_reasons": reasons} if reasons else {})


def filtered(tmp_path, output, uids, **changes):
    algorithm = make_cfg(tmp_path, trainer__algorithm__zero_variance_filter=True, **changes).trainer.algorithm
    return mask_flat_groups(output, uids, algorithm)


def test_scores_are_sums_and_failed_rows_are_no_samples():
    output = make_output([[0.5, 0.25], [1.0]], reasons=["length", "error"])
    assert row_scores(output).tolist() == [0.75, 1.0]
    assert valid_mask(output).tolist() == [True, False]
    assert valid_mask(make_output([1.0])).tolist() == [True]


def test_without_the_keys_nothing_changes(tmp_path):
    cfg, output = make_cfg(tmp_path), make_output([1.0, 1.0])
    assert shape_rewards(output, cfg) is output
    assert mask_flat_groups(output, ["a", "a"], cfg.trainer.algorithm) == (output, {})


def test_token_rewards_are_summed_before_groups_are_compared(tmp_path):
    """Rows of group a get 1 at different tokens, those of group b get 1 and 0."""
    output = make_output([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    before = copy.deepcopy(output)
    columns, metrics = filtered(tmp_path, output, ["a", "a", "b", "b"])
    assert columns["loss_masks"] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert metrics == {"reward/num_zero_variance_filtered": 1}
    assert columns["rewards"] == output["rewards"]
    assert output == before


def test_rows_that_do_not_train_are_not_compared(tmp_path):
    """Group a: a masked row differs. Group b: a failed row differs. Group c: one live row."""
    masks = [[1], [1], [0], [1], [1], [1], [1], [0]]
    reasons = ["stop"] * 5 + ["error"] + ["stop"] * 2
    output = make_output([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], masks=masks, reasons=reasons)
    columns, metrics = filtered(tmp_path, output, list("aaabbbcc"))
    assert columns["loss_masks"] == [[0]] * 6 + [[1], [0]]
    assert metrics == {"reward/num_zero_variance_filtered": 2}


@pytest.mark.parametrize(("tol", "count"), [(0.1, 1), (0.01, 0)])
def test_the_tolerance_is_the_keys(tmp_path, tol, count):
    _, metrics = filtered(
        tmp_path, make_output([1.0, 1.05]), ["a", "a"], trainer__algorithm__zero_variance_filter_tol=tol
    )
    assert metrics == {"reward/num_zero_variance_filtered": count}


def test_overlong_responses_lose_reward_by_the_keys(tmp_path):
    """Limit 4, buffer 2, factor 0.5: three tokens lose a quarter, four a half, five everything."""
    cfg = make_cfg(
        tmp_path,
        generator__sampling_params__max_generate_length=4,
        trainer__algorithm__overlong_buffer_len=2,
        trainer__algorithm__overlong_buffer_penalty_factor=0.5,
    )
    output = make_output([[0.0, 1.0], [0.0, 0.0, 1.0], [0.0] * 3 + [1.0], [1.0] * 5])
    before = copy.deepcopy(output)
    shaped = shape_rewards(output, cfg)
    assert shaped["rewards"] == [[0.0, 1.0], [0.0, 0.0, 0.75], [0.0] * 3 + [0.5], [0.0] * 5]
    assert output == before


def test_without_a_length_limit_there_is_nothing_to_come_close_to(tmp_path):
    cfg = make_cfg(tmp_path, trainer__algorithm__overlong_buffer_len=2)
    cfg.generator.sampling_params.max_generate_length = None
    with pytest.raises(ConfigError, match=r"overlong_buffer_len=2 needs a limit .*max_generate_length"):
        shape_rewards(make_output([1.0]), cfg)
