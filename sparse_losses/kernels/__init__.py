"""Temporary: what NWS and distillation still import."""

from typing import Literal

__all__ = ["Impl", "check_impl", "uses_triton"]

Impl = Literal["auto", "torch", "triton"]


def check_impl(impl):  # type: ignore
    return None


def uses_triton(*args, **kwargs):  # type: ignore
    return False
