"""Keys of older recipes: mapped where a new key means the same, refused with the way out where none does."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

from skyrl.errors import ConfigError

_ENGINE = "generator.inference_engine"
_REMOVED = {f"{_ENGINE}.enable_http_endpoint", f"{_ENGINE}.override_existing_update_group"}
_ROPE_PARENTS = ("trainer", "generator", _ENGINE, f"{_ENGINE}.engine_init_kwargs")
_ROPE_KEYS = {
    *(f"{parent}.{name}" for parent in _ROPE_PARENTS for name in ("rope_scaling", "rope_theta", "rope_parameters")),
    *(f"{_ENGINE}.engine_init_kwargs.hf_overrides.{name}" for name in ("rope_scaling", "rope_theta")),
}
ROPE_ADVICE = (
    f"set the engine's rope with {_ENGINE}.engine_init_kwargs.hf_overrides.rope_parameters and the trainer's with "
    "trainer.policy.model_config_kwargs.rope_parameters (fsdp) or "
    "trainer.policy.megatron_config.transformer_config_kwargs.rope_parameters (megatron)"
)
_OVERRIDE = re.compile(r"(?P<plus>\+{0,2})(?P<key>[^=~+]+)=(?P<value>.*)\Z", re.DOTALL)


def translate_legacy(tokens: Iterable[str]) -> list[str]:
    """Replace, drop or refuse the override tokens that only older recipes hold.

    Raises:
        ConfigError: an old key has no meaning any more.
    """
    tokens = list(tokens)
    matches = [_OVERRIDE.match(token) for token in tokens]
    keys = {match["key"] for match in matches if match}
    translated = []
    for token, match in zip(tokens, matches, strict=True):
        kept = token if match is None else _translate(token, match, keys)
        if kept is not None:
            translated.append(kept)
    return translated


def _translate(token: str, match: re.Match[str], keys: set[str]) -> str | None:
    key, value = match["key"], match["value"]
    if key == f"{_ENGINE}.async_engine":
        if value.lower() == "true":
            return None
        raise ConfigError(f"{key}={value}: engines are always asynchronous; remove the key")
    if key in _REMOVED:
        raise ConfigError(f"{key} is no longer supported; remove it")
    if key == f"{_ENGINE}.remote_urls":
        raise ConfigError(
            f"{key} is no longer supported; use {_ENGINE}.external_proxy_url (generation) and "
            f"{_ENGINE}.external_server_urls (control)"
        )
    if any(key == rope or key.startswith(f"{rope}.") for rope in _ROPE_KEYS):
        raise ConfigError(f"{key} is not read; {ROPE_ADVICE}")
    if key == "trainer.use_sample_packing":
        successor = "trainer.remove_microbatch_padding"
        if successor in keys:
            raise ConfigError(f"{key} is the old name of {successor}; set only {successor}")
        warnings.warn(f"{key} is deprecated; use {successor}", DeprecationWarning, stacklevel=2)
        return f"{match['plus']}{successor}={value}"
    return token
