"""Upstream's path to the model wrapper; homes: `workers.fsdp.model`, `.logprobs` and `.critic_model`."""

from skyrl.backends.skyrl_train.workers.fsdp.critic_model import get_llm_for_sequence_regression
from skyrl.backends.skyrl_train.workers.fsdp.logprobs import logprobs_from_logits
from skyrl.backends.skyrl_train.workers.fsdp.model import HFModelWrapper

__all__ = ["HFModelWrapper", "get_llm_for_sequence_regression", "logprobs_from_logits"]
