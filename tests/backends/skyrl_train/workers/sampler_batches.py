"""Batches with the sampler's sets and heads, and a slow, plain loop that trains on them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.config.trainer import TrainerConfig
from tests.backends.skyrl_train.workers.batches import ROWS, make_batch

WIDTH, HEAD = 6, 4


def make_sampler_batch(seed: int = 0, rows: int = ROWS) -> TrainingInputBatch:
    """`make_batch` with sets of 2 to 6 ids in any order and heads of 4; tokens that do not train have neither."""
    batch = make_batch(seed, rows)
    draw = torch.Generator().manual_seed(seed)
    trained = batch["loss_mask"] != 0
    shape = trained.shape
    sampled = batch["sequences"][:, -shape[1] :]
    order = torch.rand(*shape, 128, generator=draw).argsort(dim=-1)
    others = torch.where(order == sampled.unsqueeze(-1), order[..., -1:], order)[..., : WIDTH - 1]
    support = torch.cat([sampled.unsqueeze(-1), others], dim=-1)
    support = torch.where(torch.arange(WIDTH) < torch.randint(2, WIDTH + 1, (*shape, 1), generator=draw), support, -1)
    shuffle = torch.rand(support.shape, generator=draw).argsort(dim=-1)
    support = torch.where(trained.unsqueeze(-1), support.gather(-1, shuffle), -1)
    log_q = torch.log_softmax(
        torch.where(support >= 0, torch.randn(support.shape, generator=draw), -torch.inf).masked_fill(
            ~trained.unsqueeze(-1), 0.0
        ),
        dim=-1,
    )
    batch["sample_support"] = support.int()
    batch["sampler_topk_ids"] = support[..., :HEAD].int()
    batch["sampler_topk_logprobs"] = torch.where(support >= 0, log_q, -torch.inf)[..., :HEAD]
    batch["rollout_logprobs"] = torch.where(support == sampled.unsqueeze(-1), log_q, 0.0).sum(dim=-1)
    return batch


class Scores(NamedTuple):
    """Of one token, in nats, with gradient."""

    log_p: dict[int, Tensor]
    """Of every id of its set."""
    entropy: Tensor


def plain_scores(
    model: Any, batch: TrainingInputBatch, temperature: float, *, replay: bool = True
) -> dict[tuple[int, int], Scores]:
    """Scores of each trained token (row, response column), from transformers' logits of one row without padding."""
    result = {}
    width = batch.metadata["response_length"]
    for row in range(len(batch)):
        tokens = batch["sequences"][row][batch["attention_mask"][row].bool()]
        logits = model(tokens.unsqueeze(0)).logits[0].float() / temperature
        for column in range(width):
            if not batch["loss_mask"][row, column]:
                continue
            place = len(tokens) - width + column
            kept = {int(i) for i in batch["sample_support"][row, column] if i >= 0} | {int(tokens[place])}
            ids = sorted(kept) if replay else list(range(logits.shape[1]))
            log_p = torch.log_softmax(logits[place - 1, ids], dim=-1)
            result[row, column] = Scores(dict(zip(ids, log_p, strict=True)), -(log_p.exp() * log_p).sum())
    return result


def centred_rollout_is(batch: TrainingInputBatch, scores: dict[tuple[int, int], Scores], entropy_coef: float) -> Tensor:
    """Token mean of the centred `rollout_is` loss (ε 0.2, proportional tail) minus the entropy bonus, row by row."""
    total = torch.zeros(())

    def factor(now: float, sampler: float) -> float:
        ratio = math.exp(now - sampler)
        return ratio if 0.8 < ratio < 1.2 else 0.0

    for (row, column), token in scores.items():
        sampled = int(batch["sequences"][row, batch["sequences"].shape[1] - batch.metadata["response_length"] + column])
        own_q = float(batch["rollout_logprobs"][row, column])
        ids, log_qs = (batch[key][row, column].tolist() for key in ("sampler_topk_ids", "sampler_topk_logprobs"))
        head = {i: q for i, q in zip(ids, log_qs, strict=True) if i >= 0}
        score = factor(token.log_p[sampled].item(), own_q) * token.log_p[sampled]
        if head:
            head.setdefault(sampled, own_q)
            q_tail = 1 - sum(math.exp(q) for q in head.values())
            q_tail = q_tail if q_tail > 1e-6 else 0.0  # float32 leaves rounding where the head is the whole set
            p_tail = max(1e-6, 1 - sum(math.exp(token.log_p[i].item()) for i in head))
            for i, q in head.items():
                now = token.log_p[i].item()
                kappa = math.exp(q) * factor(now, q) - q_tail / p_tail * math.exp(now)
                score = score - kappa * token.log_p[i]
        total = total - batch["advantages"][row, column] * score - entropy_coef * token.entropy
    return total / len(scores)


def train(
    path: Path, cfg: TrainerConfig, batches: list[TrainingInputBatch], entropy_coef: float
) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """AdamW on the centred loss over the sets; the final parameters, and (loss, gradient norm) of each step."""
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
    assert cfg.algorithm.temperature is not None
    for batch in batches:
        loss = centred_rollout_is(batch, plain_scores(model, batch, cfg.algorithm.temperature), entropy_coef)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, seen
