"""Memory that dies: tensors of an answering step stay with the process, whole heads go back."""

import platform
import subprocess
import sys

import pytest

# what tensors cost that die one after the other, in page faults and in pages still held;
# growing: each is a little larger than the one before, and something small outlives it
STEPS = """
import resource, sys
import torch
from align.process import use_machine

def faults_and_pages():
    resident = int(open("/proc/self/statm").read().split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, resident

use_machine()
megabytes, growing = map(int, sys.argv[1:])
torch.ones(megabytes << 18)
before = faults_and_pages()
alive = []
for more in range(8 if growing else 40):
    torch.ones((megabytes << 18) + growing * more * (megabytes << 14))
    if growing:
        alive.append(torch.ones(1 << 16))
after = faults_and_pages()
print(*(b - a for a, b in zip(before, after)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told anything")
@pytest.mark.parametrize(("megabytes", "kept"), [(64, True), (400, False)])
def test_freed_tensors(megabytes, kept):
    command = [sys.executable, "-c", STEPS, str(megabytes), str(int(not kept))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    faults, grown = map(int, done.stdout.split())
    one = (megabytes << 20) // 4096  # pages
    if kept:
        assert faults < 16 * one  # of forty: glibc may take a few places before it comes back
    else:
        assert grown < one  # nothing of them is left
