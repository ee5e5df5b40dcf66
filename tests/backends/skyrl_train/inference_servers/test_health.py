import pytest

from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth
from skyrl.errors import InferenceError


def test_nothing_is_raised_while_all_live():
    ServerHealth().raise_if_dead()


def test_each_death_is_told_once_with_its_first_reason():
    health, told = ServerHealth(), []
    end = health.subscribe(lambda: told.append(1))
    health.mark_dead("http://a", "killed")
    health.mark_dead("http://a", "again")
    end()
    health.mark_dead("http://b", "too")
    assert told == [1]
    with pytest.raises(InferenceError, match=r"2 inference.*a: killed; http://b: too"):
        health.raise_if_dead()
