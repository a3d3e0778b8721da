"""Processors: named as far as the system tells, and always the same in one process."""

from __future__ import annotations

import pytest
import torch

from kvcdn.model import processor
from kvcdn.model.processor import describe_device

CPUINFO = {
    "x86": (
        ["processor\t: 0", "model name\t: A B-1", "flags\t\t: fpu avx2 amx_bf16", "model name : C"],
        "cpu (A B-1; amx_bf16 avx2)",
    ),
    "arm": (["processor : 0", "Features : fp asimd bf16 sve"], "; bf16 sve)"),
    "nothing": ([], "cpu ("),
}


@pytest.fixture(autouse=True)
def _forget():
    processor.cpu.cache_clear()
    yield
    processor.cpu.cache_clear()


@pytest.mark.parametrize("system", CPUINFO)
def test_a_processor_is_called_by_name_and_by_what_kernels_are_chosen_by(monkeypatch, system):
    """Whatever the system says of it."""
    lines, shown = CPUINFO[system]
    monkeypatch.setattr(processor, "_cpuinfo", lambda: lines)
    assert shown in describe_device(torch.device("cpu"))


def test_other_devices_are_called_by_what_they_are():
    assert "meta" == describe_device(torch.device("meta"))
    assert describe_device(torch.device("cpu")).startswith("cpu (")
