"""Joining the per-turn rows of a trajectory where one turn's prompt continues the turn before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.generators.columns import slice_generator_output
from skyrl.train.generators.rewards import is_scalar


@dataclass
class _Group:
    """Rows that became one."""

    last: int
    prompt: list[int]
    response: list[int]
    mask: list[int]
    rewards: list[float] | None
    logprobs: list[float] | None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.response


def merge_stepwise_output(output: GeneratorOutput) -> GeneratorOutput:
    """Merge consecutive rows of a trajectory while prompt + response is a prefix of the next prompt.

    The tokens in between get mask 0, log-prob 0.0 and reward 0.0. The prompt is that of the first row; stop reason,
    a scalar reward and the other columns are those of the last. `P=[10], R=[20]` and `P=[10, 20, 30], R=[40]` become
    `P=[10], R=[20, 30, 40]` with the mask `[1, 0, 1]`.

    Raises:
        AssertionError: `trajectory_ids` or `is_last_step` is missing, or the rows carry routes or images.
    """
    ids, last = output.get("trajectory_ids"), output.get("is_last_step")
    if ids is None or last is None:
        raise AssertionError("merging rows needs trajectory_ids and is_last_step")
    for name in ("rollout_expert_indices", "pixel_values", "image_grid_thw"):
        if output.get(name) is not None:
            raise AssertionError(f"rows with {name} can't be merged")
    groups: list[_Group] = []
    for row in range(len(ids)):
        same = row > 0 and ids[row] == ids[row - 1]
        if same and output["prompt_token_ids"][row][: len(groups[-1].tokens)] == groups[-1].tokens:
            _extend(groups[-1], output, row)
        else:
            groups.append(_begin(output, row))
    merged: dict[str, Any] = dict(slice_generator_output(output, [group.last for group in groups]))
    merged["prompt_token_ids"] = [group.prompt for group in groups]
    merged["response_ids"] = [group.response for group in groups]
    merged["loss_masks"] = [group.mask for group in groups]
    if groups[0].rewards is not None:
        merged["rewards"] = [group.rewards for group in groups]
    if groups[0].logprobs is not None:
        merged["rollout_logprobs"] = [group.logprobs for group in groups]
    return merged  # type: ignore[return-value]


def _begin(output: GeneratorOutput, row: int) -> _Group:
    reward, logprobs = output["rewards"][row], output.get("rollout_logprobs")
    return _Group(
        last=row,
        prompt=list(output["prompt_token_ids"][row]),
        response=list(output["response_ids"][row]),
        mask=list(output["loss_masks"][row]),
        rewards=None if is_scalar(reward) else list(reward),
        logprobs=None if logprobs is None else list(logprobs[row]),
    )


def _extend(group: _Group, output: GeneratorOutput, row: int) -> None:
    row_group = _begin(output, row)
    between = row_group.prompt[len(group.tokens) :]
    group.last = row
    group.response += between + row_group.response
    group.mask += [0] * len(between) + row_group.mask
    if group.rewards is not None and row_group.rewards is not None:
        group.rewards += [0.0] * len(between) + row_group.rewards
    if group.logprobs is not None and row_group.logprobs is not None:
        group.logprobs += [0.0] * len(between) + row_group.logprobs
