import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from skyrl.backends.skyrl_train.inference_servers import vllm_sampling
from skyrl.backends.skyrl_train.inference_servers.vllm_sampling import draw_uniforms, sample_by_inversion


def test_each_entry_owns_its_share_of_the_unit_interval():
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).repeat(6, 1)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999])
    assert sample_by_inversion(probabilities, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


def test_an_entry_without_probability_is_never_drawn_even_where_rounding_reaches_the_total():
    probabilities = torch.tensor([[0.0, 1e-3, 0.3, 0.0, 0.0]])
    largest = torch.tensor([1.0 - 2.0**-24])
    assert sample_by_inversion(probabilities, largest).tolist() == [2]
    assert sample_by_inversion(probabilities, torch.ones(1)).tolist() == [2]
    assert sample_by_inversion(probabilities, torch.zeros(1)).tolist() == [1]


def test_rows_need_not_sum_to_one():
    scaled = torch.tensor([[1.0, 3.0]])
    assert [sample_by_inversion(scaled, torch.tensor([u])).item() for u in (0.24, 0.26)] == [0, 1]


def test_draws_follow_the_distribution():
    torch.manual_seed(5)
    draws, entries = 200_000, 20
    probabilities = torch.rand(entries).square()
    probabilities /= probabilities.sum()
    drawn = sample_by_inversion(probabilities.expand(draws, entries).contiguous(), torch.rand(draws))
    observed = torch.bincount(drawn, minlength=entries).double()
    expected = probabilities.double() * draws
    chi_square = ((observed - expected).square() / expected).sum().item()
    # 99.9 % point for 19 degrees of freedom
    assert chi_square < 43.8


def test_a_large_vocabulary_keeps_its_tail():
    """float32 sums of 50,000 small numbers would drift; the share of the second half must stay one half."""
    draws, entries = 20_000, 50_000
    torch.manual_seed(1)
    row = torch.full((1, entries), 1.0 / entries)
    drawn = torch.cat(
        [sample_by_inversion(row.expand(100, -1).contiguous(), torch.rand(100)) for _ in range(draws // 100)]
    )
    share = (drawn >= entries // 2).double().mean().item()
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / draws)


def test_a_row_with_a_generator_does_not_depend_on_its_neighbours():
    alone = draw_uniforms(1, {0: torch.Generator().manual_seed(3)})
    torch.manual_seed(0)
    among = draw_uniforms(4, {2: torch.Generator().manual_seed(3)})
    assert among[2] == alone[0]
    torch.manual_seed(0)
    assert torch.equal(torch.rand(4)[[0, 1, 3]], among[[0, 1, 3]])


def runner_with(discarded: list[bool], seeds: dict[int, int]) -> SimpleNamespace:
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
    return SimpleNamespace(
        discard_request_mask=SimpleNamespace(np=np.array([*discarded, True])),
        input_batch=SimpleNamespace(num_reqs=len(discarded), generators=generators),
    )


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # those of importing vLLM
def test_a_thrown_away_draw_leaves_the_generator_where_it_was(monkeypatch):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = runner_with([True, False, True], {0: 7, 1: 7})
    seen = []
    monkeypatch.setattr(GPUModelRunner, "_sample", lambda self: draw_uniforms(3, self.input_batch.generators))
    monkeypatch.setattr(
        GPUModelRunner, "_bookkeeping_sync", lambda self: seen.append(list(self.input_batch.generators))
    )
    first = vllm_sampling._sample(runner)
    vllm_sampling._bookkeeping_sync(runner)
    assert seen == [[1]]
    second = vllm_sampling._sample(runner)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert set(runner.input_batch.generators) == {0, 1}


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # those of importing vLLM
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "processed_logits"])
def test_the_sampler_filters_draws_and_returns_what_the_mode_asks_for(mode):
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    vllm_sampling.install()
    vllm_sampling.install()
    sampler = TopKTopPSampler(mode)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(200, 1)
    generators = {row: torch.Generator().manual_seed(row) for row in range(200)}
    drawn, returned = sampler.forward(logits.clone(), generators, torch.full((200,), 2), None)
    assert set(drawn.tolist()) == {2, 3}
    kept = torch.tensor([-math.inf, -math.inf, 2.0, 3.0])
    expected = {"raw_logprobs": None, "processed_logits": kept, "processed_logprobs": kept.log_softmax(0)}[mode]
    assert (returned is None) if expected is None else torch.allclose(returned[0], expected)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # those of importing vLLM
def test_other_platforms_are_left_alone(monkeypatch):
    from vllm import platforms
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", "stock")
    monkeypatch.setattr(platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: False))
    vllm_sampling.install()
    assert TopKTopPSampler.forward_cpu == "stock"
