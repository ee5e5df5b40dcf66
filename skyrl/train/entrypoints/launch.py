"""``run_hydra``: from a command line to a running controller. Every entry point's ``main`` is one call of it.

Nothing here imports ray, torch, vllm or transformers before the config is known to be good.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from skyrl.config.argv import Arguments, is_sweep_of, pop_override_entrypoint, split_argv
from skyrl.config.compose import CONFIG_MODULE, RootConfig, explain, prepare_tokens, register, to_typed
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError, DatasetError, ModelLoadError, ResourceError, SkyRLError
from skyrl.train.entrypoints.controller import run_controller
from skyrl.train.validate import validate_run
from skyrl.utils.log import configure_logging

logger = logging.getLogger(__name__)

USER_ERRORS = (ConfigError, DatasetError, ModelLoadError, ResourceError)
"""Errors whose message says it all: no traceback, exit code 2."""
_EXPAND_HOME = "skyrl_expanduser"


class _JobError(BaseException):
    """Carries an error past Hydra, which would print its own words about it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def run_hydra(
    main_fn: Callable[[Any], Any],
    config_cls: type[RootConfig] = SkyRLTrainConfig,
    validate: Callable[[Any], None] = validate_run,
    *,
    trains: bool = True,
) -> None:
    """Compose the command line's config, check it, start Ray and run ``main_fn(config)`` in the controller task.

    With Hydra's flags (``--cfg job``, ``--help``, ...) it prints and returns; with ``--multirun`` it runs one job
    after the other. ``trainer.override_entrypoint=<module>`` hands the rest of the command line to that module's
    ``main``. Exit codes: 2 for an error of the user's and 1 for another of the library's own errors, both in one
    line; 130 after Ctrl-C; 1 with a traceback for all else.

    Args:
        main_fn: a function of the config, or a class such as a subclass of ``BasePPOExp``: then
            ``main_fn(config).run()`` is called. A number that it returns is the score that sweepers optimise.
        config_cls: root of the config; a subclass brings keys of its own.
        validate: raises one of ``skyrl.errors`` for a config that cannot run.
        trains: False for an entry point that starts engines but no training roles: these then count for no GPU.
    """
    if "RAY_ADDRESS" not in os.environ:  # one node: workers share the environment, uv need not build it again
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    configure_logging()
    warnings.filterwarnings("default", category=DeprecationWarning, module=r"skyrl\.config\.")
    tokens: list[str] = []
    try:
        module, argv = pop_override_entrypoint(sys.argv[1:])
        if module is not None:
            _run_module(module, argv)
            return
        arguments = split_argv(argv)
        tokens = prepare_tokens(config_cls, arguments.overrides)
        run = partial(run_controller, main_fn, trains=trains)
        if validate is validate_run and not _is_ours(main_fn):
            validate = partial(validate_run, names_may_follow=True)
        _run_with_hydra(run, config_cls, validate, Arguments(flags=arguments.flags, overrides=tokens))
    except KeyboardInterrupt:
        _exit("interrupted", 130)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        _exit(f"error: {explain(error, config_cls, tokens)}", 2)
    except USER_ERRORS as error:
        _exit(f"error: {error}", 2)
    except SkyRLError as error:
        logger.debug("The run failed", exc_info=error)
        _exit(f"error: {' '.join(str(error).split())} (LOG_LEVEL=DEBUG shows the traceback)", 1)


def _is_ours(main_fn: Callable[[Any], Any]) -> bool:
    """Whether the controller runs nothing but the library; code of the user's may register names there."""
    if not isinstance(main_fn, type):
        return False
    module, run = main_fn.__module__, sys.modules["__main__"].__spec__
    if module == "__main__" and run is not None:
        module = run.name  # of python -m skyrl.train.entrypoints.main_base
    return module.startswith("skyrl.")


def _exit(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    sys.exit(code)


def _run_module(name: str, argv: Sequence[str]) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"trainer.override_entrypoint={name}: there is no module {error.name}") from error
    if not callable(vars(module).get("main")):
        raise ConfigError(f"trainer.override_entrypoint={name}: the module has no function main()")
    with _hydra_process([sys.argv[0], *argv]):
        module.main()


def _run_with_hydra(
    run: Callable[[Any], float | None],
    config_cls: type[RootConfig],
    validate: Callable[[Any], None],
    arguments: Arguments,
) -> None:
    def run_job(composed: DictConfig) -> float | None:
        config = to_typed(composed)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            separate_job(config, composed, arguments.overrides, HydraConfig.get().job.num)
        config.finalize()
        validate(config)
        return run(config)

    def task(composed: DictConfig) -> float | None:
        try:
            return run_job(composed)
        except Exception as error:
            raise _JobError(error) from error

    register(config_cls)
    OmegaConf.register_new_resolver(_EXPAND_HOME, os.path.expanduser, replace=True)
    main = hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=config_cls.STORE_NAME)
    with _hydra_process([sys.argv[0], *arguments.flags, *_launch_defaults(config_cls), *arguments.overrides]):
        try:
            main(task)()
        except _JobError as carrier:
            raise carrier.error from carrier.error.__cause__


def _launch_defaults(config_cls: type[RootConfig]) -> list[str]:
    """Keep Hydra out of the working folder and out of logging; the user's own tokens come later and win."""
    root = f"${{{_EXPAND_HOME}:${{{config_cls.LOG_KEY}}}}}"
    stamp = "${now:%Y-%m-%d}/${now:%H-%M-%S}"
    return [
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        f"hydra.run.dir='{root}/hydra/{stamp}'",
        f"hydra.sweep.dir='{root}/multirun/{stamp}'",
    ]


@contextmanager
def _hydra_process(argv: list[str]) -> Iterator[None]:
    """Give Hydra its arguments, and make it raise errors instead of printing them."""
    old_argv, old_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = old_argv
        if old_flag is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = old_flag


def separate_job(config: RootConfig, composed: DictConfig, tokens: Sequence[str], job: int) -> None:
    """Give a job of a sweep its own folders and name, so that no job resumes another's checkpoints.

    A value that is swept, or that holds ``${hydra:job.num}``, is left alone. ``config`` changes in place.
    """
    for key in config.JOB_KEYS:
        *parents, name = key.split(".")
        raw = OmegaConf.to_container(composed, resolve=False)
        group: Any = config
        for parent in parents:
            raw, group = raw[parent], getattr(group, parent)  # type: ignore[index, call-overload]
        written = raw[name]  # type: ignore[index, call-overload]
        if not written or "${hydra:job.num}" in written or any(is_sweep_of(token, key) for token in tokens):
            continue
        is_folder = name.endswith(("_path", "_dir"))
        own = f"{getattr(group, name).rstrip('/')}/{job}" if is_folder else f"{getattr(group, name)}-{job}"
        setattr(group, name, own)
        logger.info("job %d of the sweep: %s=%s", job, key, own)
