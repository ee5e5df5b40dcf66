"""Rules of the off-policy correction: which losses it applies to, and what it needs of the engine."""

from __future__ import annotations

import logging

from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl.config.derive import corrects_off_policy
from skyrl.config.rules.methods import LossFacts
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

_KEY = "trainer.algorithm"
_CORRECTION = f"{_KEY}.off_policy_correction"
_LOGPROBS = "generator.sampling_params.logprobs"
_SWITCHES = (
    *("tis_ratio_type", "sequence_mask_metric"),
    *("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
    *("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
)


def check_correction(algorithm: AlgorithmConfig, facts: LossFacts, *, logprobs: int | None) -> None:
    """Check the loss and its correction against each other, and that there are log-probs of the sampler.

    Args:
        algorithm: `trainer.algorithm`.
        facts: Of the chosen loss.
        logprobs: `generator.sampling_params.logprobs`.

    Raises:
        ConfigError: the loss cannot be corrected, would be corrected twice, or has nothing to compare with.
    """
    correction = algorithm.off_policy_correction
    loss = f"{_KEY}.policy_loss_type={algorithm.policy_loss_type}"
    active = corrects_off_policy(correction)
    if active and not facts.correctable:
        raise ConfigError(
            f"{loss} does not work with an off-policy correction ({_first_switch(correction)}); set it to null or "
            "choose another loss, such as regular"
        )
    if facts.anchored and correction.tis_ratio_type is not None:
        anchor = f" with {_KEY}.cispo.cispo_anchor=rollout" if algorithm.policy_loss_type == "cispo" else ""
        raise ConfigError(
            f"{loss}{anchor} weighs tokens by their ratio to the sampler already, and "
            f"{_CORRECTION}.tis_ratio_type={correction.tis_ratio_type} would do so twice; set it to null (masks still "
            "work)"
        )
    if logprobs is None and (active or facts.needs_rollout_logprobs):
        need = _first_switch(correction) if active else loss
        raise ConfigError(f"{need} needs the sampler's log-probs, but {_LOGPROBS}=null; set {_LOGPROBS}=1")
    if active and facts.corrects_itself:
        logger.warning(
            "%s takes no loss_weights, so %s does not reach it: name that keyword, or call "
            "apply_off_policy_correction inside the loss",
            loss,
            _first_switch(correction),
        )


def _first_switch(correction: OffPolicyCorrectionConfig) -> str:
    name = next(name for name in _SWITCHES if getattr(correction, name) is not None)
    return f"{_CORRECTION}.{name}={getattr(correction, name)}"
