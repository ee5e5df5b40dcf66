"""Two repairs of vLLM's sampling on CPU workers: seeds with chunked prefill, and the speed of seeded rows.

1. A request with a seed kills the stock engine when its prompt is prefilled in chunks. The engine samples a token for
   the unfinished prompt, throws it away, and winds the request's generator back by an offset, which CPU generators do
   not have. Here the generators of such rows are restored from a copy of their state.
2. The stock sampler draws one exponential per vocabulary entry and row, twice for seeded rows. One uniform per row and
   the inverse of the distribution function give the same distribution (Devroye, "Non-Uniform Random Variate
   Generation", 1986, section II.2) at the speed of a prefix sum. Rows without a seed take it too, so nothing compiles.

The worker extension calls ``install`` in every worker before the model loads; other platforms are left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def install() -> None:
    """Put both repairs in place in this process; again does nothing, and neither does a worker without CPU platform."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    TopKTopPSampler.forward_cpu = _forward_cpu
    CPUModelRunner._sample = _sample
    CPUModelRunner._bookkeeping_sync = _bookkeeping_sync


def sample_by_inversion(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one index per row.

    Args:
        probabilities: [rows, vocabulary], float32, not negative; a row need not sum to exactly 1.
        uniforms: [rows] in [0, 1), one number per row.

    Returns:
        [rows] int64. An entry with probability 0 is never drawn.
    """
    cumulative = probabilities.cumsum(dim=-1)  # torch accumulates float32 in float64 on the CPU
    total = cumulative[:, -1:]
    # u * total may round up to the total, which lies behind the last entry.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms.unsqueeze(-1) * total, below_total)
    drawn = torch.searchsorted(cumulative, target, right=True)
    return drawn.clamp_(max=probabilities.shape[-1] - 1).squeeze(-1)


def draw_uniforms(rows: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
    """[rows] float32 in [0, 1): row i from ``generators[i]`` where there is one, else from torch's global generator."""
    uniforms = torch.rand(rows) if len(generators) < rows else torch.empty(rows)
    for row, generator in generators.items():
        uniforms[row : row + 1].uniform_(generator=generator)
    return uniforms


def _forward_cpu(
    self: TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stands for ``TopKTopPSampler.forward_cpu``: drawn ids, and the logits or log-probs that the mode asks for."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p)
    returned: torch.Tensor | None
    if self.logprobs_mode == "processed_logprobs":
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
        returned, probabilities = log_probs, log_probs.exp()
    else:
        returned = logits if self.logprobs_mode == "processed_logits" else None
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    return sample_by_inversion(probabilities, draw_uniforms(logits.shape[0], generators)), returned


def _sample(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    """Stands for ``CPUModelRunner._sample``: first keeps the state of generators whose draw will be thrown away."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    thrown_away = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
    generators = self.input_batch.generators
    self._skyrl_generator_states = {row: generators[row].get_state() for row in thrown_away if row in generators}
    return GPUModelRunner._sample(self, *args, **kwargs)


def _bookkeeping_sync(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    """Stands for ``CPUModelRunner._bookkeeping_sync``: restores those generators and hides them from the original."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    generators = self.input_batch.generators
    hidden = {}
    for row, state in self._skyrl_generator_states.items():
        hidden[row] = generators.pop(row)
        hidden[row].set_state(state)
    self._skyrl_generator_states = {}
    try:
        return GPUModelRunner._bookkeeping_sync(self, *args, **kwargs)
    finally:
        generators.update(hidden)
