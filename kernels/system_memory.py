"""The memory that this process can take."""

import os
from pathlib import Path

from kernels.cgroups import groups_of, number_in, words_in

_MEMINFO = Path("/proc/meminfo")
_MOUNTS = Path("/proc/self/mountinfo")
# It is for memory without a file; only "deny" and "force" also decide for a mounted file system.
_SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_SMALL_BYTES = 16 << 20
# The files of a group, and the entries of memory.stat that count its file cache.
_GROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_memory_bytes() -> int:
    """Return the memory that the system and the container have without swapping, including their file caches.

    Returns 0 if the system does not say.
    """
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    for group in groups_of("memory"):
        for limit, usage, cache in _GROUP_FILES:
            limit_bytes, used = number_in(group / limit), number_in(group / usage)
            if limit_bytes is not None and used is not None and limit_bytes - used < available:
                words = words_in(group / "memory.stat")
                stat = dict(zip(words[::2], words[1::2], strict=True))
                left = limit_bytes - used + sum(int(stat.get(name, 0)) for name in cache)
                available = min(available, max(left, 1))  # 0 would mean unknown
    return available


def check_memory(needed_bytes: int) -> None:
    """Raise MemoryError if the system or the container does not have so much memory.

    The system itself promises more memory than it has, and kills a process that touches too much of it. A few
    megabytes are not checked, as the check takes milliseconds on a busy machine.
    """
    available = available_memory_bytes() if needed_bytes > _SMALL_BYTES else needed_bytes
    if 0 < available < needed_bytes:
        raise MemoryError(f"{needed_bytes:,} bytes of memory are needed, but {available:,} are available")


def huge_page_advice(folder: Path) -> str:
    """Return what an operator must run so that the files of a memory file system get huge pages; "" for nothing."""
    try:
        setting = _SHARED_HUGE_PAGES.read_text(encoding="ascii")
        device = os.stat(folder).st_dev
        mounts = [line.split() for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:  # such as a kernel without huge pages
        return ""
    if "[deny]" in setting:
        return f"echo never > {_SHARED_HUGE_PAGES}"
    if "[force]" in setting:
        return ""
    # number, parent, device, root, mount point, options, ..., "-", type, source, options
    for words in mounts:
        kind, _, options = words[words.index("-") + 1 :]
        if words[2] == f"{os.major(device)}:{os.minor(device)}" and kind == "tmpfs":
            is_huge = any(f"huge={when}" in options.split(",") for when in ("advise", "within_size", "always"))
            return "" if is_huge else f"mount -o remount,huge=advise {words[4]}"
    return ""
