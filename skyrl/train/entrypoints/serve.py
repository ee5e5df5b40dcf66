"""``python -m skyrl.train.entrypoints.serve key=value ...``: start inference servers and serve until interrupted.

The configuration is that of training; what concerns engines is read. Engines own their GPUs here, so set
``trainer.placement.colocate_all=false``.
"""

from __future__ import annotations

import logging
import signal
import sys
import time

from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.rules.engine import check_engine, check_engine_urls
from skyrl.config.rules.paths import check_model_paths
from skyrl.config.rules.unbuilt import refuse_unbuilt
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

HEALTH_POLL_S = 1.0
ENGINE_KEY = "generator.inference_engine"


def validate_serve(cfg: SkyRLTrainConfig) -> None:
    """Check what serving needs.

    Raises:
        ConfigError: No model, engines elsewhere, shared GPUs, or an engine setting that cannot be.
        ModelLoadError: The model path does not exist or holds no model.
    """
    engine = cfg.generator.inference_engine
    if not cfg.trainer.policy.model.path:
        raise ConfigError("trainer.policy.model.path is empty; name the model to serve")
    if not engine.run_engines_locally:
        raise ConfigError(f"{ENGINE_KEY}.run_engines_locally=false leaves nothing to serve; set it to true")
    for key in ("external_proxy_url", "external_server_urls"):
        if vars(engine)[key]:
            raise ConfigError(f"{ENGINE_KEY}.{key}={vars(engine)[key]!r}: those servers run already; set it to null")
    if cfg.trainer.placement.colocate_all:
        raise ConfigError("trainer.placement.colocate_all=true shares GPUs with a trainer; set it to false to serve")
    check_engine(engine)
    check_engine_urls(engine, colocate_all=False)
    refuse_unbuilt(cfg, prefix="generator.")
    check_model_paths(cfg.trainer)


def serve(cfg: SkyRLTrainConfig) -> None:
    """Start servers and router, print their addresses, and block. Raises ``InferenceError`` when a server dies."""
    from skyrl.backends.skyrl_train.inference_servers.setup import create_inference_servers
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args, resolve_policy_model_name

    setup = create_inference_servers(cfg.generator.inference_engine, build_vllm_cli_args(cfg), cfg.trainer.log_path)
    try:
        lines = [f"model   {resolve_policy_model_name(cfg)}", f"proxy   {setup.proxy_url}"]
        lines += [f"server  {url}" for url in setup.server_urls]
        if setup.access_token:
            lines.append(f"token   {setup.access_token} (send it as Authorization: Bearer)")
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()
        while setup.health is not None:
            setup.health.raise_if_dead()
            time.sleep(HEALTH_POLL_S)
    finally:
        setup.shutdown()


def _exit_on_sigterm(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def main() -> None:
    """Serve what the command line configures, until Ctrl-C or SIGTERM."""
    from skyrl.train.entrypoints.launch import run_hydra

    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    run_hydra(serve, validate=validate_serve, trains=False)


if __name__ == "__main__":
    main()
