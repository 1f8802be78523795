"""The mangled names of device functions have the values of their kernel's axes."""

from __future__ import annotations

from dataclasses import replace

import fake_artifacts
import pytest

from flashvar_factory.audit import kernel_checks
from flashvar_factory.audit.expectations import Expectations

SIMT = "_ZN5dtype4simt10fwd_kernelI{}Li4EEEvPKT_"


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (SIMT.format("f"), []),
        (SIMT.format("N5dtype5dtype4bf16E"), []),
        (SIMT.format("NS_5dtype4fp16E"), ["fp16"]),
        ("_ZN3own4simt10fwd_kernelINS_5dtype4fp16EEEvv", ["fp16"]),
    ],
    ids=["a type of C++", "a value", "another value", "another value, of another project"],
)
def test_a_project_called_like_an_axis(function: str, found: list[str]) -> None:
    described = fake_artifacts.manifest()
    (row,) = [row for row in described.kernels if row.name == "attention_fwd_bf16_hdim32"]
    described = replace(described, kernels=(replace(row, functions=(function,)),))
    said = list(kernel_checks._names(described, Expectations()))
    assert [line.rpartition(", found ")[2].partition(" in ")[0] for line in said] == found
