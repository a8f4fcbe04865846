"""Memory of the machine."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available_memory_bytes() -> int:
    """Memory that the system could give without swapping, of what holds files for now too; 0 where it does not say."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
