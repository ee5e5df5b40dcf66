import pytest

from skyrl.errors import ConfigError, DatasetError
from skyrl.train.generators.env_check import check_environments
from tests.fakes.environments import EnvScript, registered


def test_known_names_pass():
    with registered(EnvScript()):
        check_environments("gsm8k", [("row 1", None), ("row 2", "scripted")])
        check_environments(None, [("row 1", "scripted")])


def test_an_unknown_default_is_a_config_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match=r"environment\.env_class=gsm8: must be one of gsm8k.*did you mean gsm8k\?"):
        check_environments("gsm8", [])


def test_an_unknown_name_in_the_data_is_named_by_its_row():
    rows = [("rows.jsonl, row 1, column 'env_class'", None), ("rows.jsonl, row 2, column 'env_class'", "gsm9k")]
    with pytest.raises(DatasetError, match=r"rows\.jsonl, row 2, column 'env_class': no environment 'gsm9k'.*gsm8k\?"):
        check_environments("gsm8k", rows)


def test_a_row_without_a_name_needs_a_default():
    with pytest.raises(ConfigError, match=r"environment\.env_class=null, and row 1 names no environment"):
        check_environments(None, [("row 1", None)])
