"""Layers of a transformers cache whose tensors have room for more tokens.

The library's layers copy all tokens for each new one. These layers copy a new token behind the others, and a
restored prefix is copied once, into tensors with room. Layers with a window keep more tokens than the window,
so that blocks before it can be saved.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvtier_transformers.importance import ImportanceMeter

ROOM_TOKENS = 256


class Room:
    """A tensor [batch, heads, tokens, dim], of which `shown` are the tokens in use, from `first` on. A copy
    of a layer has the same room, so only its `owner` appends to it."""

    __slots__ = ("first", "owner", "shown", "tensor")

    def __init__(self, tensor: torch.Tensor, first: int, end: int, owner: int) -> None:
        self.tensor = tensor
        self.first = first
        self.shown = tensor[:, :, first:end]
        self.owner = owner

    @classmethod
    def of(cls, tokens: torch.Tensor, more: torch.Tensor, owner: int) -> Room:
        """Copy both, with room after them."""
        count = tokens.shape[-2] if tokens.dim() == 4 else 0
        end = count + more.shape[-2]
        tensor = more.new_empty((*more.shape[:2], end + ROOM_TOKENS, more.shape[-1]))
        if count:
            tensor[:, :, :count] = tokens
        tensor[:, :, count:end] = more
        return cls(tensor, 0, end, owner)

    def appended(self, more: torch.Tensor) -> bool:
        """Append these tokens if there is room."""
        end = self.first + self.shown.shape[-2]
        after = end + more.shape[-2]
        if after > self.tensor.shape[-2]:
            return False
        self.tensor[:, :, end:after] = more
        self.shown = self.tensor[:, :, self.first : after]
        return True


class RoomyLayer:
    """The tensors of one layer with attention."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    key_room: Room | None = None
    value_room: Room | None = None
    meter: ImportanceMeter | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append to `keys` and `values`, which other code may have replaced meanwhile."""
        assert self.keys is not None and self.values is not None
        self.key_room = self._after(self.key_room, self.keys, keys)
        self.value_room = self._after(self.value_room, self.values, values)
        self.keys, self.values = self.key_room.shown, self.value_room.shown

    def _after(self, room: Room | None, tokens: torch.Tensor, more: torch.Tensor) -> Room:
        if room is None or room.owner != id(self) or room.shown is not tokens:
            return Room.of(tokens, more, id(self))
        if room.tensor.dtype == more.dtype and room.appended(more):
            return room
        return Room.of(tokens, more, id(self))

    def fill(self, keys: torch.Tensor, values: torch.Tensor, first: int, end: int) -> None:
        """Use the tokens from `first` to `end` of these tensors; the rest is room."""
        self.key_room = Room(keys, first, end, id(self))
        self.value_room = Room(values, first, end, id(self))
        self.keys, self.values = self.key_room.shown, self.value_room.shown


class FullLayer(RoomyLayer, DynamicLayer):
    """Full attention."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.requires_grad:
            return super().update(key_states, value_states)  # type: ignore[no-any-return]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.append(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.meter is not None:
            self.meter.expect(self.keys)
        return self.keys, self.values


class WindowLayer(RoomyLayer, DynamicSlidingWindowLayer):
    """Attention within a window or a chunk. `history` tokens before the window are kept."""

    history = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.requires_grad:
            return super().update(key_states, value_states)  # type: ignore[no-any-return]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        self.append(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        most = self.sliding_window - 1 + self.history
        if not self.record_past and keys.shape[-2] > most + ROOM_TOKENS:
            # Copies, so that the memory of the other tokens is free after this step.
            self.keys, self.values = keys[:, :, -most:].clone(), values[:, :, -most:].clone()
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]


class FullStateLayer(FullLayer, LinearAttentionAndFullAttentionLayer):
    """Full attention and recurrent states in one layer."""


class WindowStateLayer(WindowLayer, LinearAttentionAndSlidingWindowAttentionLayer):
    """Attention within a window and recurrent states in one layer."""


CLASSES = {
    DynamicLayer: FullLayer,
    DynamicSlidingWindowLayer: WindowLayer,
    LinearAttentionAndFullAttentionLayer: FullStateLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: WindowStateLayer,
    LinearAttentionLayer: LinearAttentionLayer,
}


def replaced(layer: Any, history: int) -> Any:
    """Return a layer of ours in place of this empty one of the library, or one of another class as it is."""
    made = CLASSES.get(type(layer))
    if made is None or made is type(layer):
        return layer
    kwargs = {}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        kwargs["number_of_states"] = layer.number_of_states
    if isinstance(layer, DynamicSlidingWindowLayer):
        kwargs["sliding_window"] = layer.sliding_window
    ours = made(**kwargs)
    if isinstance(ours, WindowLayer):
        ours.history = history
    return ours


def states(layer: Any) -> dict[str, torch.Tensor]:
    """The recurrent states of a layer by name; {} without any."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    found = {}
    for index in range(layer.number_of_states):
        if layer.is_conv_states_initialized[index]:
            found[f"conv {index}"] = layer.conv_states[index]
        if layer.is_recurrent_states_initialized[index]:
            found[f"recurrent {index}"] = layer.recurrent_states[index]
    return found


def fill_state(layer: Any, name: str, tensor: torch.Tensor) -> None:
    """Give an empty layer this state."""
    kind, _, number = name.partition(" ")
    index = int(number)
    if kind == "conv":
        layer.conv_states[index] = tensor
        layer.is_conv_states_initialized[index] = True
        layer.conv_kernel_size[index] = tensor.shape[-1]
    else:
        layer.recurrent_states[index] = tensor
        layer.is_recurrent_states_initialized[index] = True
    layer.has_previous_state[index] = True
    if not isinstance(layer, DynamicLayer):
        layer.device, layer.dtype = tensor.device, tensor.dtype
