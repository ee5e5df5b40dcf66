"""python -m examples.train.quickstart.main_quickstart +recipe=quickstart key=value ...

Trains like any run, and prints as its last line one JSON object that sums the run up (``summary.py``).
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path

from examples.train.quickstart.summary import summarize
from skyrl.config.root import SkyRLTrainConfig
from skyrl.train.entrypoints.launch import run_hydra
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils.metrics_file import read_metrics
from skyrl_gym.envs import register


class QuickstartExp(BasePPOExp):
    """Registers the environment in the controller, the process that makes the rollouts."""

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        register(id="addition", entry_point="examples.train.quickstart.env:AdditionEnv")
        super().__init__(cfg)


def train(cfg: SkyRLTrainConfig, summary_path: Path) -> float | None:
    """Run the experiment in the controller, then leave its summary for the process that was started."""
    experiment = QuickstartExp(cfg)
    score = experiment.run()
    records = read_metrics(os.path.join(experiment.cfg.trainer.run_dir, "metrics.jsonl"))
    summary_path.write_text(json.dumps(summarize(records)))
    return score


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        summary_path = Path(folder) / "summary.json"
        run_hydra(partial(train, summary_path=summary_path))
        if summary_path.exists():
            print(summary_path.read_text(), flush=True)


if __name__ == "__main__":
    main()
