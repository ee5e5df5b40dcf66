import pytest
from omegaconf import OmegaConf

import skyrl_gym
from skyrl_gym import error
from skyrl_gym.core import Env
from skyrl_gym.envs.registration import EnvSpec, deregister, load_env_creator, make, pprint_registry, register, spec


class Plain(Env):
    def __init__(self, size=1, names=None):
        self.size, self.names = size, names


@pytest.fixture
def plain():
    register(id="plain", entry_point=Plain, kwargs={"names": ["a"]}, force=True)
    yield
    deregister("plain")


def test_make_merges_kwargs_and_keeps_the_entry_untouched(plain):
    env = make("plain", size=3)
    env.names.append("b")
    assert (env.size, env.spec.id, env.spec.kwargs["size"]) == (3, "plain", 3)
    assert spec("plain").kwargs == {"names": ["a"]}


def test_make_takes_an_entry_too():
    assert make(EnvSpec("inline", Plain, {"size": 2})).size == 2
    assert EnvSpec("inline", Plain).make(size=4).size == 4


def test_registering_twice_is_an_error_unless_forced(plain):
    with pytest.raises(error.RegistrationError, match="'plain' is registered already"):
        register(id="plain", entry_point=Plain)
    register(id="plain", entry_point=Plain, force=True)


def test_an_entry_point_is_required():
    with pytest.raises(AssertionError):
        register(id="none")
    with pytest.raises(error.Error, match="no entry point"):
        make(EnvSpec("none"))


def test_unknown_ids_are_errors():
    for call in (spec, make, deregister):
        with pytest.raises(error.Error, match="'nope' is not registered"):
            call("nope")


def test_a_wrong_argument_names_the_environment_and_keeps_the_cause(plain):
    with pytest.raises(TypeError, match=r"'plain' could not be made with .*'colour'") as caught:
        make("plain", colour="red")
    assert isinstance(caught.value.__cause__, TypeError)


def test_something_else_than_an_environment_is_refused():
    with pytest.raises(TypeError, match="made a int, not an Env"):
        make(EnvSpec("odd", lambda: 1))


def test_json_round_trip():
    entry = EnvSpec("gsm8k", "skyrl_gym.envs.gsm8k.env:GSM8kEnv", {"n": 1})
    assert EnvSpec.from_json(entry.to_json()) == entry
    with pytest.raises(ValueError, match="callable"):
        EnvSpec("x", Plain).to_json()
    with pytest.raises(ValueError, match="not an environment entry"):
        EnvSpec.from_json('{"nope": 1}')


def test_pprint_returns_or_prints(capsys):
    entries = {name: EnvSpec(name, Plain) for name in ("b", "a", "long", "d")}
    assert pprint_registry(entries, disable_print=True) == "a    b    d\nlong"
    assert pprint_registry(entries) is None
    assert capsys.readouterr().out == "a    b    d\nlong\n"
    assert EnvSpec("a", "m:f").pprint(disable_print=True, include_entry_points=True) == "id=a\nentry_point=m:f"


def test_bundled_environments_are_registered():
    assert "gsm8k" in skyrl_gym.registry
    assert load_env_creator("skyrl_gym.envs.gsm8k.env:GSM8kEnv").__name__ == "GSM8kEnv"


@pytest.mark.parametrize("wrap", [OmegaConf.create, dict])
def test_configs_of_either_kind_reach_the_environment(wrap):
    env = skyrl_gym.make("gsm8k", env_config=wrap({"a": 1}), extras={"reward_spec": {"ground_truth": 3}})
    assert env.ground_truth == "3"
