"""Two ranks, one rank and a plain loop agree; checkpoints, exports, failures. Real actors, gloo, a tiny model."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch
from skyrl.errors import CheckpointError, DeadlineError, ModelLoadError, WorkerError
from tests.backends.skyrl_train.workers import plain_loop
from tests.backends.skyrl_train.workers.batches import RESPONSE, make_batch
from tests.backends.skyrl_train.workers.conftest import make_cfg
from tests.backends.skyrl_train.workers.groups import fresh, parameters, started

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def two_ranks(ray_cluster: Path, tiny_model: Path) -> Iterator[WorkerDispatch]:
    """Policy on two ranks with micro-batches of 3 rows, reference and critic on one."""
    cfg = make_cfg(tiny_model, ray_cluster, ranks=2, micro=3)
    cfg.trainer.critic.model.path = str(tiny_model)
    with started(cfg) as dispatch:
        yield dispatch


@pytest.fixture(scope="module")
def one_rank(ray_cluster: Path, tiny_model: Path) -> Iterator[WorkerDispatch]:
    """Policy on one rank with micro-batches of 2 rows, recomputing activations."""
    cfg = make_cfg(tiny_model, ray_cluster)
    cfg.trainer.algorithm.use_kl_loss = True
    cfg.trainer.gradient_checkpointing = True
    with started(cfg) as dispatch:
        yield dispatch


def take_steps(dispatch: WorkerDispatch, seeds: list[int]) -> list[tuple[dict[str, float], float]]:
    seen = []
    for seed in seeds:
        output = dispatch.forward_backward("policy", make_batch(seed))
        seen.append((output.metrics, dispatch.optim_step("policy")))
    return seen


def test_log_probs_equal_those_of_transformers(two_ranks: WorkerDispatch, tiny_model: Path) -> None:
    fresh(two_ranks, tiny_model)
    batch = make_batch()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        expected, _ = plain_loop.response_log_probs(model, batch, temperature=0.8)
    wanted = batch["response_mask"].bool()
    for role in ("policy", "ref"):
        got = two_ranks.forward(role, batch).tensors["logprobs"]
        assert got.shape == (len(batch), RESPONSE)
        torch.testing.assert_close(got[wanted], expected[wanted], atol=2e-5, rtol=0)
        assert not got[~wanted].any()


def test_two_ranks_one_rank_and_a_plain_loop_take_the_same_steps(
    two_ranks: WorkerDispatch, one_rank: WorkerDispatch, tiny_model: Path
) -> None:
    expected, expected_steps = plain_loop.train(tiny_model, one_rank.cfg.trainer, [make_batch(1), make_batch(2)])
    for dispatch in (two_ranks, one_rank):
        steps = take_steps(fresh(dispatch, tiny_model), [1, 2])
        for (metrics, norm), (loss, expected_norm) in zip(steps, expected_steps, strict=True):
            assert metrics["final_loss"] == pytest.approx(loss, abs=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-4)
        got = parameters(dispatch)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                got[name], value, atol=2e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_metrics_do_not_depend_on_the_cut(
    two_ranks: WorkerDispatch, one_rank: WorkerDispatch, tiny_model: Path
) -> None:
    left, right = (
        fresh(d, tiny_model).forward_backward("policy", make_batch(3)).metrics for d in (two_ranks, one_rank)
    )
    assert left.keys() == right.keys()
    assert {"policy_kl", "policy_entropy", "approx_kl_old", "ratio_mean", "ess_rollout", "policy_lr"} <= left.keys()
    for name, value in left.items():
        assert value == pytest.approx(right[name], rel=1e-4, abs=1e-5), name
    assert left["response_length"] == pytest.approx(7.5)  # 9, 8, 7, 6, twice


def test_the_same_run_twice_is_bit_identical(one_rank: WorkerDispatch, tiny_model: Path) -> None:
    first = take_steps(fresh(one_rank, tiny_model), [1, 2]), parameters(one_rank)
    second = take_steps(fresh(one_rank, tiny_model), [1, 2]), parameters(one_rank)
    assert first[0] == second[0]
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())


def test_staged_mini_batches_add_up_to_the_whole(one_rank: WorkerDispatch, tiny_model: Path) -> None:
    batch = make_batch(4)
    fresh(one_rank, tiny_model).forward_backward("policy", batch)
    norm = one_rank.optim_step("policy")
    fresh(one_rank, tiny_model)
    for refs in one_rank.stage_data("policy", batch, [(0, 3), (3, 8)]):
        one_rank.forward_backward_from_staged("policy", refs)
    assert one_rank.optim_step("policy") == pytest.approx(norm, rel=1e-5)


def test_a_checkpoint_goes_on_bit_for_bit(two_ranks: WorkerDispatch, tiny_model: Path, tmp_path: Path) -> None:
    fresh(two_ranks, tiny_model)
    take_steps(two_ranks, [1])
    two_ranks.save_checkpoint("policy", str(tmp_path / "policy"), AutoTokenizer.from_pretrained(tiny_model))
    unbroken = take_steps(two_ranks, [2, 3]), parameters(two_ranks)
    fresh(two_ranks, tiny_model)
    take_steps(two_ranks, [5])  # other moments than a new optimizer has
    two_ranks.load_checkpoint("policy", str(tmp_path / "policy"))
    resumed = take_steps(two_ranks, [2, 3]), parameters(two_ranks)
    assert resumed[0] == unbroken[0]
    assert all(torch.equal(value, resumed[1][name]) for name, value in unbroken[1].items())
    assert (tmp_path / "policy" / "huggingface" / "tokenizer.json").exists()


def test_a_checkpoint_of_two_ranks_loads_on_one(
    two_ranks: WorkerDispatch, one_rank: WorkerDispatch, tiny_model: Path, tmp_path: Path
) -> None:
    take_steps(fresh(two_ranks, tiny_model), [1, 2])
    two_ranks.save_checkpoint("policy", str(tmp_path / "policy"))
    saved = parameters(two_ranks)
    fresh(one_rank, tiny_model).load_checkpoint("policy", str(tmp_path / "policy"))
    assert all(torch.equal(value, saved[name]) for name, value in parameters(one_rank).items())
    (metrics, norm), (expected, expected_norm) = take_steps(one_rank, [3])[0], take_steps(two_ranks, [3])[0]
    assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert metrics["policy_lr"] == expected["policy_lr"]
    for name, value in parameters(two_ranks).items():  # the moments came along, too
        torch.testing.assert_close(parameters(one_rank)[name], value, atol=1e-5, rtol=0)


def test_loading_without_optimizer_leaves_the_optimizer(
    one_rank: WorkerDispatch, tiny_model: Path, tmp_path: Path
) -> None:
    fresh(one_rank, tiny_model).save_checkpoint("policy", str(tmp_path / "start"))  # before any step
    take_steps(one_rank, [1])
    one_rank.set_lr("policy", 0.25)
    one_rank.load_checkpoint("policy", str(tmp_path / "start"), load_optimizer_states=False)
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert torch.equal(parameters(one_rank)["model.norm.weight"], start.model.norm.weight)
    assert one_rank._groups["policy"].run("pass_through", "get_lr") == [0.25]
    one_rank.load_checkpoint("policy", str(tmp_path / "start"))
    assert one_rank._groups["policy"].run("pass_through", "get_lr") == [1e-3]


def test_missing_and_foreign_checkpoints_are_refused(
    one_rank: WorkerDispatch, make_model: Any, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        one_rank.load_checkpoint("policy", str(tmp_path / "nowhere"))
    fresh(one_rank, make_model("qwen3", layers=2)).save_checkpoint("policy", str(tmp_path / "small"))
    with pytest.raises(CheckpointError, match="another model"):
        fresh(one_rank, tiny_model).load_checkpoint("policy", str(tmp_path / "small"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        one_rank.save_checkpoint("policy", str(tmp_path / "file" / "below"))


def test_an_export_loads_in_transformers_with_equal_logits(
    two_ranks: WorkerDispatch, tiny_model: Path, tmp_path: Path
) -> None:
    take_steps(fresh(two_ranks, tiny_model), [1])
    two_ranks.save_hf_model("policy", str(tmp_path / "export"), AutoTokenizer.from_pretrained(tiny_model))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert exported.config.architectures == ["Qwen3ForCausalLM"]
    batch = make_batch()
    with torch.no_grad():
        expected, _ = plain_loop.response_log_probs(exported, batch, temperature=0.8)
    wanted = batch["response_mask"].bool()
    got = two_ranks.forward("policy", batch).tensors["logprobs"]
    torch.testing.assert_close(got[wanted], expected[wanted], atol=2e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("a b")["input_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]


def test_the_reference_becomes_the_policy(two_ranks: WorkerDispatch, tiny_model: Path) -> None:
    two_ranks.init_model("ref", str(tiny_model))
    take_steps(fresh(two_ranks, tiny_model), [1])
    two_ranks.copy_policy_to_ref()
    batch = make_batch()
    policy, ref = (two_ranks.forward(role, batch).tensors["logprobs"] for role in ("policy", "ref"))
    torch.testing.assert_close(policy, ref, atol=2e-5, rtol=0)


def test_the_critic_learns_its_returns(two_ranks: WorkerDispatch, tiny_model: Path, tmp_path: Path) -> None:
    two_ranks.init_model("critic", str(tiny_model), num_training_steps=10)
    batch = make_batch()
    losses = []
    for _ in range(4):
        batch["values"] = two_ranks.forward("critic", batch).tensors["values"]
        metrics = two_ranks.forward_backward("critic", batch).metrics
        mask = batch["loss_mask"].bool()
        expected = 0.5 * (batch["values"] - batch["returns"])[mask].square().mean()
        assert metrics["critic_loss"] == pytest.approx(float(expected), rel=1e-4)
        assert metrics["values_clipfrac"] == 0.0
        losses.append(metrics["critic_loss"])
        two_ranks.optim_step("critic")
    assert losses[-1] < losses[0]
    before = two_ranks.forward("critic", batch).tensors["values"]
    two_ranks.save_hf_model("critic", str(tmp_path / "critic"))
    two_ranks.init_model("critic", str(tmp_path / "critic"))
    torch.testing.assert_close(two_ranks.forward("critic", batch).tensors["values"], before, atol=1e-5, rtol=0)


def test_a_loss_that_is_registered_late_reaches_the_ranks(one_rank: WorkerDispatch, tiny_model: Path) -> None:
    from skyrl.algorithms.policy_losses import PolicyLossRegistry, register_policy_loss

    @register_policy_loss("late_loss")
    def late_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):  # type: ignore[no-untyped-def]
        return (log_probs * 0.0).sum() + 42.0, {"named": config.policy_loss_type == "late_loss"}

    try:
        output = fresh(one_rank, tiny_model).forward_backward("policy", make_batch(), loss_fn="late_loss")
    finally:
        PolicyLossRegistry.unregister("late_loss")
    assert output.metrics["policy_loss"] == pytest.approx(4 * 42.0)  # four micro-batches
    assert output.metrics["loss_metrics/named"] == 1.0


def test_a_gradient_that_is_not_finite_is_skipped(one_rank: WorkerDispatch, tiny_model: Path) -> None:
    fresh(one_rank, tiny_model)
    before = parameters(one_rank)
    batch = make_batch()
    batch["advantages"][:] = float("nan")
    one_rank.forward_backward("policy", batch)
    assert not torch.isfinite(torch.tensor(one_rank.optim_step("policy")))
    assert all(torch.equal(value, before[name]) for name, value in parameters(one_rank).items())
    assert take_steps(one_rank, [1])[0][1] > 0


def test_a_wrong_path_names_itself(one_rank: WorkerDispatch) -> None:
    with pytest.raises(ModelLoadError, match="/no/such/model"):
        one_rank.init_model("policy", "/no/such/model")


def test_a_slow_rank_and_a_dead_rank_are_named(ray_cluster: Path, tiny_model: Path) -> None:
    cfg = make_cfg(tiny_model, ray_cluster, ranks=2)
    cfg.trainer.algorithm.use_kl_loss = False
    with started(cfg) as dispatch:
        group = dispatch._groups["policy"]
        pids = [ray_pid(info.handle) for info in group.actor_infos]
        slow = copy.copy(cfg.trainer)
        slow.worker_timeout_s = 0.01
        group.cfg = slow
        with pytest.raises(DeadlineError, match=r"forward of policy ranks 0, 1.*trainer.worker_timeout_s"):
            dispatch.forward("policy", make_batch())
        group.cfg = cfg.trainer
        os.kill(pids[1], 9)
        with pytest.raises(WorkerError, match="policy worker rank 1 died during forward"):
            dispatch.forward("policy", make_batch())
    assert all_gone(pids)


def ray_pid(handle: Any) -> int:
    import ray

    def pid(actor: Any) -> int:
        del actor
        return os.getpid()

    return int(ray.get(handle.__ray_call__.remote(pid)))


def all_gone(pids: list[int], within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False
