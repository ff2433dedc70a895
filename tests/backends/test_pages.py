"""Which pages memory comes in: what the process tells of itself, against the kernel's switch and the pages it got."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from smcp_fx.backends import get_backend
from smcp_fx.backends.base import Fingerprint
from smcp_fx.backends.timing import pages
from smcp_fx.latency.exchange import differences

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Prints what a process of its own says, and how much of 64 MiB that it writes to came in huge pages (KiB).
SCRIPT = f"""
import ctypes, json, re, runpy
huge_pages = runpy.run_path({pages.__file__!r})["huge_pages"]  # without the library, which loads torch
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
address = libc.malloc(ctypes.c_size_t(64 << 20))
ctypes.memset(ctypes.c_void_p(address), 1, 64 << 20)
got, here = 0, False
for line in open("/proc/self/smaps"):
    if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
        here = int(bounds[1], 16) <= address < int(bounds[2], 16)
    elif here and line.startswith("AnonHugePages:"):
        got = int(line.split()[1])
print(json.dumps({{"huge": huge_pages(), "got": got}}))
"""


def told(script: str, **environment: str) -> dict:
    plain = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**plain, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not SWITCH.exists(), reason="this kernel tells nothing of huge pages")
@pytest.mark.parametrize("asking", [False, True])
def test_a_process_knows_its_pages(asking: bool) -> None:
    found = told(SCRIPT, **({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if asking else {}))
    switch = SWITCH.read_text()
    library, _, version = os.confstr("CS_GNU_LIBC_VERSION").partition(" ")
    heard = library == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
    assert found["huge"] == ("[always]" in switch or ("[madvise]" in switch and asking and heard))
    if not found["huge"]:
        assert found["got"] == 0  # where they are had, how many depends on what memory is free in one piece


@pytest.mark.parametrize("huge", [False, True])
def test_every_runtimes_fingerprint_tells_them(huge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "huge_pages", lambda: huge)
    for name in ("onnxruntime", "openvino", "torch"):
        settings = get_backend(name).fingerprint().as_dict()["settings"]
        assert settings.get("huge_pages") == ("on" if huge else None)


#: As above in a process whose heap has a free piece of 180 MiB, of which the last user asked for huge pages.
FRAGMENTED = f"""
import json, runpy, numpy as np
huge_pages = runpy.run_path({pages.__file__!r})["huge_pages"]
for _ in range(3):  # glibc takes blocks as large as those that are freed from the heap
    np.ones(30 << 17)
blocks = [np.ones(30 << 17) for _ in range(8)]
behind = [np.ones(1 << 12) for _ in range(2000)]  # keeps the heap from shrinking
del blocks[1:7]
print(json.dumps({{"huge": huge_pages()}}))
"""


@pytest.mark.skipif(not SWITCH.exists(), reason="this kernel tells nothing of huge pages")
def test_what_freed_memory_was_asked_for_does_not_count() -> None:
    """Two processes with one fingerprint share rows: it must not depend on what was allocated before."""
    assert told(FRAGMENTED) == {"huge": "[always]" in SWITCH.read_text()}


def test_a_mapping_is_found_by_its_address() -> None:
    maps = (
        "1000-3000 rw-p 00000000 00:00 0 \nSize: 8 kB\nTHPeligible:    1\nVmFlags: rd wr\n"
        "3000-5000 rw-p 00000000 00:00 0                     [heap]\nSize: 8 kB\nTHPeligible:           0\n"
        "7000-9000 rw-p 00000000 00:00 0 \nSize: 8 kB\n"
        "a000-b000 rw-p 00000000 00:00 0 \nTHPeligible:    1\n"
    )
    assert [pages._eligible(maps, address) for address in (0x1000, 0x2FFF, 0x3000, 0x4FFF, 0xA800)] == [
        True, True, False, False, True,
    ]  # fmt: skip
    # Between two mappings; in one of which the kernel says nothing.
    assert not pages._eligible(maps, 0x6000)
    assert not pages._eligible(maps, 0x8000)


def test_memory_that_may_not_be_huge_is_told_from_memory_that_may() -> None:
    """The kernel's word on mappings of this process that were asked for in huge pages, and forbidden them."""
    if not SWITCH.exists() or "[never]" in SWITCH.read_text():
        pytest.skip("this kernel gives no huge pages")
    smaps = Path("/proc/self/smaps")
    for advise, expected in ((mmap.MADV_HUGEPAGE, True), (mmap.MADV_NOHUGEPAGE, False)):
        with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(advise)
            view = ctypes.c_char.from_buffer(memory)
            assert pages._eligible(smaps.read_text(), ctypes.addressof(view) + (32 << 20)) == expected
            del view


def test_fingerprints_of_other_pages_differ_and_say_so() -> None:
    small = Fingerprint("onnxruntime", "a processor", "ONNX Runtime", "1", 1, "float32")
    huge = replace(small, settings=(("huge_pages", "on"),))
    assert small.key() != huge.key()
    assert huge.describe() == small.describe() + ", huge pages"
    assert differences(small, huge) == "huge_pages: not set and on"
