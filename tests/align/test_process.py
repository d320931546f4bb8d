"""Memory that dies: tensors of an answering step stay with the process, whole heads go back."""

import platform
import subprocess
import sys

import pytest

# rounds of a training step's pattern: something large dies while something small lives on above it
STEPS = """
import resource, sys
import torch
from align.process import use_machine

def faults_and_pages():
    resident = int(open("/proc/self/statm").read().split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, resident

use_machine()
megabytes = int(sys.argv[1])
torch.ones(megabytes << 18)
before = faults_and_pages()
alive = []
for more in range(8):
    torch.ones((megabytes << 18) + more * (megabytes << 14))
    alive.append(torch.ones(1 << 16))
after = faults_and_pages()
print(*(b - a for a, b in zip(before, after)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told anything")
@pytest.mark.parametrize(("megabytes", "kept"), [(16, True), (400, False)])
def test_freed_tensors(megabytes, kept):
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(megabytes)], capture_output=True, text=True, check=True
    )
    faults, grown = map(int, done.stdout.split())
    one = (megabytes << 20) // 4096  # pages
    if kept:
        assert faults < 4 * one  # not one fault a page and round
    else:
        assert grown < one  # nothing of them is left
