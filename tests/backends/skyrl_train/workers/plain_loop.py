"""A slow, plain training loop without micro-batches, ranks or sharding: what the workers must agree with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.config.trainer import TrainerConfig


def response_log_probs(model: Any, batch: TrainingInputBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [rows, response] from transformers' logits, one row at a time, without padding."""
    width = batch.metadata["response_length"]
    log_probs, entropies = [], []
    for ids, mask in zip(batch["sequences"], batch["attention_mask"], strict=True):
        tokens = ids[mask.bool()].unsqueeze(0)
        log_p = torch.log_softmax(model(tokens).logits[0].float() / temperature, dim=-1)
        chosen = log_p[:-1].gather(-1, tokens[0, 1:, None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
        log_probs.append(torch.nn.functional.pad(chosen, (width, 0))[-width:])
        entropies.append(torch.nn.functional.pad(entropy, (width, 0))[-width:])
    return torch.stack(log_probs), torch.stack(entropies)


def train(path: Path, cfg: TrainerConfig, batches: list[TrainingInputBatch]) -> tuple[dict[str, Tensor], list[Any]]:
    """PPO clip with KL in the loss (k3) and AdamW; the final parameters, and (loss, gradient norm) of each step."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = cfg.policy.optimizer_config
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=tuple(config.adam_betas),
        weight_decay=config.weight_decay,
        foreach=False,
    )
    seen = []
    for batch in batches:
        log_probs, _ = response_log_probs(model, batch, cfg.algorithm.temperature)
        ratio = (log_probs - batch["action_log_probs"]).exp()
        advantages = batch["advantages"]
        token_loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        back = batch["base_action_log_probs"] - log_probs
        token_loss = token_loss + cfg.algorithm.kl_loss_coef * (back.exp() - back - 1)
        mask = batch["loss_mask"].bool()
        loss = token_loss[mask].sum() / mask.sum()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        scale = min(1.0, config.max_grad_norm / (float(norm) + 1e-6))
        for parameter in model.parameters():
            parameter.grad *= scale
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, seen
