"""What `SkyRLGymGenerator` refuses, beyond the rules of each key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl.config.generator import GeneratorConfig
from skyrl.env_vars import SKYRL_GENERATE_CONCURRENCY_PER_ENGINE
from skyrl.errors import ConfigError
from skyrl.train.generators.start_gate import QueueingClient

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface


def check_settings(cfg: GeneratorConfig, client: InferenceEngineInterface) -> None:
    """Raise `ConfigError` for settings that contradict each other, the client, or what is built."""
    if cfg.step_wise_trajectories:
        raise ConfigError("generator.step_wise_trajectories=true is not built yet; leave it false")
    if cfg.vision_language_generator:
        raise ConfigError("generator.vision_language_generator=true is not built yet; leave it false")
    if cfg.inference_engine.enable_return_routed_experts:
        raise ConfigError("generator.inference_engine.enable_return_routed_experts=true is not built yet")
    if cfg.chat_template is not None and cfg.chat_template.name_or_path:
        raise ConfigError(
            f"generator.chat_template.name_or_path={cfg.chat_template.name_or_path!r}: custom chat templates are not "
            "built yet; leave it null to use the tokenizer's own"
        )
    if cfg.batched and cfg.chat_template_kwargs:
        raise ConfigError(
            "generator.chat_template_kwargs must be empty with generator.batched=true; set batched=false, which "
            "generates the same"
        )
    if cfg.deterministic and not isinstance(client, QueueingClient):
        raise ConfigError(
            f"generator.deterministic=true needs a client that can pause and count its queue; {type(client).__name__} "
            "can't"
        )


def check_room_to_queue(cfg: GeneratorConfig, num_rows: int) -> None:
    """Raise `ConfigError` when the deterministic mode can't have a whole batch wait at the engine."""
    room = SKYRL_GENERATE_CONCURRENCY_PER_ENGINE * cfg.inference_engine.num_engines
    if 0 < room < num_rows:
        raise ConfigError(
            f"generator.deterministic=true queues all {num_rows} rollouts of a batch at once, and the client sends at "
            f"most {room}; raise SKYRL_GENERATE_CONCURRENCY_PER_ENGINE={SKYRL_GENERATE_CONCURRENCY_PER_ENGINE}"
        )
    slots = cfg.rate_limit.max_concurrency if cfg.rate_limit.enabled else None
    if slots is not None and slots < num_rows:
        raise ConfigError(
            f"generator.deterministic=true queues all {num_rows} rollouts of a batch at once; "
            f"generator.rate_limit.max_concurrency={slots} must not be smaller"
        )
