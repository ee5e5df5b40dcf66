from __future__ import annotations

import pytest

from skyrl.config.rules.algorithm import check_algorithm
from skyrl.errors import ConfigError
from tests.config.rules.build import build


def algorithm(*tokens: str):
    return build(*(f"trainer.algorithm.{token}" for token in tokens)).trainer.algorithm


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["use_kl_in_reward=true"], r"use_kl_loss=true and .*use_kl_in_reward=true .*turn one off"),
        (["kl_estimator_type=k4"], r"kl_estimator_type=k4: must be one of k1, k2, k3, abs"),
        (["kl_ctrl.type=adaptve"], r"kl_ctrl\.type=adaptve.*did you mean adaptive"),
        (["kl_ctrl.horizon=0"], r"kl_ctrl\.horizon=0: must be above 0"),
        (["kl_ctrl.kl_target=0"], r"kl_ctrl\.kl_target=0\.0: must be above 0"),
        (["kl_loss_coef=-0.1"], r"kl_loss_coef=-0\.1: must be at least 0"),
        (["entropy_loss_coef=.nan"], r"entropy_loss_coef=nan: must be at least 0"),
        (["eps_clip_low=-1"], r"eps_clip_low=-1\.0: must be at least 0"),
        (["eps_clip_high=-1"], r"eps_clip_high=-1\.0: must be at least 0"),
        (["value_clip=-1"], r"value_clip=-1\.0: must be at least 0, or null"),
        (["zero_variance_filter_tol=-1"], r"zero_variance_filter_tol=-1\.0"),
        (["temperature=0.0"], r"algorithm\.temperature=0\.0: must be above 0"),
        (["gamma=1.1"], r"gamma=1\.1: must lie between 0 and 1"),
        (["lambd=-0.1"], r"lambd=-0\.1: must lie between 0 and 1"),
        (["clip_ratio_c=1"], r"clip_ratio_c=1\.0: must be above 1, such as"),
        (["clip_ratio_c=.nan"], r"clip_ratio_c=nan: must be above 1"),
        (["sapo.tau_pos=0"], r"sapo\.tau_pos=0\.0: must be above 0"),
        (["sapo.tau_neg=-1"], r"sapo\.tau_neg=-1\.0: must be above 0"),
        (["clip_cov.clip_ratio=2"], r"clip_cov\.clip_ratio=2\.0: must lie between 0 and 1"),
        (["clip_cov.clip_cov_lb=5"], r"clip_cov_lb=5\.0 must be below .*clip_cov_ub=5\.0"),
        (["clip_cov.clip_cov_lb=-1"], r"clip_cov_lb=-1\.0: must be at least 0"),
        (["kl_cov.kl_cov_frac=1.5"], r"kl_cov_frac=1\.5: must lie between 0 and 1"),
        (["kl_cov.ppo_kl_coef=-1"], r"ppo_kl_coef=-1\.0: must be at least 0"),
        (["cispo.cispo_eps_clip_high=-1"], r"cispo_eps_clip_high=-1\.0: must be at least 0"),
        (["cispo.cispo_anchor=new"], r"cispo_anchor=new: must be one of old, rollout"),
        (["dppo.dppo_type=tv"], r"dppo_type=tv: must be one of binary_tv, binary_kl"),
        (["dppo.delta_low=-1"], r"dppo\.delta_low=-1\.0: must be at least 0"),
        (["reward_weights.correct=high"], r"reward_weights\.correct=high: must be a finite number"),
        (["reward_weights.correct=true"], r"reward_weights\.correct=True: must be a finite number"),
        (["reward_weights.correct=.inf"], r"reward_weights\.correct=inf: must be a finite number"),
        (["reward_weights={correct: null}"], r"reward_weights\.correct=None: must be a finite number"),
        (["loss_reduction=mean"], r"loss_reduction=mean: must be one of token_mean"),
        (["loss_reduction=seq_mean_token_sum_norm"], r"seq_mean_token_sum_norm needs .*max_seq_len"),
        (["loss_reduction=seq_mean_token_sum_norm", "max_seq_len=0"], r"max_seq_len=0: must be above 0"),
        (["off_policy_correction.tis_ratio_type=tokens"], r"tis_ratio_type=tokens.*did you mean token"),
        (["off_policy_correction.sequence_mask_metric=mean"], r"sequence_mask_metric=mean: must be one of null"),
        (["off_policy_correction.token_tis_ratio_clip_high=0"], r"token_tis_ratio_clip_high=0\.0: must be above 0"),
        (["off_policy_correction.sequence_tis_ratio_clip_high=-1"], r"sequence_tis_ratio_clip_high=-1\.0"),
        (["off_policy_correction.geo_mask_low=2"], r"geo_mask_low=2\.0 must be below .*geo_mask_high=1\.01"),
        (["off_policy_correction.product_mask_low=-1"], r"product_mask_low=-1\.0: must be at least 0"),
        (
            [f"off_policy_correction.outlier_token_is_threshold_{name}=1.0" for name in ("low", "high")],
            r"outlier_token_is_threshold_low=1\.0 must be below .*outlier_token_is_threshold_high=1\.0",
        ),
        (
            ["off_policy_correction.token_mask_is_threshold_high=2"],
            r"token_mask_is_threshold_low=null: set both token_mask_is_threshold_low and token_mask_is_threshold_high",
        ),
    ],
)
def test_a_value_out_of_range_names_key_value_and_need(tokens: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        check_algorithm(algorithm(*tokens))


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        ["value_clip=null"],
        ["value_clip=0"],
        ["reward_weights={correct: 1, format: -0.5, length: 0}"],
        ["off_policy_correction.token_tis_ratio_clip_high=.inf"],
        ["off_policy_correction.outlier_token_is_threshold_high=100"],
        ["off_policy_correction.outlier_token_is_threshold_low=0"],
        ["clip_cov.clip_cov_lb=0"],
    ],
)
def test_values_at_the_edge_pass(tokens: list[str]):
    check_algorithm(algorithm(*tokens))


def test_the_reduction_by_micro_batches_does_not_take_rows_of_turns():
    check_algorithm(algorithm("loss_reduction=token_mean_legacy"))
    with pytest.raises(ConfigError, match=r"token_mean_legacy does not work with .*step_wise_trajectories=true"):
        check_algorithm(algorithm("loss_reduction=token_mean_legacy"), step_wise=True)
