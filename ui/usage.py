"""What workers, hosts and devices use, as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_OWNERS = (
    ("workers", "cpu_percent", "memory_bytes", ""),
    ("hosts", "host_cpu_percent", "", "host_memory_percent"),
    ("devices", "device_percent", "device_memory_bytes", "device_memory_percent"),
)
"""Who, and the names of its busy share, its bytes of memory and its share of memory."""


def format_use(name: str, value: float) -> str:
    """Return one value with its unit: ``85 %``, ``1.5 GiB``."""
    if name.endswith("_bytes"):
        return (
            f"{value / (1 << 30):.3g} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.0f} MiB"
        )
    return f"{value:.0f} %"


def describe_usage(usage: Mapping[str, tuple[float, float, int]]) -> str:
    """
    Return one line: means, and the largest use of memory with its rank.

        workers 98 % CPU, 1.2 GiB (most 1.4 GiB, rank 3); hosts 45 % CPU, 60 % memory
    """
    parts = []
    for who, busy, size, share in _OWNERS:
        texts = []
        if busy in usage:
            unit = " busy" if who == "devices" else " CPU"
            texts.append(format_use(busy, usage[busy][0]) + unit)
        if size in usage:
            mean, most, rank = usage[size]
            text = format_use(size, mean)
            if format_use(size, most) != text:
                text += f" (most {format_use(size, most)}, rank {rank})"
            texts.append(text)
        if share in usage:
            _, most, rank = usage[share]
            texts.append(f"at most {format_use(share, most)} memory")
        if texts:
            parts.append(f"{who} {', '.join(texts)}")
    return "; ".join(parts)
