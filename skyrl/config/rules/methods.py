"""What the rules must know about estimators and losses: a table of the built-in ones, which needs no torch.

The registries of ``skyrl.algorithms`` hold the same facts as traits; a test keeps both equal. Facts about a user's
function come from its registration (``skyrl.train.validate``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from skyrl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorFacts:
    """What an advantage estimator needs of a run.

    Example:
        >>> ESTIMATORS["gae"].needs_values
        True
    """

    outcome: bool = True
    """It gives a whole row one advantage, from the sum of the row's rewards."""
    needs_values: bool = False
    """It reads a critic's values."""
    needs_baseline: bool = False
    """It reads the score of one more, greedy rollout."""
    zero_alone: bool = False
    """A row without others of its prompt gets advantage 0."""
    takes_kl: bool = True
    """The KL penalty in the rewards means to it what it means to the sum of the rewards."""
    takes_punishment: bool = True
    """It reads the rewards after the punishment of long responses."""
    bare_alone: bool = False
    """A row without others of its prompt gets its reward as its advantage, without a baseline."""
    learns_from_equal_sums: bool = False
    """It compares in the group, or with a rollout of the prompt, but may give advantages where all sums are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """What a policy loss needs of a run, under the settings at hand.

    Example:
        >>> loss_facts(AlgorithmConfig(policy_loss_type="rollout_is")).anchored
        True
    """

    needs_rollout_logprobs: bool = False
    """It cannot do without the sampler's log-probs."""
    correctable: bool = True
    """Off-policy corrections apply to it."""
    anchored: bool = False
    """Its ratio is that to the sampler already, so truncated importance sampling would count it twice."""
    corrects_itself: bool = False
    """A user's loss without the keyword ``loss_weights``: nobody corrects it from outside."""
    reads_head: bool = False
    """It reads the sampler's head, so score centering applies to it."""


ESTIMATORS: Mapping[str, EstimatorFacts] = MappingProxyType(
    {
        "grpo": EstimatorFacts(bare_alone=True),
        "gae": EstimatorFacts(outcome=False, needs_values=True),
        "rloo": EstimatorFacts(zero_alone=True),
        "reinforce++": EstimatorFacts(outcome=False),
        "maxrl": EstimatorFacts(bare_alone=True),
        "opo": EstimatorFacts(zero_alone=True),
        "remax": EstimatorFacts(needs_baseline=True, learns_from_equal_sums=True),
        "gpg": EstimatorFacts(zero_alone=True),
        "pass_at_k": EstimatorFacts(takes_kl=False),  # it only asks whether the sum is above 0
        "liteppo": EstimatorFacts(zero_alone=True),
        "gdpo": EstimatorFacts(  # reads components alone
            zero_alone=True, takes_kl=False, takes_punishment=False, learns_from_equal_sums=True
        ),
        "turn_level": EstimatorFacts(outcome=False, zero_alone=True, learns_from_equal_sums=True),
        "no_op": EstimatorFacts(outcome=False),
    }
)
"""Built-in names of ``trainer.algorithm.advantage_estimator``."""

LOSSES = (
    *("regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo", "clip_cov", "kl_cov"),
    *("cross_entropy", "importance_sampling", "reinforce"),
)
"""Built-in names of ``trainer.algorithm.policy_loss_type``."""
CENTERED_LOSSES = ("rollout_is", "reinforce")
"""Those that read the sampler's head."""


def loss_facts(algorithm: AlgorithmConfig) -> LossFacts:
    """Return the facts of a built-in loss under these settings."""
    name = algorithm.policy_loss_type
    by_rollout = name == "cispo" and algorithm.cispo.cispo_anchor == "rollout"
    return LossFacts(
        needs_rollout_logprobs=by_rollout or name == "rollout_is",
        correctable=name not in {"clip_cov", "kl_cov"},
        anchored=by_rollout or name in {"rollout_is", "dppo"},
        reads_head=name in CENTERED_LOSSES,
    )
