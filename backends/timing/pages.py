"""Whether memory comes in huge pages, which changes latencies.

Linux gives memory in pages of 2 MiB and more to every process (``always`` in
``/sys/kernel/mm/transparent_hugepage/enabled``) or to those that ask (``madvise``). From version 2.35 on glibc asks,
if ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1`` is in the environment when a process starts. The effect differs from
network to network and from hour to hour (docs: experiments.md).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

#: Memory of this size has a mapping of its own, in which huge pages fit.
_PROBE_BYTES = 64 << 20
#: How many sizes of the probe are tried, each doubled, to outgrow the largest free piece of a heap. Chosen: a
#: heap has no 32 GiB free at once.
_DOUBLINGS = 10


@functools.cache
def huge_pages() -> bool:
    """Return whether large memory that this process allocates from now on may come in huge pages.

    The kernel reports it (``THPeligible`` in ``/proc/self/smaps``) for a probe that is allocated but never
    touched; False if it does not say.
    """
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    before = _mappings(_text(smaps))
    for doubled in range(_DOUBLINGS):
        address = libc.malloc(_PROBE_BYTES << doubled)
        if address is None:
            return False
        try:
            # Memory that was used before keeps what its last user asked for, and NumPy asks for huge pages.
            if not any(first <= address < end for first, end in before):
                return _eligible(_text(smaps), address)
        finally:
            libc.free(address)
    return False


def page_settings() -> tuple[tuple[str, str], ...]:
    """Return the entry of a fingerprint that says that pages are huge; none if they are small."""
    return (("huge_pages", "on"),) if huge_pages() else ()


def _text(smaps: Path) -> str:
    return smaps.read_text(encoding="utf-8", errors="replace")


def _mappings(maps: str) -> list[tuple[int, int]]:
    """Return each mapping's first address and its end."""
    heads = [line.split(" ", 1)[0] for line in maps.splitlines()]
    bounds = [head.split("-") for head in heads if not head.endswith(":")]
    return [(int(first, 16), int(end, 16)) for first, end in bounds]


def _eligible(maps: str, address: int) -> bool:
    """Whether the mapping at this address may use huge pages."""
    here = False
    for line in maps.splitlines():
        head, _, value = line.partition(" ")
        if head.endswith(":"):
            if here and head == "THPeligible:":
                return value.strip() == "1"
        else:
            first, _, end = head.partition("-")
            here = int(first, 16) <= address < int(end, 16)
    return False
