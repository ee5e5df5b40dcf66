"""Small training batches for worker tests."""

from __future__ import annotations

import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

ROWS, SEQUENCE, RESPONSE = 8, 20, 9


def make_batch(seed: int = 0, rows: int = ROWS) -> TrainingInputBatch:
    """Left-padded rows with prompts and responses of different lengths, and everything a loss reads."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [RESPONSE - i % 4 for i in range(rows)]
    prompts = [4 + i % 7 for i in range(rows)]
    sequences = torch.zeros(rows, SEQUENCE, dtype=torch.long)
    attention = torch.zeros_like(sequences)
    response = torch.zeros(rows, RESPONSE, dtype=torch.long)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sequences[row, -prompt - length :] = torch.randint(4, 100, (prompt + length,), generator=draw)
        attention[row, -prompt - length :] = 1
        response[row, -length:] = 1
    loss_mask = response.float()
    loss_mask[1, -2] = 0.0  # a token of a tool
    noise = torch.randn(6, rows, RESPONSE, generator=draw)
    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention,
            "response_mask": response,
            "loss_mask": loss_mask,
            "action_log_probs": -4.8 + 0.1 * noise[0],
            "base_action_log_probs": -4.8 + 0.1 * noise[1],
            "rollout_logprobs": -4.8 + 0.1 * noise[2],
            "advantages": noise[3],
            "values": noise[4],
            "returns": noise[5],
            "loss_weights": torch.full((rows, RESPONSE), 1.0 / float(loss_mask.sum())),
        },
        metadata={"response_length": RESPONSE},
    )
    return batch
