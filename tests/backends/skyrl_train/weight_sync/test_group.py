import pytest

from skyrl import env_vars
from skyrl.backends.skyrl_train.weight_sync.group import Rendezvous, address_towards, join_store, trainer_address


def test_one_node_meets_on_the_loopback():
    assert trainer_address(["http://127.0.0.1:8000", "http://localhost:8100"]) == "127.0.0.1"
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"


def test_the_environment_variable_wins(monkeypatch):
    monkeypatch.setattr(env_vars, "SKYRL_WEIGHT_SYNC_HOST", "10.1.2.3")
    assert trainer_address(["http://127.0.0.1:8000"]) == "10.1.2.3"


def test_missing_ranks_are_known_before_the_group_is():
    meeting = Rendezvous("127.0.0.1", 4, 5)
    assert meeting.missing_ranks() == [1, 2, 3]
    store = join_store("127.0.0.1", meeting.port, 2, 4, 5)
    assert meeting.missing_ranks() == [1, 3]
    del store


def test_every_meeting_has_a_port_of_its_own():
    first, second = Rendezvous("127.0.0.1", 2, 5), Rendezvous("127.0.0.1", 2, 5)
    assert first.port != second.port


def test_an_address_of_another_machine_cannot_be_bound():
    with pytest.raises(OSError, match=r"assign|bind"):
        Rendezvous("192.0.2.1", 2, 5)
