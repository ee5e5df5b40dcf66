"""How estimators are called, built in or a user's."""

from enum import StrEnum

import pytest
import torch

from skyrl.algorithms import masked
from skyrl.algorithms.advantages import (
    AdvantageEstimatorRegistry,
    compute_advantages_and_returns,
    normalize_advantages,
    register_advantage_estimator,
)
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError

REWARDS = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.5, 0.0]])
MASK = torch.ones(3, 2)
UIDS = ["a", "a", "b"]


@pytest.fixture
def register():
    """Register estimators for one test."""
    names = []

    def add(name, function):
        register_advantage_estimator(name)(function)
        names.append(name)

    yield add
    for name in names:
        AdvantageEstimatorRegistry.unregister(name)


def run(name, **options):
    return compute_advantages_and_returns(REWARDS, MASK, UIDS, name, AlgorithmConfig(), **options)


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown advantage estimator 'grop'\. Did you mean 'grpo'\?.*rloo"):
        run("grop")


def test_upstreams_whole_signature_is_accepted(register):
    seen = {}

    def mine(token_level_rewards, response_mask, index, values, grpo_norm_by_std, gamma, lambd, config, **kwargs):
        seen.update(kwargs, gamma=gamma, lambd=lambd, norm=grpo_norm_by_std, values=values, config=config, index=index)
        return token_level_rewards * 2, token_level_rewards

    register("mine", mine)
    advantages, returns = run("mine", gamma=0.5, lambd=0.25, grpo_norm_by_std=False, loss_mask=MASK)
    assert torch.equal(advantages, REWARDS * 2)
    assert torch.equal(returns, REWARDS)
    assert (seen["gamma"], seen["lambd"], seen["norm"], seen["values"]) == (0.5, 0.25, False, None)
    assert isinstance(seen["config"], AlgorithmConfig)
    assert list(seen["index"]) == UIDS
    assert "loss_mask" not in seen  # only for those that name it


def test_a_subset_of_the_arguments_is_enough(register):
    register("few", lambda token_level_rewards, response_mask, **kwargs: (token_level_rewards,) * 2)
    register("fewer", lambda token_level_rewards: (token_level_rewards,) * 2)
    assert torch.equal(run("few")[0], REWARDS)
    assert torch.equal(run("fewer")[0], REWARDS)


def test_extras_go_to_those_that_name_them(register):
    def with_extras(token_level_rewards, *, loss_mask, valid_rows, baseline_scores, reward_components):
        assert loss_mask is MASK
        assert valid_rows.tolist() == [True, False, True]
        result = token_level_rewards - baseline_scores.unsqueeze(1) + reward_components["style"].unsqueeze(1)
        return result, result

    register("extras", with_extras)
    advantages, _ = run(
        "extras",
        loss_mask=MASK,
        valid_rows=torch.tensor([True, False, True]),
        baseline_scores=torch.tensor([1.0, 2.0, 3.0]),
        reward_components={"style": torch.tensor([0.5, 0.5, 0.5])},
    )
    assert advantages[:, 0].tolist() == [-0.5, -1.5, -2.0]


def test_rows_are_cut_from_every_argument(register):
    """An estimator that does not know of failed rows sees two rows everywhere."""

    def cut(token_level_rewards, response_mask, index, values, *, baseline_scores, reward_components):
        assert [len(x) for x in (token_level_rewards, response_mask, index, values, baseline_scores)] == [2] * 5
        assert len(reward_components["style"]) == 2
        assert index == ["a", "b"]
        return token_level_rewards + 1, values

    register("cut", cut)
    advantages, returns = run(
        "cut",
        values=torch.full((3, 2), 7.0),
        valid_rows=torch.tensor([True, False, True]),
        baseline_scores=torch.zeros(3),
        reward_components={"style": torch.zeros(3)},
    )
    assert advantages.tolist() == [[1.0, 2.0], [0.0, 0.0], [1.5, 1.0]]
    assert returns.tolist() == [[7.0, 7.0], [0.0, 0.0], [7.0, 7.0]]


def test_an_enum_names_an_estimator(register):
    class Names(StrEnum):
        MINE = "mine_by_enum"

    register(Names.MINE, lambda token_level_rewards, **_: (token_level_rewards,) * 2)
    assert torch.equal(run("mine_by_enum")[0], REWARDS)


