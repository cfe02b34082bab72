"""Memory of processes."""

from __future__ import annotations

import os

import psutil
import pytest

from vlmserve.scaleout.ondemand.pool import private_memory


def test_children_named_twice_count_once():
    once = private_memory([os.getppid()])
    assert private_memory([os.getppid(), os.getpid()]) == pytest.approx(once, rel=0.3)
    assert once >= psutil.Process().memory_full_info().uss * 0.7


def test_ended_process_takes_no_memory():
    assert private_memory([2**22 + 1]) == 0
