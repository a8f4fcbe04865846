"""The memory of the machine."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available_memory_bytes() -> int:
    """Return the memory that the system has without swapping, including its file cache; 0 if it does not say."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
