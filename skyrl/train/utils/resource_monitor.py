"""``ray/*`` metrics: memory of every node and use of its GPUs, sampled in a thread."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

logger = logging.getLogger(__name__)

_GIB = 2**30
_SAMPLE_S = 5.0
_READ_TIMEOUT_S = 5.0
_SMI = ("--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_LINE = re.compile(r"^(ray_node_[a-z_]+)\{([^}]*)\}\s+(\S+)", re.MULTILINE)
_GPU_INDEX = re.compile(r'GpuIndex="(\d+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """One GPU at one moment, e.g. ``GpuUsage(util=87.0, mem_used_gb=31.5)``."""

    util: float
    """Percent of time with a kernel running."""
    mem_used_gb: float
    """GiB in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUsage:
    """One node at one moment."""

    ram_used_gb: float
    """GiB of main memory in use."""
    gpus: tuple[GpuUsage, ...] = ()
    """Its GPUs by index."""


Source = Callable[[], NodeUsage]


class ResourceMonitor:
    """Samples every node each five seconds; `flush` returns the means since the last one.

    Args:
        sources: one reader per node, in node order.
        interval_s: seconds between samples.
    """

    def __init__(self, sources: Sequence[Source], interval_s: float = _SAMPLE_S) -> None:
        self._sources = list(sources)
        self._interval_s = interval_s
        self._samples: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._silent: set[int] = set()

    def start(self) -> None:
        """Begin to sample; a second call does nothing."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="resource-monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            thread.join(timeout=2 * _READ_TIMEOUT_S)

    def flush(self) -> dict[str, float]:
        """Means of all samples since the last flush: ``ray/node.0.cpu_ram_used_gb``, ``ray/gpu.util.avg``, ..."""
        if not self._samples:
            self._sample()
        with self._lock:
            samples, self._samples = self._samples, {}
        return {name: sum(values) / len(values) for name, values in sorted(samples.items())}

    def _run(self) -> None:
        while True:
            self._sample()
            if self._stopping.wait(self._interval_s):
                return

    def _sample(self) -> None:
        # Reading may take seconds: the lock is only for adding.
        read = [(node, usage) for node in range(len(self._sources)) if (usage := self._read(node)) is not None]
        with self._lock:
            for node, usage in read:
                self._add(node, usage)

    def _read(self, node: int) -> NodeUsage | None:
        try:
            return self._sources[node]()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if node not in self._silent:
                self._silent.add(node)
                logger.warning("Resources of node %d cannot be read: %s", node, error)
            return None

    def _add(self, node: int, usage: NodeUsage) -> None:
        values = [
            (f"ray/node.{node}.cpu_ram_used_gb", usage.ram_used_gb),
            ("ray/cpu_ram_used_gb.avg", usage.ram_used_gb),
        ]
        for index, gpu in enumerate(usage.gpus):
            for name, value in (("util", gpu.util), ("mem_used_gb", gpu.mem_used_gb)):
                values += [(f"ray/node.{node}.gpu.{index}.{name}", value), (f"ray/gpu.{name}.avg", value)]
        for name, value in values:
            self._samples.setdefault(name, []).append(value)


def cluster_sources() -> list[Source]:
    """Readers of all live nodes of the Ray cluster: this process's node first, the others by address."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    others = sorted((node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes if node["NodeID"] != own)
    return [local_usage, *(endpoint_source(f"http://{address}:{port}/metrics") for address, port in others)]


def local_usage() -> NodeUsage:
    """Use of this machine; GPUs are read from ``nvidia-smi`` if it is installed."""
    smi = shutil.which("nvidia-smi")
    gpus: tuple[GpuUsage, ...] = ()
    if smi is not None:
        answer = subprocess.run([smi, *_SMI], capture_output=True, text=True, timeout=_READ_TIMEOUT_S, check=True)
        gpus = parse_smi(answer.stdout)
    return NodeUsage(ram_used_gb=psutil.virtual_memory().used / _GIB, gpus=gpus)


def parse_smi(text: str) -> tuple[GpuUsage, ...]:
    """GPUs in nvidia-smi's CSV of utilisation in percent and memory in MiB; a value it does not know counts as 0."""
    gpus = []
    for line in text.strip().splitlines():
        util, memory = (_number(field) for field in line.split(","))
        gpus.append(GpuUsage(util=util, mem_used_gb=memory / 1024))
    return tuple(gpus)


def endpoint_source(url: str) -> Source:
    """Reader of another node's metrics page, which its Ray agent serves."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read() -> NodeUsage:
        with opener.open(url, timeout=_READ_TIMEOUT_S) as answer:
            return parse_metrics_page(answer.read().decode())

    return read


def parse_metrics_page(text: str) -> NodeUsage:
    """Use of a node from its Ray agent's Prometheus text (bytes of memory, percent and MiB of GPUs).

    Raises:
        ValueError: The page has no memory metric.
    """
    memory: float | None = None
    utils: dict[int, float] = {}
    used: dict[int, float] = {}
    for name, labels, value in _LINE.findall(text):
        index = _GPU_INDEX.search(labels)
        if name == "ray_node_mem_used":
            memory = float(value)
        elif name == "ray_node_gpus_utilization" and index:
            utils[int(index[1])] = float(value)
        elif name == "ray_node_gram_used" and index:
            used[int(index[1])] = float(value)
    if memory is None:
        raise ValueError("the metrics page has no ray_node_mem_used")
    gpus = tuple(
        GpuUsage(util=utils.get(index, 0.0), mem_used_gb=used.get(index, 0.0) / 1024)
        for index in sorted(utils.keys() | used.keys())
    )
    return NodeUsage(ram_used_gb=memory / _GIB, gpus=gpus)


def _number(field: str) -> float:
    try:
        return float(field)
    except ValueError:
        return 0.0
