"""`python -m skyrl.train.entrypoints.main_generate key=value ...`: evaluate a model without training it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from skyrl.env_vars import SKYRL_RAY_PG_TIMEOUT_IN_S
from skyrl.errors import ConfigError
from skyrl.train.entrypoints.main_base import BasePPOExp

if TYPE_CHECKING:
    from skyrl.train.dataset.dataset import PromptDataset

logger = logging.getLogger(__name__)


class EvalOnlyEntrypoint(BasePPOExp):
    """Starts the engines, rolls out `data.val_data` and reports the scores at step 0."""

    def get_train_dataset(self) -> None:  # type: ignore[override]
        """Load nothing: there is no training."""

    def get_eval_dataset(self) -> PromptDataset:
        """Load the evaluation prompts.

        Raises:
            ConfigError: If `data.val_data` is empty.
        """
        if not self.cfg.data.val_data:
            raise ConfigError("data.val_data is empty: main_generate needs evaluation data, such as [val.parquet]")
        return self._load_dataset(self.cfg.data.val_data)

    def get_colocate_pg(self, timeout: int = SKYRL_RAY_PG_TIMEOUT_IN_S) -> None:
        """Reserve nothing: no trainer shares the engines' GPUs, so they never sleep, which would drop their weights."""

    def run(self) -> float | None:
        """Evaluate; returns `eval/all/avg_score`."""
        with self._cleanup:
            try:
                metrics = self._evaluate()
                return metrics.get("eval/all/avg_score")
            except Exception as error:
                self._report(error)
                raise
            finally:
                if self.tracker is not None:
                    self.tracker.finish()

    def _evaluate(self) -> dict[str, float]:
        from skyrl.train.dataset.dataloader import build_dataloader
        from skyrl.train.evaluate import evaluate
        from skyrl.train.utils.run_dir import prepare_run_dir

        self._check_environments()
        self.cfg.trainer.run_dir = prepare_run_dir(self.cfg.trainer.run_dir, resumed=False)
        self.tracker = self.get_tracker()
        client = self.get_inference_client()
        generator = self.get_generator(self.cfg, self.tokenizer, client)
        assert self.eval_dataset is not None, "get_eval_dataset refuses to give none"
        loader = build_dataloader(self.cfg, self.eval_dataset, is_train=False)

        async def evaluate_and_close() -> dict[str, float]:
            try:
                return await evaluate(
                    loader, generator, self.cfg, None, self.tokenizer, self.get_trajectory_logger(), self.tracker
                )
            finally:
                await client.teardown()

        metrics = asyncio.run(evaluate_and_close())
        self.tracker.log(metrics, step=0, commit=True)
        for name, value in sorted(metrics.items()):
            logger.info("%s: %.4f", name, value)
        return metrics


def main() -> None:
    """Run the command line."""
    from skyrl.train.entrypoints.launch import run_hydra
    from skyrl.train.validate import validate_generator_cfg

    run_hydra(EvalOnlyEntrypoint, validate=validate_generator_cfg, trains=False)


if __name__ == "__main__":
    main()
