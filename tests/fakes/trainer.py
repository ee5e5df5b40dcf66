"""A whole trainer on fakes: no Ray, no engine, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl.config.root import SkyRLTrainConfig
from skyrl.train.dataset.dataset import PromptDataset
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from tests.fakes.inference_engine import FakeInferenceEngine, script_of
from tests.fakes.tokenizers import make_byte_tokenizer
from tests.fakes.worker_dispatch import FakeModelGroups, FakeWorkerDispatch

TOKENIZER = make_byte_tokenizer()


class AlternatingGenerator(GeneratorInterface):
    """Two tokens a rollout; repetitions with an odd number get reward 1, the others 0.

    `stop_reason` (by row of the batch) and `reward` choose otherwise.
    """

    def __init__(
        self,
        calls: list[tuple[str, Any]] | None = None,
        stop_reason: Callable[[int], str] = lambda row: "stop",
        reward: Callable[[TrajectoryID], float] = lambda name: float(name.repetition_id % 2),
    ) -> None:
        self.calls = [] if calls is None else calls
        self.stop_reason = stop_reason
        self.reward = reward
        self.inputs: list[Any] = []

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        ids, metadata = input_batch["trajectory_ids"], input_batch["batch_metadata"]
        assert ids is not None and metadata is not None
        self.calls.append(("generate", metadata.training_phase))
        self.inputs.append(input_batch)
        for _ in ids:
            self.on_rollout_done()
        reasons = [self.stop_reason(row) for row in range(len(ids))]
        return {
            "prompt_token_ids": [[70, 71] for _ in ids],
            "response_ids": [[80, 81] for _ in ids],
            "rewards": [self.reward(name) for name in ids],
            "loss_masks": [[0, 0] if reason == "error" else [1, 1] for reason in reasons],
            "stop_reasons": reasons,
            "rollout_logprobs": [[-0.5, -1.25] for _ in ids],
            "rollout_metrics": {"environment/asked": float(len(ids))},
        }

    @property
    def prompts_seen(self) -> list[list[str]]:
        """Uids of each training batch, one per prompt."""
        batches = [batch for batch in self.inputs if batch["batch_metadata"].training_phase == "train"]
        return [list(dict.fromkeys(name.instance_id for name in batch["trajectory_ids"])) for batch in batches]


class RecordingTracker:
    """Keeps what it is told."""

    metrics_path = None
    supports_tables = False

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, Any]]] = []
        self.errors: list[tuple[str, int]] = []
        self.finished = 0

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        assert commit
        self.records.append((step, dict(data)))

    def log_exception(self, error: BaseException, step: int) -> None:
        self.errors.append((str(error), step))

    def finish(self) -> None:
        self.finished += 1

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.records]


def write_prompts(path: Path, count: int, sources: tuple[str | None, ...] = ("digits",)) -> str:
    """Write a data file; the data sources take turns."""
    rows = [
        {"prompt": [{"role": "user", "content": f"n{i}"}], "data_source": sources[i % len(sources)]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_cfg(
    folder: Path, *, config_cls: type[SkyRLTrainConfig] = SkyRLTrainConfig, **changes: Any
) -> SkyRLTrainConfig:
    """Two prompts a step with two samples each, one mini-batch; nothing is saved or evaluated.

    `trainer__epochs=2` sets `trainer.epochs`.
    """
    overrides = {
        "trainer.policy.model.path": "unused",
        "data.train_data": [str(folder / "train.jsonl")],
        "data.val_data": [str(folder / "val.jsonl")],
        "data.dataloader.num_workers": 0,
        "trainer.ckpt_path": str(folder / "ckpt"),
        "trainer.export_path": str(folder / "export"),
        "trainer.log_path": str(folder / "logs"),
        "environment.env_class": "scripted",
        "trainer.algorithm.use_kl_loss": False,
        "trainer.placement.colocate_all": False,
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 2,
        "trainer.critic_mini_batch_size": 2,
        "trainer.epochs": 1,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.print_example_interval": -1,
        "trainer.enable_ray_gpu_monitor": False,
        "generator.n_samples_per_prompt": 2,
        "generator.eval_n_samples_per_prompt": 2,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return config_cls.from_cli_overrides(overrides)


def make_engine() -> FakeInferenceEngine:
    """An engine that answers `42` for ever."""
    return FakeInferenceEngine(script_of("42", tokenizer=TOKENIZER), TOKENIZER)


def make_trainer(
    cfg: SkyRLTrainConfig,
    folder: Path,
    *,
    prompts: int = 6,
    val_prompts: int = 0,
    dispatch: FakeWorkerDispatch | None = None,
    generator: GeneratorInterface | None = None,
    callbacks: tuple[Any, ...] = (),
    cls: type[RayPPOTrainer] = RayPPOTrainer,
) -> RayPPOTrainer:
    """Build a trainer; generator and dispatch write into one list of calls, `trainer.dispatch.calls`."""
    dispatch = dispatch or FakeWorkerDispatch()
    tracker: Any = RecordingTracker()
    trainer = cls(
        cfg,
        tracker,
        TOKENIZER,
        _dataset(folder / "train.jsonl", prompts),
        make_engine(),
        generator or AlternatingGenerator(dispatch.calls),
        eval_dataset=_dataset(folder / "val.jsonl", val_prompts),
        callbacks=callbacks,
    )
    groups: Any = FakeModelGroups(dispatch, critic=dispatch.dp_sizes.get("critic"), ref=dispatch.dp_sizes.get("ref"))
    trainer.attach_models(groups)
    return trainer


def _dataset(path: Path, count: int) -> PromptDataset | None:
    return PromptDataset(write_prompts(path, count), TOKENIZER, 100, num_workers=0) if count else None


def train(trainer: RayPPOTrainer) -> RayPPOTrainer:
    """Run to the end."""
    asyncio.run(trainer.train())
    return trainer
