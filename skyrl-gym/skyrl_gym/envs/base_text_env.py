"""Base of environments that speak chat messages."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from skyrl_gym.aggregation import default_aggregate_metrics
from skyrl_gym.core import Env
from skyrl_gym.tools.core import ToolGroup

MessageType = dict[str, Any]
"""`{"role", "content"}`; the content is text, or a list of OpenAI content parts."""

ConversationType = list[MessageType]
"""Messages in order."""


class BaseTextEnvStepOutput(TypedDict):
    """What a step returns; a plain dict at run time."""

    observations: ConversationType
    """New messages to append, never the whole history; normally empty when `done`."""
    reward: float
    """Reward of this step."""
    done: bool
    """True ends the episode."""
    metadata: dict[str, Any]
    """For people and logs."""
    postprocessed_action: NotRequired[str | None]
    """Text that replaces the action in the trajectory. It is tokenised again, so the trained tokens are no
    longer those that were sampled: avoid it."""


class BaseTextEnv(Env[ConversationType, str]):
    """A conversation with an agent.

    The constructor of every environment takes `env_config` (its section of the configuration, or None) and
    `extras` (the dataset row without the prompt) by keyword. A dataset field that the environment needs and
    does not find must fail there, with an `AssertionError` that names it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: ConversationType, *args: Any) -> tuple[ConversationType, dict[str, Any]]:
        """Return the first messages; an environment may replace the prompt, say to add a system message."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Answer one assistant text."""
        raise NotImplementedError(f"{type(self).__name__} must define step()")

    def init_tool_groups(self, tool_groups: list[ToolGroup]) -> None:
        """Make the tools of the groups callable.

        Raises:
            ValueError: Two tools have the same name.
        """
        names: dict[str, str] = {}
        for group in tool_groups:
            for tool_name, group_name in group.get_tool_to_group_mapping().items():
                if tool_name in names:
                    raise ValueError(f"tool {tool_name!r} is in the groups {names[tool_name]!r} and {group_name!r}")
                names[tool_name] = group_name
        self.tool_groups = tool_groups
        self.tool_to_toolgroup = names

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: list[Any] | tuple[Any, ...]) -> Any:
        """Call a tool with positional arguments; raises `ValueError` for an unknown group or tool."""
        for group in self.tool_groups:
            if group.get_name() == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(f"ToolGroup '{tool_group_name}' not found.")

    def get_metrics(self) -> dict[str, Any]:
        """Return the metrics of the episode; called once, at its end."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Turn the metrics of many episodes into those of the batch."""
        return dict(default_aggregate_metrics(metrics))
