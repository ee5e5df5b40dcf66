"""AdamW, its schedule, and one guarded step: clip, skip when the norm is not finite, step, clear."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from skyrl.config.roles import OptimizerConfig
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)


class OptimizerSteps:
    """AdamW over all parameters with a learning-rate schedule.

    The schedule counts optimizer steps. A learning rate set from outside switches the schedule off, which would
    otherwise overwrite it after the next step.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, num_training_steps: int | None
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.max_grad_norm = config.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.lr,
            betas=(config.adam_betas[0], config.adam_betas[1]),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.scheduler = make_scheduler(self.optimizer, config, num_training_steps)
        self.scheduler_enabled = True
        self.skipped_steps = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate by hand, from now on."""
        self.scheduler_enabled = False
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> float:
        """Clip and step; returns the global L2 norm of the gradient before clipping. Collective.

        When the norm is not finite the gradients are dropped, and neither the optimizer nor the schedule steps.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm = float(total.full_tensor().item() if isinstance(total, DTensor) else total.item())
        if not math.isfinite(norm):
            logger.warning("Gradient norm is %s: this optimizer step is skipped", norm)
            self.optimizer.zero_grad(set_to_none=True)
            self.skipped_steps += 1
            return norm
        if 0 < self.max_grad_norm < math.inf:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.max_grad_norm, total)
        self.optimizer.step()
        if self.scheduler_enabled:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, num_training_steps: int | None
) -> LRScheduler:
    """Build the schedule called ``config.scheduler`` in transformers.

    Raises:
        ConfigError: There is no such schedule, or it needs to know the number of steps.
    """
    if config.scheduler == "constant_with_warmup":  # the default, without the second that the import below takes
        warmup = config.num_warmup_steps
        return LambdaLR(optimizer, lambda step: min(1.0, step / max(1.0, warmup)) if step < warmup else 1.0)
    from transformers.optimization import get_scheduler

    try:
        return get_scheduler(
            config.scheduler,
            optimizer,
            num_warmup_steps=config.num_warmup_steps,
            num_training_steps=num_training_steps,
        )
    except ValueError as error:
        raise ConfigError(
            f"optimizer_config.scheduler={config.scheduler!r} with {num_training_steps} training steps: {error}; "
            "constant_with_warmup needs no number of steps"
        ) from error
