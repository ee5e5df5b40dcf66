import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest

from skyrl.backends.skyrl_train.inference_servers import vllm_engine_process
from skyrl.backends.skyrl_train.inference_servers.vllm_engine_process import EngineThreads
from tests.fakes.processes import eventually, is_gone


def run(target, **kwargs):
    threads = EngineThreads()
    thread = threads.Process(target=target, name="EngineCore", kwargs=kwargs)
    thread.start()
    return threads, thread


def fail(error):
    raise error


@pytest.mark.parametrize(("error", "code"), [(None, 0), (SystemExit(), 0), (SystemExit(3), 3), (RuntimeError("x"), 1)])
def test_the_end_of_the_thread_is_an_exit_code_and_a_readable_sentinel(error, code):
    threads, thread = run(fail if error else (lambda error: None), error=error)
    multiprocessing.connection.wait([thread.sentinel], timeout=5)
    thread.join(5)
    assert select.select([thread.sentinel], [], [], 0)[0]
    assert thread.exitcode == code
    assert threads.failure() is (error if isinstance(error, RuntimeError) else None)
    read_end = thread.sentinel
    for _ in range(2):
        threads.close(timeout_s=1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_end)


def test_a_thread_that_still_runs_keeps_its_sentinel():
    release = threading.Event()
    threads, thread = run(release.wait)
    threads.close(timeout_s=0.01)
    os.fstat(thread.sentinel)
    release.set()
    threads.close(timeout_s=5)
    assert thread.sentinel == -1


def test_terminate_calls_the_handler_that_the_thread_asked_for():
    stop, ready = threading.Event(), threading.Event()
    signals = vllm_engine_process._ThreadSignals()

    def engine():
        signals.signal(signals.SIGTERM, lambda *_: stop.set())
        ready.set()
        stop.wait(5)

    before = signal.getsignal(signal.SIGTERM)
    _, thread = run(engine)
    assert ready.wait(5)
    assert thread.is_alive()
    thread.terminate()
    thread.join(5)
    assert not thread.is_alive()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_guarded_child_dies_with_its_parent(tmp_path):
    script = textwrap.dedent(
        """
        import multiprocessing, os, time
        from skyrl.backends.skyrl_train.inference_servers import vllm_engine_process as module

        def engine():
            print(os.getpid(), flush=True)
            time.sleep(60)

        if __name__ == "__main__":
            context = module._GuardedContext(multiprocessing.get_context("spawn"))
            context.Process(target=engine, name="child", kwargs={}).start()
            time.sleep(60)
        """
    )
    path = tmp_path / "parent.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, env=environment)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: is_gone(child))


def test_a_reused_process_id_is_not_the_same_process():
    me = psutil.Process()
    assert vllm_engine_process.is_running(me.pid, me.create_time())
    assert not vllm_engine_process.is_running(me.pid, me.create_time() - 100)
