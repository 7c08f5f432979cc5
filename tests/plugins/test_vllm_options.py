"""The options that users write: each option, and for each invalid value one line that states the
correct form."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_plugins import Unsupported
from kvtier_plugins.weights import folder_digest
from kvtier_vllm.identity import weights_identity
from kvtier_vllm.options import EXPECTED, Options, read_options

WRONG: dict[str, list[Any]] = {
    "socket": [5, ["a"]],
    "load": ["fast", True, None],
    "save": ["yes", 1, "late"],
    "save_decode": ["no", None],
    "patience_ms": ["1s", 0, -5, 1.5, True],
    "lease_ms": ["1min", 0, None],
    "saving": ["lots", -1, 0, "0", 1.5, None],
    "copy_threads": [0, "two", 2.5],
    "timeline": [5, True, None],
    "verify": [1, "yes", None],
    "residency": [1, "no", None],
    "weights": [5, None],
    "gpu_copies": ["fast", True, None],
    "layerwise": ["often", -1, None],
    "gpu_direct": ["yes", True, None],
    "compute_last": [-1, "all", 1.5, None],
}
RIGHT: dict[str, Any] = {
    "socket": "/run/kvtier/kvtier.sock", "load": "sync", "save": False, "save_decode": False,
    "patience_ms": 1, "lease_ms": 1, "saving": 1 << 20, "copy_threads": 1, "weights": "w",
    "timeline": "/tmp/hits.json",
    "verify": True,
    "residency": True,
    "gpu_copies": "batch",
    "layerwise": "off",
    "gpu_direct": "auto",
    "compute_last": 128,
}  # fmt: skip


def test_every_option_is_tried() -> None:
    assert set(WRONG) == set(RIGHT) == set(EXPECTED) == set(Options.__struct_fields__)


@pytest.mark.parametrize("name", RIGHT)
def test_an_option_has_the_configured_value(name: str) -> None:
    assert getattr(read_options({name: RIGHT[name]}), name) == RIGHT[name]
    assert getattr(read_options({}), name) != RIGHT[name]
    assert read_options({"saving": "1GiB"}).saving_bytes == 1 << 30


@pytest.mark.parametrize("name, value", [(name, one) for name in WRONG for one in WRONG[name]])
def test_an_invalid_value_gives_a_line_with_the_correct_form(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        read_options({"patience_ms": 5} | {name: value})
    assert str(error.value) == (
        f"kv_connector_extra_config: {name} is {value!r}: expected {EXPECTED[name]}"
    )


def test_a_socket_path_that_is_too_long_gives_a_line_with_the_limit() -> None:
    """The limit is in bytes, not in characters."""
    for fits, long in (("/" + "x" * 106, "/" + "x" * 107), ("/" + "ä" * 53, "/" + "ä" * 53 + "x")):
        assert read_options({"socket": fits}).socket == fits
        with pytest.raises(ValueError, match="socket is") as error:
            read_options({"socket": long})
        assert str(error.value) == (
            f"kv_connector_extra_config: socket is {long!r}, 108 bytes: expected a path of at most 107"
            " bytes"
        )


def test_an_unknown_option_gives_a_line_with_the_nearest_option() -> None:
    with pytest.raises(ValueError, match="no option 'pacience_ms': did you mean 'patience_ms'"):
        read_options({"pacience_ms": 5})
    with pytest.raises(
        ValueError, match=r"no option 'disk': known options: socket, load, .*compute_last$"
    ):
        read_options({"disk": "/tmp"})


def test_unidentified_weights_need_an_option(tmp_path: Path) -> None:
    """Neither files nor a commit identify the weights: the message names the option that does."""
    with pytest.raises(Unsupported, match="set the option 'weights'"):
        folder_digest(tmp_path)
    model = SimpleNamespace(model="nobody/nothing", revision=None)
    with pytest.raises(Unsupported, match="the option 'weights'"):
        weights_identity(model, "auto")
    assert weights_identity(SimpleNamespace(model="a/b", revision="0" * 40), "auto") == (
        f"rev:{'0' * 40}"
    )
