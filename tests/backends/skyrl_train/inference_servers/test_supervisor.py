import threading
import time

from skyrl.backends.skyrl_train.inference_servers import supervisor as module
from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth
from skyrl.backends.skyrl_train.inference_servers.supervisor import ServerSupervisor


def start_polling(monkeypatch, num_servers, poll):
    """A supervisor whose actors never end and whose health requests are ``poll``."""
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "wait", lambda refs, **options: ([], refs))
    monkeypatch.setattr(module, "answers_health", poll)
    health = ServerHealth()
    watches = {f"http://{number}": object() for number in range(num_servers)}
    supervisor = ServerSupervisor(watches, health, interval_s=0.0, max_misses=1)
    supervisor.start()
    return supervisor, health


def test_stopping_does_not_wait_for_a_health_request_that_hangs(monkeypatch):
    monkeypatch.setattr(module, "JOIN_TIMEOUT_S", 0.05)
    asked, release = threading.Event(), threading.Event()

    def hang(url, timeout_s):
        asked.set()
        release.wait(30)
        return False

    supervisor, health = start_polling(monkeypatch, 1, hang)
    assert asked.wait(5)
    began = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - began < 5
    release.set()
    supervisor._thread.join(5)
    assert not supervisor._thread.is_alive()
    health.raise_if_dead()  # what it found after the stop is not recorded


def test_stopping_in_the_middle_of_a_round_asks_no_further_server(monkeypatch):
    asked, release = [], threading.Event()
    first = threading.Event()

    def poll(url, timeout_s):
        asked.append(url)
        first.set()
        release.wait(30)
        return True

    supervisor, _ = start_polling(monkeypatch, 3, poll)
    assert first.wait(5)
    supervisor._stop.set()
    release.set()
    supervisor.stop()
    assert not supervisor._thread.is_alive()
    assert asked == ["http://0"]


def test_a_supervisor_that_never_started_can_be_stopped():
    ServerSupervisor({}, ServerHealth()).stop()
