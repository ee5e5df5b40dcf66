"""What `vllm_server` keeps out of the log; `test_vllm_server.py` has the real engine."""

import logging
import sys

from skyrl.backends.skyrl_train.inference_servers.vllm_server import is_no_expected_end


def record_of(error: Exception) -> logging.LogRecord:
    try:
        raise error
    except Exception:  # noqa: BLE001 - whatever was given
        return logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())


def test_only_the_end_of_the_engine_is_left_out():
    class EngineDeadError(Exception):
        """Named like vLLM's."""

    assert not is_no_expected_end(record_of(EngineDeadError()))
    assert is_no_expected_end(record_of(ValueError()))
    assert is_no_expected_end(logging.LogRecord("x", logging.ERROR, "f", 1, "m", (), None))
