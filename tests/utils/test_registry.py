"""Names, origins, and how users' functions travel."""

import functools
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl.algorithms.policy_losses import PolicyLossRegistry, register_policy_loss
from skyrl.algorithms.registries import repopulate_all_registries, sync_registries
from skyrl.config.rules.methods import ESTIMATORS
from skyrl.errors import ConfigError
from skyrl.utils.registry import Registry

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Traits:
    colour: str = "red"


def built_in():
    return "built in"


def other():
    return "other"


built_in.__module__ = "skyrl.errors"  # stands for a function that the library defines


def make_registry(home="skyrl.errors"):
    return Registry("thing", home=home, default_traits=Traits())


def test_a_name_is_registered_once():
    registry = make_registry()
    registry.register("a", other)
    with pytest.raises(ValueError, match="thing 'a' is already registered"):
        registry.register("a", other)
    registry.unregister("a")
    registry.register("a", other, traits=Traits("blue"))
    assert registry.get("a") is other
    assert registry.traits("a").colour == "blue"
    assert "a" in registry


def test_an_enum_stands_for_its_value():
    class Names(StrEnum):
        A = "alpha"

    registry = make_registry()
    registry.register(Names.A, other)
    assert registry.get("alpha") is registry.get(Names.A) is other


def test_an_unknown_name_lists_the_others():
    registry = make_registry()
    registry.register("alpha", other)
    registry.register("beta", other)
    with pytest.raises(ConfigError, match=r"unknown thing 'alpah'\. Did you mean 'alpha'\? Available: alpha, beta"):
        registry.get("alpah")
    with pytest.raises(ValueError, match=r"'gamma' is not registered; available: alpha, beta"):
        registry.unregister("gamma")


def test_a_built_in_is_replaced_only_after_unregister():
    registry = make_registry()
    registry.register("a", built_in)
    with pytest.raises(ValueError, match="already registered"):
        registry.register("a", other)
    registry.unregister("a")
    registry.register("a", other)
    assert registry.get("a") is other
    registry.repopulate_registry()
    assert registry.get("a") is other


def test_a_name_that_only_ours_has_is_replaced_with_a_warning(caplog):
    registry = make_registry()
    registry.register("reinforce", built_in, replaceable=True)
    registry.register("reinforce", other)
    assert registry.get("reinforce") is other
    assert "built-in thing 'reinforce' is replaced" in caplog.text
    with pytest.raises(ValueError, match="already registered"):
        registry.register("reinforce", other)


def test_reset_forgets_all_and_repopulate_brings_built_ins_back():
    registry = make_registry()
    registry.register("ours", built_in)
    registry.register("mine", other)
    registry.reset()
    assert registry.list_available() == []
    registry.sync_with_actor()
    assert registry.list_available() == ["ours"]


def test_the_library_s_registries_are_completed():
    try:
        PolicyLossRegistry.unregister("regular")
        AdvantageEstimatorRegistry.reset()
        repopulate_all_registries()
        assert "regular" in PolicyLossRegistry
        assert set(AdvantageEstimatorRegistry.list_available()) == {*ESTIMATORS}
        PolicyLossRegistry.unregister("regular")
        sync_registries()
        assert "regular" in PolicyLossRegistry
    finally:
        repopulate_all_registries()


def test_only_users_functions_travel_and_the_sender_wins():
    sender, receiver = make_registry(), make_registry()
    sender.register("ours", built_in)
    offset = 41
    sender.register("mine", lambda: offset + 1, traits=Traits("blue"))
    receiver.register("mine", other)
    exported = sender.export_user_entries()
    assert exported.keys() == {"mine"}
    receiver.import_user_entries(exported)
    assert receiver.get("mine")() == 42
    assert receiver.traits("mine") == Traits("blue")


def test_what_was_shipped_can_be_registered_here_and_shipped_on():
    """The decorator of a user's module runs in the worker, too, after the function arrived."""
    sender, middle, last = make_registry(), make_registry(), make_registry()
    sender.register("mine", lambda: "sent")
    middle.import_user_entries(sender.export_user_entries())
    last.import_user_entries(middle.export_user_entries())
    assert last.get("mine")() == "sent"
    middle.register("mine", other)
    assert middle.get("mine")() == "other"


def test_a_function_that_cannot_travel_is_named():
    lock = threading.Lock()
    registry = make_registry()
    registry.register("locked", lambda: lock)
    with pytest.raises(ConfigError, match="thing 'locked' cannot travel to the workers"):
        registry.export_user_entries()


def test_an_object_without_a_module_can_be_registered():
    registry = make_registry()
    registry.register("partial", functools.partial(sum, [1, 2]))
    receiver = make_registry()
    receiver.import_user_entries(registry.export_user_entries())
    assert receiver.get("partial")() == 3


def test_the_decorator_of_a_loss_keeps_its_flags():
    @register_policy_loss("flagged", needs_old_logprobs=False, needs_rollout_logprobs=True)
    def loss(log_probs, old_log_probs, advantages):
        return log_probs.sum()

    try:
        traits = PolicyLossRegistry.traits("flagged")
        assert (traits.needs_old_logprobs, traits.needs_rollout_logprobs) == (False, True)
        assert PolicyLossRegistry.traits("regular").needs_old_logprobs
    finally:
        PolicyLossRegistry.unregister("flagged")


@pytest.mark.parametrize("name", [None, 3, ""])
def test_a_name_is_a_text(name):
    registry = make_registry()
    with pytest.raises(ConfigError, match="must be a text that is not empty"):
        registry.register(name, other)
    with pytest.raises(ConfigError, match="must be a text that is not empty"):
        registry.get(name)


