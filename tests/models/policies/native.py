"""The native policies, each as a function that creates one."""

# ruff: noqa: N802
from kvtier_kernels import make_policy, value_policy


def Lru():
    return make_policy("lru")


def Lfu():
    return make_policy("lfu")


def Arc():
    return make_policy("arc")


def S3Fifo():
    return make_policy("s3fifo")


def Prefix():
    return make_policy("prefix")


def Attention():
    return make_policy("attention")


def Value(**constants):
    return value_policy(**constants)
