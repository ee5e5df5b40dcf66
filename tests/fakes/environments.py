"""An environment that follows a script and counts what is open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType


@dataclass(kw_only=True)
class EnvScript:
    """What every environment of the script does; step i takes entry i, the last one goes on for ever."""

    observations: tuple[ConversationType, ...] = ((),)
    rewards: tuple[float, ...] = (1.0,)
    num_steps: int | None = 1
    """`done` after this many; None is never."""
    replacements: tuple[str | None, ...] = (None,)
    on_init: Callable[[Any, ConversationType], ConversationType] | None = None
    on_step: Callable[[Any, str], Any] | None = None
    """Runs before the answer; whatever it returns but None is the answer."""
    on_close: Callable[[Any], None] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)
    closed: list[Any] = field(default_factory=list)
    inside: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_open(self) -> int:
        return len(self.made) - len(self.closed)

    @property
    def num_steps_taken(self) -> int:
        return sum(len(env.actions) for env in self.made)


class ScriptedEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None, *, script: EnvScript) -> None:
        super().__init__()
        self.env_config, self.extras, self.script = env_config, extras or {}, script
        self.actions: list[str] = []
        script.made.append(self)

    def init(self, prompt, *args):
        messages = prompt if self.script.on_init is None else self.script.on_init(self, prompt)
        return messages, {}

    def step(self, action):
        script, turn = self.script, len(self.actions)
        self.actions.append(action)
        answer = script.on_step(self, action) if script.on_step is not None else None
        if answer is not None:
            return answer
        return BaseTextEnvStepOutput(
            observations=list(_entry(script.observations, turn)),
            reward=_entry(script.rewards, turn),
            done=script.num_steps is not None and turn + 1 >= script.num_steps,
            metadata={},
            postprocessed_action=_entry(script.replacements, turn),
        )

    def get_metrics(self):
        return dict(self.script.metrics)

    def close(self):
        if self.script.on_close is not None:
            self.script.on_close(self)
        if self not in self.script.closed:
            self.script.closed.append(self)


class AsyncScriptedEnv(ScriptedEnv):
    async def init(self, prompt, *args):
        await asyncio.sleep(0)
        return super().init(prompt)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self):
        await asyncio.sleep(0)
        super().close()


class _Shared:
    """Survives the deep copy that `make` does of its defaults."""

    def __init__(self, script: EnvScript) -> None:
        self.script = script

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


@contextmanager
def registered(script: EnvScript, *, name: str = "scripted", cls: type[ScriptedEnv] = ScriptedEnv) -> Iterator[None]:
    """Register the script as an environment for the duration."""

    class Registered(cls):
        def __init__(self, env_config=None, extras=None, shared=None):
            super().__init__(env_config, extras, script=shared.script)

    skyrl_gym.register(id=name, entry_point=Registered, kwargs={"shared": _Shared(script)}, force=True)
    try:
        yield
    finally:
        skyrl_gym.envs.deregister(name)


def _entry(values: Any, index: int) -> Any:
    return values[min(index, len(values) - 1)]