def test_a_decorator_without_parentheses_is_refused():
    def mine(log_probs, old_log_probs, advantages):
        return log_probs.sum()

    with pytest.raises(ConfigError, match=r'needs a name in parentheses before mine, such as \("mine"\)'):
        register_policy_loss(mine)


async def asynchronous(log_probs, old_log_probs, advantages):
    return log_probs.sum()


def yielding(log_probs, old_log_probs, advantages):
    yield log_probs.sum()


async def both(log_probs, old_log_probs, advantages):
    yield log_probs.sum()


class AsyncObject:
    async def __call__(self, log_probs, old_log_probs, advantages):
        return log_probs.sum()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (asynchronous, "an async function"),
        (functools.partial(asynchronous), "an async function"),
        (AsyncObject(), "an async function"),
        (yielding, "a generator"),
        (both, "an async generator"),
        (3, "must be a function, got 3"),
        (
            lambda log_probs, advantages: 0,
            r"takes \(log_probs, advantages\), but .*too many positional",
        ),
        (lambda a, b, c, cfg: 0, "missing a required argument: 'cfg'"),
    ],
)
def test_what_could_not_be_called_as_a_loss_is_refused_at_registration(function, text):
    with pytest.raises(ConfigError, match=text):
        register_policy_loss("bad")(function)
    assert "bad" not in PolicyLossRegistry


def test_a_wrapper_of_a_built_in_and_another_name_for_one_are_the_users():
    @functools.wraps(built_in)
    def wrapper():
        return built_in() + ", wrapped"

    registry = make_registry()
    registry.register("ours", built_in)
    registry.register("alias", built_in)
    registry.register("wrapper", wrapper)
    assert [name for name in registry.list_available() if registry.is_built_in(name)] == ["ours"]
    receiver = make_registry()
    receiver.import_user_entries(registry.export_user_entries())
    assert receiver.get("wrapper")() == "built in, wrapped"
    assert receiver.list_available() == ["alias", "wrapper"]


SCRIPT = """
    import pickle, sys
    import my_package.losses            # a module beside the script registers one
    import my_scale                     # ... and uses another module beside it
    from skyrl.algorithms.advantages import register_advantage_estimator
    from skyrl.algorithms.registries import export_user_functions

    class Doubler:
        def __call__(self, x):
            return x * my_scale.FACTOR

    @register_advantage_estimator("in_script")
    def in_script(token_level_rewards, **kwargs):
        return Doubler()(token_level_rewards), token_level_rewards

    pickle.dump(export_user_functions(), open(sys.argv[1], "wb"))
"""
MODULE = """
    import functools
    import torch
    from skyrl.algorithms.policy_losses import register_policy_loss
    from my_scale import scaled

    @register_policy_loss("in_module", needs_old_logprobs=False)
    def in_module(log_probs, old_log_probs, advantages, config, loss_mask=None):
        return scaled(torch.where(loss_mask.bool(), log_probs * advantages, 0.0)).sum()

    def tuned(log_probs, old_log_probs, advantages, *, factor):
        return factor * scaled(log_probs).sum()

    register_policy_loss("in_partial")(functools.partial(tuned, factor=3))
"""
SCALE = """
    FACTOR = 2

    def scaled(x):
        return x * FACTOR
"""
WORKER = """
    import pickle, sys
    import torch
    from skyrl.algorithms.advantages import compute_advantages_and_returns
    from skyrl.algorithms.policy_losses import PolicyLossRegistry, compute_policy_loss
    from skyrl.algorithms.registries import import_user_functions
    from skyrl.config.algorithm import AlgorithmConfig

    import_user_functions(pickle.load(open(sys.argv[1], "rb")))
    ones = torch.ones(2, 3)
    config = AlgorithmConfig()
    loss, _ = compute_policy_loss("in_module", log_probs=ones, old_log_probs=None, advantages=ones, config=config,
                                  loss_mask=ones)
    advantages, _ = compute_advantages_and_returns(ones, ones, ["a", "b"], "in_script", config)
    tuned, _ = compute_policy_loss("in_partial", log_probs=ones, old_log_probs=ones, advantages=ones, config=config)
    assert not PolicyLossRegistry.traits("in_module").needs_old_logprobs
    assert not any(name.startswith("my_") for name in sys.modules)
    print(loss.item(), advantages.sum().item(), tuned.item())
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_functions_of_a_script_arrive_where_the_script_cannot_be_imported(tmp_path, as_module):
    user, elsewhere = tmp_path / "user", tmp_path / "elsewhere"
    (user / "my_package").mkdir(parents=True)
    elsewhere.mkdir()
    (user / "my_package" / "__init__.py").touch()
    for path, text in {
        user / "my_package" / "main.py": SCRIPT,
        user / "main.py": SCRIPT,
        user / "my_package" / "losses.py": MODULE,
        user / "my_scale.py": SCALE,
        elsewhere / "worker.py": WORKER,
    }.items():
        path.write_text(textwrap.dedent(text))
    shipped = tmp_path / "shipped.pkl"
    driver = ["-m", "my_package.main"] if as_module else ["main.py"]
    env = {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, *driver, str(shipped)], cwd=user, env=env, check=True, timeout=120)
    worker = subprocess.run(
        [sys.executable, "worker.py", str(shipped)],
        cwd=elsewhere, env=env, check=True, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert worker.stdout.split() == ["12.0", "12.0", "36.0"]
