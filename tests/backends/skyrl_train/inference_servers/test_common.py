import socket

import pytest

from skyrl.backends.skyrl_train.inference_servers import common
from skyrl.errors import ResourceError


def test_urls_of_both_address_families():
    assert common.ServerInfo("10.0.0.1", 8000).url == "http://10.0.0.1:8000"
    assert common.ServerInfo("::1", 80).url == "http://[::1]:80"


def test_reserved_ports_are_distinct_and_skip_taken_ones():
    start = 23100
    first, kept = common.find_and_reserve_port(start)
    second, also_kept = common.find_and_reserve_port(start)
    assert start <= first < second < start + 100
    with kept, also_kept, socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            rival.bind((common.LOOPBACK, first))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((common.LOOPBACK, first), timeout=1)


def test_a_full_window_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(common, "PORT_WINDOW", 1)
    port, kept = common.find_and_reserve_port(23300)
    with kept, pytest.raises(ResourceError, match=f"ports {port} to {port}"):
        common.find_and_reserve_port(port)


def test_without_ray_the_node_is_the_loopback():
    assert common.get_node_ip() == "127.0.0.1"
