"""Samples are averaged between flushes, a dead node is skipped, the thread ends."""

import subprocess
import threading
import time

import pytest

from skyrl.train.utils import resource_monitor
from skyrl.train.utils.resource_monitor import (
    GpuUsage,
    NodeUsage,
    ResourceMonitor,
    local_usage,
    parse_metrics_page,
    parse_smi,
)


def readings(*usages):
    """A source that gives one usage after another and then repeats the last."""
    left = list(usages)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_metrics_are_means_over_samples_gpus_and_nodes():
    first = readings(
        NodeUsage(ram_used_gb=10.0, gpus=(GpuUsage(util=100.0, mem_used_gb=4.0), GpuUsage(util=0.0, mem_used_gb=2.0))),
        NodeUsage(ram_used_gb=20.0, gpus=(GpuUsage(util=50.0, mem_used_gb=6.0), GpuUsage(util=0.0, mem_used_gb=2.0))),
    )
    monitor = ResourceMonitor([first, readings(NodeUsage(ram_used_gb=3.0))])
    monitor._sample()
    monitor._sample()
    assert monitor.flush() == {
        "ray/cpu_ram_used_gb.avg": pytest.approx((10 + 20 + 3 + 3) / 4),
        "ray/gpu.mem_used_gb.avg": pytest.approx((4 + 6 + 2 + 2) / 4),
        "ray/gpu.util.avg": pytest.approx(150 / 4),
        "ray/node.0.cpu_ram_used_gb": 15.0,
        "ray/node.0.gpu.0.mem_used_gb": 5.0,
        "ray/node.0.gpu.0.util": 75.0,
        "ray/node.0.gpu.1.mem_used_gb": 2.0,
        "ray/node.0.gpu.1.util": 0.0,
        "ray/node.1.cpu_ram_used_gb": 3.0,
    }


def test_a_flush_forgets_and_samples_itself_if_nothing_came_in_between():
    monitor = ResourceMonitor([readings(NodeUsage(ram_used_gb=1.0), NodeUsage(ram_used_gb=2.0))])
    assert monitor.flush()["ray/node.0.cpu_ram_used_gb"] == 1.0
    assert monitor.flush()["ray/node.0.cpu_ram_used_gb"] == 2.0


@pytest.mark.parametrize("error", [OSError("refused"), ValueError("no page"), subprocess.TimeoutExpired("smi", 5)])
def test_a_node_that_cannot_be_read_is_skipped_and_named_once(error, caplog):
    def broken():
        raise error

    monitor = ResourceMonitor([broken, readings(NodeUsage(ram_used_gb=1.0))])
    for _ in range(2):
        assert set(monitor.flush()) == {"ray/cpu_ram_used_gb.avg", "ray/node.1.cpu_ram_used_gb"}
    assert len(caplog.records) == 1 and "node 0" in caplog.text


def test_the_thread_samples_and_ends():
    before = threading.active_count()
    calls = []

    def source():
        calls.append(1)
        return NodeUsage(ram_used_gb=1.0)

    monitor = ResourceMonitor([source], interval_s=0.005)
    monitor.start()
    monitor.start()
    deadline = time.monotonic() + 10
    while len(calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    monitor.stop()
    monitor.stop()
    assert len(calls) >= 3
    assert threading.active_count() == before


def test_a_machine_without_gpus_reports_its_memory(monkeypatch):
    monkeypatch.setattr(resource_monitor.shutil, "which", lambda _: None)
    usage = local_usage()
    assert usage.ram_used_gb > 0 and usage.gpus == ()


def test_nvidia_smi_is_asked_where_it_is(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '50, 2048'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert local_usage().gpus == (GpuUsage(util=50.0, mem_used_gb=2.0),)


def test_smi_lines_become_percent_and_gib():
    assert parse_smi("87, 1024\n[N/A], 512\n") == (
        GpuUsage(util=87.0, mem_used_gb=1.0),
        GpuUsage(util=0.0, mem_used_gb=0.5),
    )
    assert parse_smi("") == ()


PAGE = """# HELP ray_node_mem_used x
# TYPE ray_node_mem_used gauge
ray_node_mem_used{SessionName="s",ip="10.0.0.2"} 2.147483648e+09
ray_node_gpus_utilization{GpuDeviceName="H200",GpuIndex="1",ip="10.0.0.2"} 25.0
ray_node_gpus_utilization{GpuDeviceName="H200",GpuIndex="0",ip="10.0.0.2"} 75.0
ray_node_gram_used{GpuIndex="0"} 4096.0
ray_node_cpu_utilization{ip="10.0.0.2"} 12.0
"""


def test_a_metrics_page_of_ray_is_read_by_gpu_index():
    assert parse_metrics_page(PAGE) == NodeUsage(
        ram_used_gb=2.0, gpus=(GpuUsage(util=75.0, mem_used_gb=4.0), GpuUsage(util=25.0, mem_used_gb=0.0))
    )


def test_a_page_without_memory_is_an_error():
    with pytest.raises(ValueError, match="ray_node_mem_used"):
        parse_metrics_page("# nothing\n")
