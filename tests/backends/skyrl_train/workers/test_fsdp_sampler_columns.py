"""Sampler support and score centering through real actors: two ranks, one rank and a plain loop agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch
from skyrl.config.root import SkyRLTrainConfig
from tests.backends.skyrl_train.workers.batches import make_batch
from tests.backends.skyrl_train.workers.conftest import make_cfg
from tests.backends.skyrl_train.workers.groups import fresh, parameters, started
from tests.backends.skyrl_train.workers.sampler_batches import make_sampler_batch, plain_scores, train

pytestmark = pytest.mark.ray

ENTROPY_COEF = 0.05
DOCUMENTED = {
    f"loss_metrics/score_centering_{name}"
    for name in (
        *("sampled_in_head_frac", "term_abs_mean", "sampler_head_mass"),
        *("trainer_head_mass", "tail_mass_ratio", "missing_ratio"),
    )
}


def make_replay_cfg(model: Path, logs: Path, *, ranks: int, micro: int) -> SkyRLTrainConfig:
    cfg = make_cfg(model, logs, ranks=ranks, micro=micro)
    algorithm = cfg.trainer.algorithm
    algorithm.policy_loss_type = "rollout_is"
    algorithm.use_kl_loss = ranks == 2  # the two-rank run has a reference, too
    algorithm.kl_loss_coef = 0.0
    algorithm.use_entropy_loss, algorithm.entropy_loss_coef = True, ENTROPY_COEF
    algorithm.enable_sample_support_replay = True
    algorithm.score_centering.enabled = True
    return cfg


@pytest.fixture(scope="module")
def two_ranks(ray_cluster: Path, tiny_model: Path) -> Iterator[WorkerDispatch]:
    """Policy on two ranks with micro-batches of 3 rows, and a reference."""
    with started(make_replay_cfg(tiny_model, ray_cluster, ranks=2, micro=3)) as dispatch:
        yield dispatch


@pytest.fixture(scope="module")
def one_rank(ray_cluster: Path, tiny_model: Path) -> Iterator[WorkerDispatch]:
    with started(make_replay_cfg(tiny_model, ray_cluster, ranks=1, micro=2)) as dispatch:
        yield dispatch


def test_policy_and_reference_score_the_same_sets(two_ranks: WorkerDispatch, tiny_model: Path) -> None:
    batch = make_sampler_batch()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        scores = plain_scores(model, batch, temperature=0.8)
    for role in ("policy", "ref"):
        got = two_ranks.forward(role, batch).tensors["logprobs"]
        for (row, column), token in scores.items():
            sampled = int(batch["sequences"][row, column - got.shape[1]])
            assert got[row, column].item() == pytest.approx(token.log_p[sampled].item(), abs=2e-5)
        assert not got[batch["loss_mask"] == 0].any()


def test_two_ranks_one_rank_and_a_plain_loop_take_the_same_steps(
    two_ranks: WorkerDispatch, one_rank: WorkerDispatch, tiny_model: Path
) -> None:
    batches = [make_sampler_batch(1), make_sampler_batch(2)]
    expected, steps = train(tiny_model, one_rank.cfg.trainer, batches, ENTROPY_COEF)
    for dispatch in (two_ranks, one_rank):
        fresh(dispatch, tiny_model)
        for batch, (loss, norm) in zip(batches, steps, strict=True):
            metrics = dispatch.forward_backward("policy", batch).metrics
            assert metrics["final_loss"] == pytest.approx(loss, abs=1e-5)
            assert dispatch.optim_step("policy") == pytest.approx(norm, rel=1e-4)
        got = parameters(dispatch)
        for name, value in expected.items():  # a step of Adam is 1e-3; where gradients are almost 0 it is rough
            torch.testing.assert_close(
                got[name], value, atol=2e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_metrics_do_not_depend_on_the_cut(
    two_ranks: WorkerDispatch, one_rank: WorkerDispatch, tiny_model: Path
) -> None:
    """Seven rows on two ranks: one of padding, without sets and heads."""
    batch = make_sampler_batch(3, rows=7)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        scores = plain_scores(model, batch, temperature=0.8)
    ((refs,),) = ([two_ranks.stage_data("policy", batch, [(0, 7)])[0]],)
    left = fresh(two_ranks, tiny_model).forward_backward_from_staged("policy", refs).metrics
    right = fresh(one_rank, tiny_model).forward_backward("policy", batch).metrics
    assert DOCUMENTED | {"support_miss"} <= right.keys()
    for name, value in right.items():
        assert left[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    entropy = sum(token.entropy.item() for token in scores.values()) / len(scores)
    assert right["policy_entropy"] == pytest.approx(entropy, abs=1e-5)
    assert right["support_miss"] == 0.0
    assert right["loss_metrics/score_centering_missing_ratio"] == 0.0


def test_a_rank_without_trained_tokens_takes_part(two_ranks: WorkerDispatch, tiny_model: Path) -> None:
    batch = make_sampler_batch(4)
    batch["loss_mask"][4:] = 0.0
    batch["sample_support"][4:] = -1
    fresh(two_ranks, tiny_model).forward_backward("policy", batch)
    assert two_ranks.optim_step("policy") > 0


def test_columns_that_are_missing_name_the_engines_key(one_rank: WorkerDispatch, tiny_model: Path) -> None:
    fresh(one_rank, tiny_model)
    with pytest.raises(Exception, match="enable_return_sample_support_set"):
        one_rank.forward("policy", make_batch())
    batch = make_sampler_batch()
    batch["sample_support"][0, -1] = -1
    with pytest.raises(Exception, match=r"1 trained tokens.*enable_return_sample_support_set"):
        one_rank.forward_backward("policy", batch)
    batch = make_sampler_batch()
    batch["sampler_topk_ids"] = None
    with pytest.raises(Exception, match="enable_return_sample_support_logprobs"):
        one_rank.forward_backward("policy", batch)
