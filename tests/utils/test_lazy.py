"""Lazy names load on use and fail like ordinary attributes."""

import pytest

from skyrl.utils.lazy import lazy_names
from skyrl.utils.timing import Timer


def test_a_name_comes_from_its_home_and_others_do_not_exist():
    find = lazy_names("some.facade", {"Timer": "skyrl.utils.timing"})
    assert find("Timer") is Timer
    with pytest.raises(AttributeError, match=r"'some\.facade' has no attribute 'Clock'"):
        find("Clock")
