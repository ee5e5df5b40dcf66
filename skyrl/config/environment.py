"""Settings of the environments that give rewards (`environment`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl.config.base import BaseConfig


@dataclass
class Text2SQLEnvConfig(BaseConfig):
    """The text-to-SQL environment (`environment.skyrl_gym.text2sql`)."""

    db_path: str = "/home/ray/default/sql_data"
    """Folder with the databases that queries run against."""


@dataclass
class LLMAsAJudgeEnvConfig(BaseConfig):
    """The environment in which a language model grades answers (`environment.skyrl_gym.llm_as_a_judge`)."""

    model: str = "gpt-4o-mini"
    """Name of the judge at its endpoint."""
    base_url: str | None = None
    """OpenAI-compatible endpoint of the judge; None means the client library's default."""


@dataclass
class SearchEnvConfig(BaseConfig):
    """The environment with a retrieval tool (`environment.skyrl_gym.search`)."""

    log_requests: bool = False
    """Log each query and its answer."""
    search_url: str = "http://127.0.0.1:8000/retrieve"
    """Address of the retrieval server."""
    topk: int = 3
    """Passages returned for a query."""
    timeout: int = 30
    """Seconds to wait for one query."""


@dataclass
class SkyRLGymConfig(BaseConfig):
    """Settings of the gym; an environment of yours gets a group by ``+environment.skyrl_gym.<id>.key=value``."""

    max_env_workers: int = 32
    """Threads that run environment code; 0 runs it on the event loop."""
    text2sql: Text2SQLEnvConfig = field(default_factory=Text2SQLEnvConfig)
    """The text-to-SQL environment."""
    llm_as_a_judge: LLMAsAJudgeEnvConfig = field(default_factory=LLMAsAJudgeEnvConfig)
    """The environment in which a language model grades answers."""
    search: SearchEnvConfig = field(default_factory=SearchEnvConfig)
    """The environment with a retrieval tool."""


@dataclass
class EnvironmentConfig(BaseConfig):
    """Which environment gives the rewards (`environment`)."""

    env_class: str | None = "gsm8k"
    """Id of the environment for rows that name none; a row's own ``env_class`` wins."""
    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
    """Settings of the gym and of each environment."""