def test_no_gradient_is_recorded():
    values = torch.zeros(3, 2, requires_grad=True)
    advantages, returns = run("gae", values=values)
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"values": torch.zeros(3, 5)}, r"values has shape \(3, 5\) but token_level_rewards has shape \(3, 2\)"),
        ({"loss_mask": torch.zeros(2, 2)}, r"loss_mask has shape \(2, 2\)"),
        ({"valid_rows": torch.ones(2)}, r"valid_rows has shape \(2,\) but token_level_rewards has shape \(3, 2\)"),
        ({"valid_rows": torch.ones(3, 1)}, r"valid_rows has shape \(3, 1\).*one entry a row: \(3,\)"),
        ({"baseline_scores": torch.ones(3, 2)}, r"baseline_scores has shape \(3, 2\)"),
        ({"reward_components": {"a": torch.ones(3), "b": torch.ones(4)}}, r"reward_components\['b'\] has shape \(4,\)"),
    ],
)
def test_a_wrong_shape_is_named(wrong, text):
    with pytest.raises(ValueError, match=text):
        run("grpo", **wrong)


def test_a_wrong_response_mask_is_named():
    with pytest.raises(
        ValueError, match=r"response_mask has shape \(3, 1\) but token_level_rewards has shape \(3, 2\)"
    ):
        compute_advantages_and_returns(REWARDS, MASK[:, :1], UIDS, "grpo", AlgorithmConfig())


def test_rewards_without_a_token_dimension_are_refused():
    with pytest.raises(ValueError, match=r"token_level_rewards has shape \(3,\); it must be \(batch, response\)"):
        compute_advantages_and_returns(REWARDS[:, 0], MASK[:, 0], UIDS, "grpo", AlgorithmConfig())


def test_an_empty_batch_has_empty_advantages():
    for name in ("grpo", "gdpo", "turn_level", "reinforce++"):
        advantages, returns = compute_advantages_and_returns(REWARDS[:0], MASK[:0], [], name, AlgorithmConfig())
        assert advantages.shape == returns.shape == (0, 2)


NAMES_WITHOUT_EXTRAS = ["grpo", "rloo", "maxrl", "opo", "gpg", "pass_at_k", "liteppo", "turn_level", "no_op"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [*NAMES_WITHOUT_EXTRAS, "gae", "reinforce++"])
def test_an_unmasked_reward_that_is_not_finite_is_named(name, bad):
    rewards = REWARDS.clone()
    rewards[1, 1] = rewards[2, 1] = bad
    with pytest.raises(ValueError, match=f"token_level_rewards holds {bad} in row 1"):
        compute_advantages_and_returns(rewards, MASK, UIDS, name, AlgorithmConfig(), values=torch.zeros(3, 2))


def test_an_unmasked_value_that_is_not_finite_is_named():
    values = torch.zeros(3, 2)
    values[2, 0] = float("nan")
    with pytest.raises(ValueError, match="values holds nan in row 2"):
        run("gae", values=values)


def test_a_users_nan_is_named(register):
    register("broken", lambda token_level_rewards: (token_level_rewards / 0.0, token_level_rewards))
    with pytest.raises(ValueError, match="advantages of 'broken' holds nan in row 0"):
        run("broken")


def test_a_users_nan_on_an_early_token_is_named(register):
    broken = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [0.0, 1.0]])
    register("early", lambda token_level_rewards, **_: (broken, broken))
    with pytest.raises(ValueError, match="advantages of 'early'"):
        compute_advantages_and_returns(REWARDS, MASK, UIDS, "early", AlgorithmConfig())


def test_a_users_nan_under_the_mask_is_accepted(register):
    def padded(token_level_rewards, response_mask):
        return torch.where(response_mask.bool(), token_level_rewards, float("nan")), token_level_rewards

    register("padded", padded)
    mask = torch.tensor([[0, 1]] * 3)
    advantages, _ = compute_advantages_and_returns(REWARDS, mask, UIDS, "padded", AlgorithmConfig())
    assert advantages[:, 1].tolist() == REWARDS[:, 1].tolist()


