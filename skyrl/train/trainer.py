"""The synchronous trainer: generate, score, update, sync, in this order, every step."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyrl.algorithms.kl import get_kl_controller
from skyrl.algorithms.signatures import accepted_keywords
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.backends.skyrl_train.workers.build import ModelGroups, RoleClasses, start_models
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.train.checkpoints import CheckpointManager, TrainerState, warn_config_differences
from skyrl.train.dataset.dataloader import build_dataloader
from skyrl.train.dataset.preprocess import compute_prompt_mini_batch_boundaries
from skyrl.train.evaluate import evaluate
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.stages.advantage import add_advantages, apply_kl_penalty
from skyrl.train.stages.assemble import assemble, require_rollout_logprobs
from skyrl.train.stages.feed import PromptFeed, Prompts
from skyrl.train.stages.persist import PersistStage
from skyrl.train.stages.report import StepReport, log_rollouts, record_step, record_unfinished_step, reward_metrics
from skyrl.train.stages.rolled_out import RolledOut
from skyrl.train.stages.rollout import RolloutStage, drop_uneven_tail, even_count
from skyrl.train.stages.sampling import DynamicSampler, in_epoch
from skyrl.train.stages.score import ScoreStage
from skyrl.train.stages.shaping import mask_flat_groups, shape_rewards
from skyrl.train.stages.sync import SyncStage
from skyrl.train.stages.update import UpdateStage
from skyrl.train.utils.callbacks import CallbackHandler, CallbackInput, TrainingCallback, TrainingControl
from skyrl.utils import storage
from skyrl.utils.plain import plain
from skyrl.utils.seeds import restore_rng_state, rng_state
from skyrl.utils.timing import Timer

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
    from skyrl.backends.skyrl_train.placement import ResolvedPlacementGroup
    from skyrl.backends.skyrl_train.workers.actor_group import PPORayActorGroup
    from skyrl.train.dataset.dataset import PromptDataset
    from skyrl.train.utils.progress import Phase
    from skyrl.train.utils.tracking import Tracking

logger = logging.getLogger(__name__)

LAUNCH_VARIABLE = "SKYRL_LAUNCH_TIME"
"""Unix time at which the command was started; with it the first step logs `timing/cold_start`."""


class RayPPOTrainer:
    """Trains a policy by RL on rollouts of its own weights.

    Every public method is a hook: subclass and override one to change that part of a step. Attributes that
    callbacks and subclasses read: `cfg, tracker, tokenizer, generator, dispatch, train_dataloader,
    eval_dataloader, global_step, total_training_steps, all_metrics, all_timings, trajectory_logger,
    policy_model, critic_model, ref_model, has_critic`.
    """

    def __init__(  # noqa: PLR0913 - upstream's signature
        self,
        cfg: SkyRLTrainConfig,
        tracker: Tracking,
        tokenizer: Any,
        train_dataset: PromptDataset | None,
        inference_engine_client: InferenceEngineInterface,
        generator: GeneratorInterface,
        colocate_pg: ResolvedPlacementGroup | None = None,
        eval_dataset: PromptDataset | None = None,
        callbacks: Sequence[TrainingCallback] | None = None,
    ) -> None:
        self.cfg = cfg
        self.tracker = tracker
        self.tokenizer = tokenizer
        self.inference_engine_client = inference_engine_client
        self.colocate_pg = colocate_pg
        self.rollout = RolloutStage(generator, cfg)
        self.train_dataloader = None if train_dataset is None else build_dataloader(cfg, train_dataset, is_train=True)
        self.eval_dataloader = None if eval_dataset is None else build_dataloader(cfg, eval_dataset, is_train=False)
        self.total_training_steps = self._count_steps()
        self.feed = PromptFeed(
            lambda: self.train_dataloader,
            passes=cfg.trainer.epochs,
            on_epoch_start=lambda: self._call("on_epoch_start", epoch=self.feed.next_epoch),
            on_epoch_end=lambda: self._call("on_epoch_end"),
        )
        self.sampler = DynamicSampler(lambda: self.cfg.trainer.algorithm, cfg.trainer.seed)
        self.callbacks = CallbackHandler(list(callbacks or []))
        self.control = TrainingControl()
        self.checkpoints = CheckpointManager.from_config(cfg.trainer)
        self.trajectory_logger: Any | None = None
        self.report = StepReport(cfg, tracker, total_steps=self.total_training_steps)
        self.global_step = 0
        self.weight_version = 0
        self._saved_step = self._exported_step = 0
        launched = os.environ.get(LAUNCH_VARIABLE)
        self._launched_at = float(launched) if launched else None
        self.all_metrics: dict[str, Any] = {}
        self.all_timings: dict[str, float] = {}
        algorithm = cfg.trainer.algorithm
        self.reward_kl_controller = get_kl_controller(algorithm) if algorithm.use_kl_in_reward else None
        self.has_critic = cfg.trainer.critic.model.path is not None
        self.policy_model: PPORayActorGroup | None = None
        self.critic_model: PPORayActorGroup | None = None
        self.ref_model: PPORayActorGroup | None = None

    # -- construction

    @property
    def generator(self) -> GeneratorInterface:
        """What makes the rollouts; may be replaced before `train`."""
        return self.rollout.generator

    @generator.setter
    def generator(self, generator: GeneratorInterface) -> None:
        self.rollout.generator = generator

    @property
    def roles(self) -> list[str]:
        """Roles that train."""
        return ["policy", "critic"] if self.has_critic else ["policy"]

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one pass over the data; the steps of one, unless dynamic sampling takes several for a step."""
        return len(self.train_dataloader) if self.train_dataloader is not None else 0

    def _count_steps(self) -> int:
        """Steps of the run, by which the learning rate is planned; with dynamic sampling the most there can be."""
        if self.train_dataloader is None:
            return 0
        steps = len(self.train_dataloader) * self.cfg.trainer.epochs
        limit = self.cfg.trainer.max_training_steps
        return steps if limit is None else min(steps, limit)

    def add_callback(self, callback: TrainingCallback) -> None:
        """Register a callback; it is called after those registered before it."""
        self.callbacks.add(callback)

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        """Start the actor groups of the roles that this run needs and load their models."""
        roles = RoleClasses(policy=PolicyWorker, critic=CriticWorker, ref=RefWorker)
        self.attach_models(start_models(self.cfg, roles, self.colocate_pg))

    def attach_models(self, groups: ModelGroups) -> None:
        """Load the models of actor groups that were started already, and take the groups over."""
        self.dispatch = groups.load(self.cfg, self.total_training_steps or None, self.inference_engine_client)
        self.policy_model, self.critic_model, self.ref_model = groups.policy, groups.critic, groups.ref
        has_ref = groups.ref is not None
        self.score = ScoreStage(self.dispatch, self.cfg.trainer, has_critic=self.has_critic, has_ref=has_ref)
        self.update = UpdateStage(self.dispatch, self.cfg.trainer, has_critic=self.has_critic)
        moving_ref = has_ref and self.cfg.trainer.update_ref_every_epoch
        self.persist = PersistStage(
            self.dispatch, self.checkpoints, self.cfg.trainer, self.tokenizer, self.roles, moving_ref=moving_ref
        )
        self.sync = SyncStage(self.dispatch, self.inference_engine_client)

    async def init_weight_sync_state(self) -> None:
        """Connect the trainer's ranks with the engines."""
        await self.sync.init()

    # -- the run

    async def train(self) -> None:
        """Train until the data, `trainer.epochs` or `trainer.max_training_steps` ends the run."""
        if self.train_dataloader is None:
            raise ConfigError("data.train_data is empty: RayPPOTrainer.train needs a training dataset")
        self.report.start()
        try:
            await self._prepare()
            await self._train_steps()
            await self._finish()
        finally:
            try:
                self._call("on_train_end")
            finally:
                self.report.stop()

    async def _prepare(self) -> None:
        await self.init_weight_sync_state()
        await asyncio.to_thread(self.load_checkpoints)
        await self._sync_weights()
        self._call("on_train_start")
        if self.cfg.trainer.eval_interval > 0 and self.cfg.trainer.eval_before_train and self.eval_dataloader:
            await self._evaluate()
            self._commit()

    async def _train_steps(self) -> None:
        while self.global_step < self.total_training_steps and not self.control.should_stop:
            self.feed.begin_step(may_be_abandoned=self.sampler.is_on)
            prompts = self.feed.draw()
            if prompts is None:
                self._warn_used_up("no batch is left for another step")
                break
            self.global_step += 1
            if not await self._step(prompts):
                self._abandon_step()
                break
        self.feed.close()

    async def _step(self, prompts: Prompts) -> bool:
        """Take one training step and everything that follows it; False if the data ended before its batch was full."""
        with Timer("step", self.all_timings):
            self._call("on_step_start")
            rolled = await self._sample(prompts)
            if rolled is None:
                return False
            batch = await asyncio.to_thread(self._learn, rolled)
            self._call("on_step_end", batch=batch, metrics=dict(self.all_metrics))
            forced = self.control.take()
            await asyncio.to_thread(self._save_if_due, forced.should_save)
            self._update_ref_if_due()
            await self._sync_weights()
            if self._is_due(self.cfg.trainer.eval_interval, last=True) or forced.should_evaluate:
                await self._evaluate()
        self._commit()
        return True

    async def _sample(self, prompts: Prompts) -> RolledOut | None:
        """Roll out batches until one can be trained on; None if the data ends first."""
        first_epoch = self.feed.epoch
        try:
            while (rolled := self.handle_dynamic_sampling(await self._roll_out(prompts))) is None:
                more = self.feed.draw()
                if more is None:
                    return None
                prompts = more if self.feed.epoch == first_epoch else in_epoch(more, self.feed.epoch)
        finally:
            unfinished = self.sampler.drain()
            if unfinished is not None:
                record_unfinished_step(self.cfg, unfinished, self.global_step)
        self.all_metrics |= rolled.metrics
        if self.dispatch.engines_share_devices:
            await self.inference_engine_client.sleep()
        return rolled

    async def _roll_out(self, prompts: Prompts) -> RolledOut:
        samples = self.rollout.samples_per_prompt("train")
        prompts = drop_uneven_tail(prompts, samples=samples, dp_lcm=self.dispatch.get_lcm_dp_size())
        inputs, uids = self.rollout.prepare(prompts, phase="train", global_step=self.global_step)
        phase = self.report.phase("generate", self.global_step, total=len(inputs["prompts"]), unit="rollouts")
        with phase as shown, Timer("generate", self.all_timings):
            self.generator.on_rollout_done = shown.advance
            output = await self.generate(inputs)
        return self.rollout.check(inputs, output, uids)

    def _abandon_step(self) -> None:
        """Forget a step that got no full batch: what is saved now is the state before it."""
        self._warn_used_up(f"step {self.global_step} did not get a full batch and is left out")
        self.global_step -= 1
        self.feed.close()
        self.feed.abandon_step()
        self.all_metrics, self.all_timings = {}, {}

    def _warn_used_up(self, what: str) -> None:
        logger.warning(
            "The data is used up after trainer.epochs=%d passes: %s. Dynamic sampling takes several batches for some "
            "steps, so fewer steps than the planned %d are possible; raise trainer.epochs to train longer",
            self.cfg.trainer.epochs, what, self.total_training_steps,
        )  # fmt: skip

    def _learn(self, rolled: RolledOut) -> TrainingInputBatch:
        """Turn rollouts into optimizer steps."""
        with Timer("postprocess_generator_output", self.all_timings):
            output, uids = self.postprocess_generator_output(rolled.output, rolled.uids, **self._measured(rolled))
        log_rollouts(self.cfg, self.tracker, self.trajectory_logger, rolled, self.tokenizer, self.global_step)
        with Timer("convert_to_training_input", self.all_timings):
            batch = self.convert_to_training_input(output, uids)
        with self.report.phase("train", self.global_step):
            with Timer("fwd_logprobs_values_reward", self.all_timings):
                batch = self.fwd_logprobs_values_reward(batch)
            if self.cfg.trainer.algorithm.use_kl_in_reward:
                with Timer("apply_reward_kl_penalty", self.all_timings):
                    batch = self.apply_reward_kl_penalty(batch)
            with Timer("compute_advantages_and_returns", self.all_timings):
                batch = self.compute_advantages_and_returns(batch)
            record_step(self.cfg, rolled, output, batch, self.global_step)
            if self.cfg.trainer.dump_data_batch:
                self.dump_data(batch)
            with Timer("train_critic_and_policy", self.all_timings):
                self.all_metrics |= self.train_critic_and_policy(batch)
        return batch

    async def _finish(self) -> None:
        """Write what the end of the run owes, unless the last step wrote it."""
        if self.dispatch.engines_share_devices:
            await self.inference_engine_client.sleep()
        await asyncio.to_thread(self._save_at_the_end)
        self.dispatch.finalize_pending_saves("policy")

    def _measured(self, rolled: RolledOut) -> dict[str, Any]:
        """Keywords with the rows to measure; a hook without them (upstream's older signature) measures its own."""
        if rolled.measured is None:
            return {}
        offered = {"metrics_generator_output": rolled.measured.output, "metrics_uids": rolled.measured.uids}
        return {name: offered[name] for name in accepted_keywords(type(self).postprocess_generator_output, offered)}

    # -- the parts of a step, each a hook

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Roll out a prepared batch."""
        return await self.generator.generate(input_batch)

    def handle_dynamic_sampling(self, rolled: RolledOut) -> RolledOut | None:
        """Collect rollouts for the step; returns the batch to train on, or None to roll out more prompts first.

        Raises:
            DynamicSamplingError: `trainer.algorithm.dynamic_sampling.max_sample_batches` batches were not enough.
        """
        num_prompts = even_count(
            self.cfg.trainer.train_batch_size,
            samples=self.rollout.samples_per_prompt("train"),
            dp_lcm=self.dispatch.get_lcm_dp_size(),
        )
        return self.sampler.add(rolled, num_prompts=num_prompts, global_step=self.global_step)

    def postprocess_generator_output(
        self,
        generator_output: GeneratorOutput,
        uids: list[str],
        metrics_generator_output: GeneratorOutput | None = None,
        metrics_uids: list[str] | None = None,
    ) -> tuple[GeneratorOutput, list[str]]:
        """Punish overlong responses, record the rewards and keep groups without a spread of them out of the loss.

        Override it to shape the rewards before they reach the advantages.

        Args:
            generator_output: Columns of the rollouts, one row each.
            uids: Prompt uid of every row.
            metrics_generator_output: Rows to measure instead, where the trained rows are a selection.
            metrics_uids: Their uids.
        """
        output = shape_rewards(generator_output, self.cfg)
        measured, measured_uids = output, uids
        if metrics_generator_output is not None:
            measured = shape_rewards(metrics_generator_output, self.cfg)
            measured_uids = uids if metrics_uids is None else metrics_uids
        self.all_metrics |= reward_metrics(measured, measured_uids, self.rollout.samples_per_prompt("train"))
        output, metrics = mask_flat_groups(output, uids, self.cfg.trainer.algorithm)
        self.all_metrics |= metrics
        return output, uids

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingInputBatch:
        """Make padded tensors, say where the mini-batches lie, and pad the rows to the data-parallel sizes."""
        batch = assemble(generator_output, uids, pad_token_id=self.tokenizer.pad_token_id)
        require_rollout_logprobs(batch, self.cfg.trainer.algorithm)
        num_prompts = len(dict.fromkeys(uids))
        for role in self.roles:
            mini = min(getattr(self.cfg.trainer, f"{role}_mini_batch_size"), num_prompts)
            batch.metadata[f"{role}_mini_batch_boundaries"] = compute_prompt_mini_batch_boundaries(
                uids, mini, num_prompts, False, self.rollout.samples_per_prompt("train")
            )
        batch.metadata["old_is_current"] = False
        self.all_metrics["generate/batch_num_seq"] = len(batch)
        self.all_metrics["generate/batch_padded_seq_len"] = batch["sequences"].shape[1]
        return pad_training_input_batch(batch, -len(batch) % self.dispatch.get_lcm_dp_size())

    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
        """Add old and reference log-probs and values."""
        batch, metrics = self.score.run(training_input)
        self.all_metrics |= metrics
        return batch

    def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Subtract the KL to the reference from the token rewards, or let a teacher reward; adapt the coefficient."""
        controller = self.reward_kl_controller
        assert controller is not None, "called although trainer.algorithm.use_kl_in_reward is false"
        algorithm = self.cfg.trainer.algorithm
        batch, metrics = apply_kl_penalty(
            data, controller.value, algorithm.kl_estimator_type, distil=algorithm.on_policy_distillation
        )
        controller.update(metrics["loss/avg_kl"], n_steps=len(batch) - batch.metadata["pad_size"])
        self.all_metrics |= metrics
        return batch

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Add advantages and returns."""
        batch, metrics = add_advantages(data, self.cfg.trainer.algorithm)
        self.all_metrics |= metrics
        return batch

    def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
        """Take the optimizer steps of this batch; returns `policy/*` and `critic/*`."""
        started = time.perf_counter()
        metrics = self.update.run(data, self.all_timings)
        seconds = time.perf_counter() - started
        placement = self.cfg.trainer.placement
        devices = placement.policy_num_nodes * placement.policy_num_gpus_per_node
        if self._launched_at is not None and self.update.first_step_at is not None:
            self.all_timings["cold_start"] = self.update.first_step_at - self._launched_at
            self._launched_at = None
        metrics["trainer/tokens_per_second_per_gpu"] = data["attention_mask"].sum().item() / (seconds * devices)
        return metrics

    def dump_data(self, data: TrainingInputBatch) -> None:
        """Write the batch to `{export_path}/dumped_data/global_step_N_training_input.safetensors`."""
        directory = storage.join(self.cfg.trainer.export_path, "dumped_data")
        data.save(storage.join(directory, f"global_step_{self.global_step}_training_input.safetensors"))

    # -- weights, evaluation, checkpoints

    async def _sync_weights(self) -> None:
        with self.report.phase("sync", self.global_step), Timer("sync_weights", self.all_timings):
            metrics = await self.sync.push()
        self.all_metrics |= metrics
        self.weight_version = int(metrics["weight_sync/version"])

    async def eval(self, progress: Phase | None = None) -> dict[str, float]:
        """Evaluate the engines' weights on the evaluation data; returns `eval/*`.

        Raises:
            ConfigError: If there is no evaluation data.
        """
        if self.eval_dataloader is None:
            raise ConfigError(
                "an evaluation was asked for, but data.val_data is empty or was not loaded: set it, and "
                "trainer.eval_interval above 0 or trainer.eval_before_train=true"
            )
        with Timer("eval", self.all_timings):
            return await evaluate(
                self.eval_dataloader,
                self.generator,
                self.cfg,
                self.global_step,
                self.tokenizer,
                trajectory_logger=self.trajectory_logger,
                tracker=self.tracker,
                progress=progress,
            )

    async def _evaluate(self) -> None:
        self._call("on_eval_start")
        prompts = len(self.eval_dataloader.dataset) if self.eval_dataloader is not None else None
        with self.report.phase("eval", self.global_step, total=prompts, unit="prompts") as shown:
            metrics = await self.eval(shown)
        self.all_metrics |= metrics
        self._call("on_eval_end", metrics=metrics)

    def save_checkpoints(self) -> None:
        """Write a checkpoint of this step: roles, data loader, controller."""
        with Timer("save_checkpoints", self.all_timings):
            path = self.persist.save(self._state(), self.feed.state())
        self._saved_step = self.global_step
        self.report.plot()
        self._call("on_save", ckpt_path=path)

    def _state(self) -> TrainerState:
        controller = self.reward_kl_controller
        return TrainerState(
            global_step=self.global_step,
            epoch=self.epoch,
            batches_drawn=self.feed.drawn,
            weight_version=self.weight_version,
            kl_coef=None if controller is None else controller.value,
            rng=rng_state(),
            run_dir=self.cfg.trainer.run_dir,
            config=plain(self.cfg),
        )

    def load_checkpoints(self) -> None:
        """Go on from the checkpoint that `trainer.resume_mode` names, if there is one."""
        trainer = self.cfg.trainer
        point = self.checkpoints.find_resume(trainer.resume_mode, trainer.resume_path)
        if point is None:
            return
        state, loader_state = self.persist.load(point)
        warn_config_differences(state.config, plain(self.cfg))
        self.global_step = state.global_step
        self._saved_step = state.global_step
        self.feed.resume(state.global_step if state.batches_drawn is None else state.batches_drawn, loader_state)
        if self.reward_kl_controller is not None and state.kl_coef is not None:
            self.reward_kl_controller.load_state_dict({"value": state.kl_coef})
        if state.rng is not None:
            restore_rng_state(state.rng)
        logger.info("Going on from %s: the next step is %d", point.path, self.global_step + 1)

    def save_models(self) -> None:
        """Export the trained models for transformers and vLLM."""
        with Timer("save_hf_model", self.all_timings):
            path = self.persist.export(self.global_step)
        self._exported_step = self.global_step
        logger.info("Exported the models to %s", path)

    def _save_if_due(self, forced: bool) -> None:
        if forced or self._is_due(self.cfg.trainer.ckpt_interval, epoch_end=True):
            self.save_checkpoints()
        if self._is_due(self.cfg.trainer.hf_save_interval, epoch_end=True):
            self.save_models()

    def _save_at_the_end(self) -> None:
        if self.cfg.trainer.ckpt_interval > 0 and self._saved_step != self.global_step:
            self.save_checkpoints()
        if self.cfg.trainer.hf_save_interval > 0 and self._exported_step != self.global_step:
            self.save_models()

    def update_ref_with_policy(self) -> None:
        """Make the current policy the reference."""
        with Timer("update_ref_with_policy", self.all_timings):
            self.dispatch.copy_policy_to_ref()

    def _update_ref_if_due(self) -> None:
        last = self.global_step == self.total_training_steps or self.feed.is_used_up
        follows = self.cfg.trainer.update_ref_every_epoch and self.ref_model is not None
        if follows and self.feed.step_ends_epoch and not last:
            self.update_ref_with_policy()

    # -- reporting

    @property
    def epoch(self) -> int:
        """Pass over the data that the last batch was taken from, from 0."""
        return self.feed.epoch

    def _is_due(self, interval: int, *, epoch_end: bool = False, last: bool = False) -> bool:
        if interval <= 0:
            return False
        ends_run = self.global_step == self.total_training_steps
        return self.global_step % interval == 0 or (epoch_end and self.feed.step_ends_epoch) or (last and ends_run)

    def _call(self, hook: str, **fields: Any) -> None:
        place = {"global_step": self.global_step, "epoch": self.epoch, "steps_per_epoch": self.steps_per_epoch}
        data = CallbackInput(total_steps=self.total_training_steps or None, **(place | fields))
        self.callbacks.call(hook, self, data, self.control)

    def _commit(self) -> None:
        """Log everything that this step measured, as one record."""
        logs = dict(self.all_metrics)
        logs |= {f"timing/{name}": seconds for name, seconds in self.all_timings.items()}
        logs |= {"trainer/epoch": self.epoch, "trainer/global_step": self.global_step}
        logs |= self.report.system_metrics()
        self._call("on_log", logs=logs)
        self.tracker.log(logs, step=self.global_step, commit=True)
        self.report.step_done(self.global_step, logs)
        self.all_metrics, self.all_timings = {}, {}

    def flush_pending_metrics(self) -> None:
        """Log what the current step measured so far; called when it fails."""
        if self.all_metrics or self.all_timings:
            self._commit()
