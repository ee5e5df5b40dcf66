"""The order in which a run sees its prompts; it can be saved and taken up again."""

from __future__ import annotations

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import DatasetError
from skyrl.train.dataset.dataset import PromptDataset
from skyrl.train.dataset.shuffle import EpochShuffle


def build_dataloader(
    cfg: SkyRLTrainConfig, dataset: PromptDataset, is_train: bool = True, is_fully_async: bool = False
) -> StatefulDataLoader:
    """Return a loader with `state_dict` and `load_state_dict`.

    Training shuffles by `trainer.seed` (see `EpochShuffle`) and drops the last, smaller batch of an epoch;
    evaluation does neither.

    Args:
        cfg: The run's configuration.
        dataset: Its prompts.
        is_train: For training, else for evaluation.
        is_fully_async: One prompt at a time.

    Raises:
        DatasetError: The prompts don't fill one training batch.
    """
    batch_size = cfg.trainer.train_batch_size if is_train else cfg.trainer.eval_batch_size
    if is_train and is_fully_async:
        batch_size = 1
    if is_train and len(dataset) < batch_size:
        raise DatasetError(
            f"{', '.join(dataset.datasets)}: {len(dataset)} prompts don't fill one batch of "
            f"trainer.train_batch_size={batch_size}; lower it, add prompts, or raise trainer.max_prompt_length"
        )
    # Seeds the loading processes; the order has its own seed.
    generator = torch.Generator()
    generator.manual_seed(cfg.trainer.seed)
    num_workers = cfg.data.dataloader.num_workers
    num_workers = 8 if num_workers is None else num_workers
    return StatefulDataLoader(
        dataset,
        batch_size=batch_size,
        sampler=EpochShuffle(len(dataset), cfg.trainer.seed) if is_train else None,
        drop_last=is_train,
        collate_fn=dataset.collate_fn,
        generator=generator,
        num_workers=num_workers,
        persistent_workers=cfg.data.dataloader.persistent_workers and num_workers > 0,
        multiprocessing_context="spawn" if num_workers > 0 else None,
    )