@pytest.mark.parametrize("name", AdvantageEstimatorRegistry.list_available())
def test_blocks_of_rows_change_nothing(name, monkeypatch):
    """17 rows of 24 tokens at once, and in blocks of 2 rows."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 17, 24, generator=generator, dtype=torch.float64).unbind()
    mask = (torch.arange(24) >= torch.arange(17).unsqueeze(1)).long()
    options = {
        "values": values,
        "loss_mask": mask * (torch.arange(24) % 7 > 2),
        "baseline_scores": values[:, 0],
        "reward_components": {"a": rewards[:, 0], "b": rewards[:, 1]},
        "valid_rows": torch.arange(17) % 5 != 3,
        "gamma": 0.9,
        "lambd": 0.8,
    }
    uids = [f"p{i % 4}" for i in range(17)]
    whole = compute_advantages_and_returns(rewards, mask, uids, name, AlgorithmConfig(), **options)
    monkeypatch.setattr(masked, "_BLOCK_ELEMENTS", 2 * 24)
    in_blocks = compute_advantages_and_returns(rewards, mask, uids, name, AlgorithmConfig(), **options)
    for one, other in zip(whole, in_blocks, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", AdvantageEstimatorRegistry.list_available())
def test_inputs_stay_as_they_are(name):
    inputs = [REWARDS.clone(), MASK.clone(), torch.ones(3, 2), MASK.bool(), torch.tensor([True, False, True])]
    before = [tensor.clone() for tensor in inputs]
    compute_advantages_and_returns(
        inputs[0], inputs[1], UIDS, name, AlgorithmConfig(), inputs[2], loss_mask=inputs[3], valid_rows=inputs[4],
        baseline_scores=torch.zeros(3), reward_components={"a": torch.zeros(3)},
    )  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))


def test_a_missing_uid_is_named():
    with pytest.raises(ValueError, match="index has 1 entries"):
        compute_advantages_and_returns(REWARDS, MASK, ["a"], "grpo", AlgorithmConfig())


def test_a_users_wrong_shape_is_named(register):
    register("flat", lambda token_level_rewards: (token_level_rewards.sum(1), token_level_rewards))
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\)"):
        run("flat")


def test_batch_normalisation_uses_trained_tokens_only():
    """Trained values 1 and 3: mean 2, second moment 1."""
    advantages = torch.tensor([[1.0, 3.0, 100.0], [float("nan"), -50.0, 7.0]])
    mask = torch.tensor([[1.0, 1, 0], [0, 0, 0]])
    assert normalize_advantages(advantages, mask).tolist() == [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_batch_normalisation_of_equal_advantages_is_zero():
    assert normalize_advantages(torch.full((2, 2), 3.0), torch.ones(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", AdvantageEstimatorRegistry.list_available())
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_whole_rewards_are_not_rounded_advantages(name, dtype):
    whole = torch.tensor([[0, 1], [0, 0], [1, 0], [0, 0]]).to(dtype)
    options = {"values": torch.full((4, 2), 0.25), "baseline_scores": torch.full((4,), 0.5)}
    options["reward_components"] = {"style": torch.tensor([0.5, 0.0, 0.25, 1.0])}
    algorithm = AlgorithmConfig(pass_at_k=1)
    for result, expected in zip(
        compute_advantages_and_returns(whole, torch.ones(4, 2), list("aabb"), name, algorithm, **options),
        compute_advantages_and_returns(whole.float(), torch.ones(4, 2), list("aabb"), name, algorithm, **options),
        strict=True,
    ):
        assert result.dtype == torch.float32
        assert torch.equal(result, expected)


@pytest.mark.parametrize("name", AdvantageEstimatorRegistry.list_available())
def test_memory_order_does_not_matter(name):
    rewards, mask = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    values = torch.tensor([[0.5, 0.25, 0.0], [0.0, 0.75, 0.5]])
    options = {"baseline_scores": torch.zeros(2), "reward_components": {"style": torch.tensor([0.5, 0.0])}}
    algorithm = AlgorithmConfig(pass_at_k=1)

    def estimate(turned):
        given = [tensor.T.contiguous().T if turned else tensor for tensor in (rewards, mask, values)]
        return compute_advantages_and_returns(
            given[0], given[1], ["a", "a"], name, algorithm, values=given[2], loss_mask=given[1].float(), **options
        )

    for turned, plain in zip(estimate(True), estimate(False), strict=True):
        assert torch.equal(turned, plain)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, r"returned \(NoneType\)"),
        (REWARDS, r"returned \(Tensor\)"),
        ((REWARDS, None), r"returned \(Tensor, NoneType\)"),
        ((REWARDS, REWARDS, REWARDS), r"returned \(Tensor, Tensor, Tensor\)"),
        ((REWARDS.numpy(), REWARDS.numpy()), r"returned \(ndarray, ndarray\)"),
        ({"advantages": REWARDS, "returns": REWARDS}, r"returned \(dict\)"),
    ],
)
@pytest.mark.parametrize("valid", [None, torch.tensor([True, True, False])])
def test_what_a_users_estimator_returns_wrongly_is_named(register, result, text, valid):
    register("wrong", lambda token_level_rewards: result)
    with pytest.raises(ValueError, match=rf"estimator 'wrong' {text}; it must return two tensors"):
        run("wrong", valid_rows=valid)


def test_whole_advantages_of_a_user_become_floats(register):
    register("whole", lambda token_level_rewards: (token_level_rewards.long(), token_level_rewards > 0))
    advantages, returns = run("whole")
    assert (advantages.dtype, returns.dtype) == (torch.float32, torch.float32)
    assert returns.tolist() == [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]


def test_a_decorator_without_parentheses_is_refused():
    def mine(token_level_rewards):
        return token_level_rewards, token_level_rewards

    with pytest.raises(ConfigError, match="needs a name in parentheses before mine"):
        register_advantage_estimator(mine)
