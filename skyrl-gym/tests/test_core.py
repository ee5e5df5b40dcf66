import pytest

from skyrl_gym.core import Env


class Closing(Env):
    closed = 0

    def close(self):
        self.closed += 1


def test_an_environment_without_init_or_step_says_so():
    with pytest.raises(NotImplementedError, match="Closing must define init"):
        Closing().init()
    with pytest.raises(NotImplementedError, match="Closing must define step"):
        Closing().step("x")


def test_text_form_names_the_class():
    assert str(Closing()) == "Env(Closing)"


def test_context_manager_closes_and_lets_the_exception_pass():
    env = Closing()
    with pytest.raises(KeyError), env as entered:
        assert entered is env
        raise KeyError("x")
    assert env.closed == 1
