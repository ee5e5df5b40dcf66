"""`python -m skyrl.train.entrypoints.main_base key=value ...`: train a policy by RL.

The module imports ray, torch and vllm inside methods only: a wrong key or `--cfg job` answers at once.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import skyrl.config
from skyrl.config.root import SkyRLTrainConfig
from skyrl.env_vars import SKYRL_RAY_PG_TIMEOUT_IN_S
from skyrl.errors import ConfigError, ModelLoadError
from skyrl.train.validate import check_algorithm_names, validate_cfg

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
    from skyrl.backends.skyrl_train.placement import ResolvedPlacementGroup
    from skyrl.backends.skyrl_train.workers.build import ModelGroups, RoleClasses
    from skyrl.train.dataset.dataset import PromptDataset
    from skyrl.train.generators.base import GeneratorInterface
    from skyrl.train.trainer import RayPPOTrainer
    from skyrl.train.utils.tracking import Tracking
    from skyrl.train.utils.trajectory_logging import TrajectoryLogger

__all__ = ["BasePPOExp", "config_dir", "main", "validate_cfg"]

logger = logging.getLogger(__name__)

config_dir = str(Path(skyrl.config.__file__).parent)
"""Folder of the config package, `recipe/` inside."""


class BasePPOExp:
    """One experiment: builds every part from the config and runs the trainer.

    Subclass it and override a `get_*` method to bring your own dataset, generator, trainer, tracker or client.
    It runs inside the controller, a Ray task, so that what it registers travels to the workers.
    """

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        self.cfg = cfg
        self._cleanup = ExitStack()
        self.trainer: RayPPOTrainer | None = None
        self.tracker: Tracking | None = None
        self.tokenizer = self.get_tokenizer()
        self.train_dataset = self.get_train_dataset()
        self.eval_dataset = self.get_eval_dataset()
        self.colocate_pg = self.get_colocate_pg()

    @staticmethod
    def get_cfg_as_str(cfg: SkyRLTrainConfig) -> str:
        """Return the config as YAML."""
        from skyrl.config.base import get_config_as_yaml_str

        return get_config_as_yaml_str(cfg)

    def get_tokenizer(self, padding_side: str = "left") -> Any:
        """Load the policy's tokenizer.

        Raises:
            ModelLoadError: If `trainer.policy.model.path` holds none.
        """
        from transformers import AutoTokenizer

        path = self.cfg.trainer.policy.model.path
        fast = not self.cfg.trainer.disable_fast_tokenizer
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path, trust_remote_code=True, use_fast=fast, padding_side=padding_side
            )
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                f"trainer.policy.model.path={path!r} has no usable tokenizer; give a Hugging Face name or a directory "
                f"that save_pretrained wrote ({error})"
            ) from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def get_train_dataset(self) -> PromptDataset:
        """Load the training prompts.

        Raises:
            ConfigError: If they are fewer than one batch.
        """
        dataset = self._load_dataset(self.cfg.data.train_data)
        size = self.cfg.trainer.train_batch_size
        if len(dataset) < size:
            raise ConfigError(
                f"data.train_data={self.cfg.data.train_data} has {len(dataset)} usable prompts, fewer than "
                f"trainer.train_batch_size={size}; add data, raise trainer.max_prompt_length, or take a smaller batch"
            )
        return dataset

    def get_eval_dataset(self) -> PromptDataset | None:
        """Load the evaluation prompts; None when nothing evaluates.

        `trainer.eval_before_train` alone loads them too: a callback may force an evaluation.
        """
        trainer = self.cfg.trainer
        evaluates = trainer.eval_interval > 0 or trainer.eval_before_train
        if not evaluates or not self.cfg.data.val_data:
            return None
        return self._load_dataset(self.cfg.data.val_data)

    def _load_dataset(self, sources: list[str]) -> PromptDataset:
        from skyrl.train.dataset.dataset import PromptDataset

        return PromptDataset(
            sources,
            self.tokenizer,
            self.cfg.trainer.max_prompt_length,
            num_workers=8,
            chat_template_kwargs=self.cfg.generator.chat_template_kwargs,
        )

    def get_colocate_pg(self, timeout: int = SKYRL_RAY_PG_TIMEOUT_IN_S) -> ResolvedPlacementGroup | None:
        """Reserve the GPUs that trainer and engines share; None when they share none."""
        from skyrl.backends.skyrl_train.placement import create_colocate_pg

        return create_colocate_pg(self.cfg, timeout)

    def get_generator(
        self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: InferenceEngineInterface
    ) -> GeneratorInterface:
        """Build what makes the rollouts."""
        from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
        from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

        return SkyRLGymGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=resolve_policy_model_name(cfg),
            seed=cfg.trainer.seed,
        )

    def get_trainer(
        self,
        cfg: SkyRLTrainConfig,
        tracker: Tracking,
        tokenizer: Any,
        train_dataset: PromptDataset,
        eval_dataset: PromptDataset | None,
        inference_engine_client: InferenceEngineInterface,
        generator: GeneratorInterface,
        colocate_pg: ResolvedPlacementGroup | None,
    ) -> RayPPOTrainer:
        """Build the trainer."""
        from skyrl.train.trainer import RayPPOTrainer

        return RayPPOTrainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
        )

    def get_tracker(self) -> Tracking:
        """Build what records metrics."""
        from skyrl.train.utils.tracking import Tracking

        trainer = self.cfg.trainer
        return Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.run_name,
            backend=trainer.logger,
            config=self.cfg,
            tags=trainer.tags,
            run_dir=trainer.run_dir,
        )

    def get_trajectory_logger(self) -> TrajectoryLogger:
        """Build what picks and formats trajectories for the tracker's tables."""
        from skyrl.train.utils.trajectory_logging import TrajectoryLogger

        return TrajectoryLogger()

    def get_inference_client(self) -> InferenceEngineInterface:
        """Start the inference servers, or connect to external ones; call it from sync code."""
        from skyrl.backends.skyrl_train.inference_servers.setup import build_new_inference_client

        client, setup = build_new_inference_client(self.cfg, self.tokenizer, self.colocate_pg)
        self._cleanup.callback(setup.shutdown)
        if self.colocate_pg is not None:
            asyncio.run(_sleep_and_disconnect(client))
        return client

    def get_worker_classes(self) -> RoleClasses:
        """Choose the worker classes by `trainer.strategy`."""
        from skyrl.backends.skyrl_train.workers.build import RoleClasses

        if self.cfg.trainer.strategy != "fsdp":
            raise ConfigError(f"trainer.strategy={self.cfg.trainer.strategy!r} is not built yet; use fsdp")
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import CriticWorker, PolicyWorker, RefWorker

        return RoleClasses(policy=PolicyWorker, critic=CriticWorker, ref=RefWorker)

    def _check_environments(self) -> None:
        """Refuse data whose environments nobody registered; another generator may need none of them.

        Raises:
            ConfigError: `environment.env_class` is unknown.
            DatasetError: A row names an unknown environment.
        """
        if type(self).get_generator is not BasePPOExp.get_generator:
            return
        from skyrl.train.dataset.dataset import PromptDataset
        from skyrl.train.generators.env_check import check_environments

        for dataset in (self.train_dataset, self.eval_dataset):
            if isinstance(dataset, PromptDataset):
                check_environments(self.cfg.environment.env_class, dataset.env_classes())

    def _setup_trainer(self) -> RayPPOTrainer:
        from skyrl.train.utils.run_dir import write_config

        check_algorithm_names(self.cfg)
        self._check_environments()
        self.cfg.trainer.run_dir = self._choose_run_dir()
        write_config(self.cfg.trainer.run_dir, self.get_cfg_as_str(self.cfg))
        logger.info("Metrics, trajectories and plots: %s", self.cfg.trainer.run_dir)
        self.tracker = self.get_tracker()
        client, groups = self._start_servers_and_workers()
        generator = self.get_generator(self.cfg, self.tokenizer, client)
        self.trainer = self.get_trainer(
            self.cfg,
            self.tracker,
            self.tokenizer,
            self.train_dataset,
            self.eval_dataset,
            client,
            generator,
            self.colocate_pg,
        )
        self.trainer.trajectory_logger = self.get_trajectory_logger()
        self.trainer.attach_models(groups)
        return self.trainer

    def _choose_run_dir(self) -> str:
        """Go on in the folder of the run that is resumed, or take a fresh one."""
        from skyrl.train.checkpoints import CheckpointManager
        from skyrl.train.utils.run_dir import prepare_run_dir

        trainer = self.cfg.trainer
        manager = CheckpointManager.from_config(trainer)
        point = manager.find_resume(trainer.resume_mode, trainer.resume_path)
        recorded = None if point is None else manager.load_state(point).run_dir
        return prepare_run_dir(trainer.run_dir, resumed=point is not None, recorded=recorded)

    def _start_servers_and_workers(self) -> tuple[InferenceEngineInterface, ModelGroups]:
        """Start both sides at once; where they share GPUs, the engines first, so that they can fall asleep."""
        from skyrl.backends.skyrl_train.workers.build import start_models

        classes = self.get_worker_classes()
        with ThreadPoolExecutor(1, thread_name_prefix="inference-start") as pool:
            client = pool.submit(self.get_inference_client)
            if self.colocate_pg is not None:
                client.result()
            groups = start_models(self.cfg, classes, self.colocate_pg)
            self._cleanup.callback(groups.shutdown)
            return client.result(), groups

    def run(self) -> float | None:
        """Train to the end; returns the last `eval/all/avg_score`, which sweepers maximise."""
        with self._cleanup:
            try:
                trainer = self._setup_trainer()
                asyncio.run(self._train(trainer))
                return trainer.report.last_eval_score
            except Exception as error:
                self._report(error)
                raise
            finally:
                if self.tracker is not None:
                    self.tracker.finish()

    async def _train(self, trainer: RayPPOTrainer) -> None:
        """Train, and close the client's connections in the loop that opened them."""
        try:
            await trainer.train()
        finally:
            await trainer.inference_engine_client.teardown()

    def _report(self, error: Exception) -> None:
        """Leave what the failed step measured, and the error, in every tracker."""
        if self.tracker is None:
            return
        step = 0
        if self.trainer is not None:
            step = self.trainer.global_step
            try:
                self.trainer.flush_pending_metrics()
            except Exception:
                # The run's own error is what the user must see.
                logger.exception("The metrics of step %d are lost", step)
        self.tracker.log_exception(error, step)


async def _sleep_and_disconnect(client: InferenceEngineInterface) -> None:
    """Let the engines sleep; close the connections in the loop that opened them. The next call opens others."""
    try:
        await client.sleep()
    finally:
        await client.teardown()


def main() -> None:
    """Run the command line."""
    from skyrl.train.entrypoints.launch import run_hydra

    run_hydra(BasePPOExp)


if __name__ == "__main__":
    main()
