"""One handler, a level from the environment, quiet third parties."""

import io
import logging
import re

import pytest

from skyrl.utils.log import configure_logging, resolve_level


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def untouched_root_logger(monkeypatch):
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    third_party = {name: logging.getLogger(name).level for name in ("httpx", "urllib3")}
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in third_party.items():
        logging.getLogger(name).setLevel(old)


def test_plain_lines_carry_level_module_and_message():
    stream = io.StringIO()
    configure_logging(stream=stream)
    logging.getLogger("skyrl.trainer").info("step %s", 3)
    (line,) = stream.getvalue().splitlines()
    assert "INFO" in line and "skyrl.trainer" in line and line.endswith("step 3")
    assert "\x1b" not in line


def test_a_second_call_replaces_the_first_handler():
    first, second = io.StringIO(), io.StringIO()
    configure_logging(stream=first)
    configure_logging(stream=second)
    logging.getLogger("skyrl").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_the_level_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "warning")
    stream = io.StringIO()
    configure_logging(stream=stream)
    logging.getLogger("skyrl").info("hidden")
    logging.getLogger("skyrl").warning("shown")
    assert "hidden" not in stream.getvalue() and "shown" in stream.getvalue()


def test_third_parties_speak_from_warning_on():
    stream = io.StringIO()
    configure_logging(stream=stream)
    logging.getLogger("httpx").info("POST /generate")
    logging.getLogger("urllib3").warning("retrying")
    assert "POST" not in stream.getvalue() and "retrying" in stream.getvalue()


def test_a_terminal_gets_the_rich_handler_and_brackets_stay_text():
    stream = Terminal()
    configure_logging(stream=stream)
    logging.getLogger("skyrl").info("range [1, 2] of [bold]text[/bold]")
    written = stream.getvalue()
    assert "\x1b[" in written
    assert "range [1, 2] of [bold]text[/bold]" in re.sub(r"\x1b\[[0-9;]*m", "", written)


def test_an_unknown_level_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"LOG_LEVEL='loud'.*WARNING"):
        resolve_level("loud")
