"""Examples for people: one rollout in the log, and tables of chosen rollouts in the tracker."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.train.utils.progress import FORWARD_VARIABLE
from skyrl.train.utils.tracking import Tracking

logger = logging.getLogger(__name__)

COLUMNS = ("step", "idx", "reward", "num_turns", "trajectory")

_CYAN, _GREEN, _YELLOW, _PLAIN = "\x1b[36m", "\x1b[32m", "\x1b[33m", "\x1b[0m"


class TrajectoryLogger:
    """Picks a few trajectories of a step and shows them as a table; override a method to change how.

    Args:
        columns: names of the table's columns.
        sample_seed: seed of the random part of the selection.
    """

    def __init__(self, columns: Sequence[str] = COLUMNS, sample_seed: int = 0) -> None:
        self.columns = tuple(columns)
        self.sample_seed = sample_seed

    def log(  # noqa: PLR0913 - upstream's signature
        self,
        tracker: Tracking,
        num_samples: int,
        prompts: Sequence[Any],
        generator_output: Mapping[str, Any],
        tokenizer: Any,
        global_step: int | None,
        num_turns_list: Sequence[int] | None = None,
        wandb_key: str = "trajectories/train",
        include_idx: bool = True,
    ) -> None:
        """Send the table of a step; does nothing without a tracker that has tables, or for no samples.

        Args:
            tracker: where it goes.
            num_samples: rows at most.
            prompts: messages of each row's prompt.
            generator_output: columns of the batch (`skyrl.train.generators.base.GeneratorOutput`).
            tokenizer: decodes the responses.
            global_step: step to log at; None logs at 0.
            num_turns_list: turns of each row; None counts the spans of its loss mask.
            wandb_key: name of the table.
            include_idx: whether the rows' position in the batch is a column.
        """
        if num_samples <= 0 or not tracker.supports_tables:
            return
        step = global_step or 0
        samples = self.build_samples(num_samples, prompts, generator_output, tokenizer, step, num_turns_list)
        columns = self.columns
        if not include_idx and "idx" in columns:
            position = columns.index("idx")
            columns = columns[:position] + columns[position + 1 :]
            samples = [row[:position] + row[position + 1 :] for row in samples]
        tracker.log_samples_to_table(wandb_key, columns, samples, step)

    def build_samples(
        self,
        num_samples: int,
        prompts: Sequence[Any],
        generator_output: Mapping[str, Any],
        tokenizer: Any,
        global_step: int,
        num_turns_list: Sequence[int] | None = None,
    ) -> list[list[Any]]:
        """Rows of the table, in the order of `COLUMNS`."""
        rewards = [total_reward(reward) for reward in generator_output["rewards"]]
        masks = generator_output["loss_masks"]
        rows = []
        for index in self.select_sample_indices([reward or 0.0 for reward in rewards], num_samples):
            turns = self.count_assistant_turns(masks[index]) if num_turns_list is None else num_turns_list[index]
            text = self.format_trajectory(
                prompts[index], generator_output["response_ids"][index], masks[index], tokenizer
            )
            rows.append([global_step, index, rewards[index], turns, text])
        return rows

    def select_sample_indices(self, rewards: Sequence[float], num_samples: int) -> list[int]:
        """Ascending positions: all if there are few; else the first lowest, the first highest, and random others."""
        if num_samples >= len(rewards):
            return list(range(len(rewards)))
        if num_samples <= 0:
            return []
        chosen = [rewards.index(min(rewards)), rewards.index(max(rewards))]
        chosen = list(dict.fromkeys(chosen))[:num_samples]
        others = [index for index in range(len(rewards)) if index not in chosen]
        chosen += random.Random(self.sample_seed).sample(others, num_samples - len(chosen))
        return sorted(chosen)

    def format_trajectory(self, prompt: Any, response_ids: Any, loss_mask: Any, tokenizer: Any) -> str:
        """Text of a trajectory: ``[ROLE]`` blocks of the prompt, then of the response's spans by loss mask."""
        blocks = [f"[{message['role'].upper()}]\n{_content(message)}" for message in _messages(prompt)]
        for trained, start, end in _spans(loss_mask):
            role = "ASSISTANT" if trained else "USER/TOOL"
            blocks.append(f"[{role}]\n{tokenizer.decode(list(response_ids[start:end]))}")
        return "\n\n".join(blocks)

    def count_assistant_turns(self, loss_mask: Any) -> int:
        """Number of maximal runs of ones."""
        return sum(1 for trained, _, _ in _spans(loss_mask) if trained)


def pretty_print_example(
    log: logging.Logger, prompt: Any, response: str, reward: float | Sequence[float] | None
) -> None:
    """Log one prompt (text or messages), its response and total reward (``N/A`` without one); never raises."""
    try:
        total = total_reward(reward)
        shown = "N/A" if total is None else f"{total:.4f}"
        text = "\n".join(f"[{message['role']}] {_content(message)}" for message in _messages(prompt))
        colours = (_CYAN, _GREEN, _YELLOW, _PLAIN) if _in_colour() else ("", "", "", "")
        cyan, green, yellow, plain = colours
        log.info(
            "Example:\n%sPrompt:%s\n%s\n%sResponse:%s\n%s\n%sTotal reward:%s %s",
            *(cyan, plain, text, green, plain, response, yellow, plain, shown),
        )
    except Exception:
        # An example is for reading; an odd one must not end the training.
        log.exception("This example cannot be shown")


def total_reward(reward: Any) -> float | None:
    """Sum of per-token rewards, or the one number; None stays None."""
    if reward is None:
        return None
    if isinstance(reward, int | float):
        return float(reward)
    return float(sum(float(value) for value in reward))


def _in_colour() -> bool:
    return os.environ.get(FORWARD_VARIABLE) == "1" or sys.stderr.isatty()


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False, default=str)


def _spans(mask: Any) -> list[tuple[bool, int, int]]:
    """Maximal runs of equal trained-ness: ``[1, 1, 0]`` gives ``[(True, 0, 2), (False, 2, 3)]``."""
    spans: list[tuple[bool, int, int]] = []
    for index, value in enumerate(mask):
        trained = bool(value)
        if spans and spans[-1][0] == trained:
            spans[-1] = (trained, spans[-1][1], index + 1)
        else:
            spans.append((trained, index, index + 1))
    return spans
