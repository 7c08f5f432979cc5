"""Spaces with a lossy codec: which have one, their identities, and their decoders."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtier import Group, KvSpec
from kvtier.errors import ProfileError
from kvtier.layout import space_id
from kvtier_daemon.codec.calibrated import Calibrated
from kvtier_daemon.codec.choice import Choice, Rates
from kvtier_daemon.codec.losses import NAMES, NO_PROFILE, OPAQUE, SHAPE, TYPE, Loss, Losses, fits
from support.losses_by_twins import profile_of
from support.specs import spec_of

SPEC = spec_of("model")
MLA = KvSpec.mla(
    model="model", layers=2, latent_dim=32, rope_dim=16, dtype="bfloat16", block_tokens=16, weights="rev:1",
)  # fmt: skip


def losses(codec: str = "q8", **profile: Any) -> Losses:
    return Losses([("model", codec)], [profile_of(SPEC, **profile)])


@pytest.mark.parametrize("codec", NAMES)
def test_a_loss_is_part_of_the_identity(codec: str) -> None:
    found = losses(codec)
    identity = found.identity(SPEC, "t")
    plain = space_id(SPEC, "t")
    assert identity != plain and Losses().identity(SPEC, "t") == plain
    assert losses("r32").identity(SPEC, "t") == plain
    assert found.identity(spec_of("other"), "t") == space_id(spec_of("other"), "t")
    loss = found.of(identity, SPEC, "t")
    assert loss is not None and loss is found.find(SPEC)
    codec_of = loss.codec(0, 0)
    assert codec_of is not None and codec_of.name == codec and codec_of.lossy
    # A space of another configuration, or of none, does not get this tenant's loss.
    assert found.of(plain, SPEC, "t") is None
    assert found.of(identity, SPEC, "u") is None
    assert Losses().of(identity, SPEC, "t") is None


@pytest.mark.parametrize(
    ("pattern", "model", "fit"),
    [
        ("org/model[v2]-x", "org/model[v2]-x", True),  # a name matches itself as a pattern
        ("org/model[v2]-*", "org/model[v2]-8b", True),
        ("org/model[v2]-x", "org/modelv-x", False),
        ("org/model-?b", "org/model-8b", True),
        ("org/model-?b", "org/model-70b", False),
        ("Org/*", "org/model", False),
    ],
)
def test_only_stars_and_question_marks_are_wildcards(pattern: str, model: str, fit: bool) -> None:
    assert fits(model, pattern) is fit


def test_different_losses_have_different_identities() -> None:
    named = [losses(codec).identity(SPEC, "t") for codec in NAMES]
    named += [losses("ecsq-mid", step=1).identity(SPEC, "t")]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(
    ("spec", "codec", "why"),
    [
        (spec_of("model", dtype="float8_e4m3fn"), "q8", TYPE),
        (spec_of("model", dtype="int8"), "ecsq-mid", TYPE),
        (spec_of("model", layout="nobody knows"), "q4", OPAQUE),
        (spec_of("model", layout="nobody knows"), "ecsq-mid", OPAQUE),
        (spec_of("model", strides=(1, 2)), "ecsq-mid", OPAQUE),
        (MLA, "q8", OPAQUE),
        (spec_of("model", layers=5), "ecsq-mid", SHAPE),
        (spec_of("model", kv_heads=8), "ecsq-mid", SHAPE),
        (spec_of("model", head_dim=32), "cachegen-lo", SHAPE),
        (spec_of("model2"), "ecsq-mid", NO_PROFILE),
    ],
)  # fmt: skip
def test_a_space_that_can_not_have_the_codec_is_lossless_with_a_reason(
    spec: KvSpec, codec: str, why: str
) -> None:
    found = Losses([("model*", codec)], [profile_of(SPEC)])
    assert found.find(spec) == why
    identity = found.identity(spec, "t")
    assert identity == space_id(spec, "t")
    choice = Choice(Rates(), "auto", [("model*", codec)], found, "t")
    assert choice.lossy(identity, spec, 0, 0) is None and not choice.has_loss(identity, spec)
    assert not choice.codec(identity, spec, spec.block_bytes, [1e9]).lossy
    (said,) = choice.report()
    assert (said["asked"], said["why"]) == (codec, why)


def test_opaque_groups_of_a_lossy_space_stay_lossless() -> None:
    groups = [
        Group(layers=2, kv_heads=2, head_dim=32),
        Group(kind="state", layers=2, state_bytes=4096),
        Group(layers=1, opaque_bytes=4096),
    ]
    spec = KvSpec.groups(groups, model="model", dtype="bfloat16", block_tokens=16, weights="w")
    loss = losses("q8").find(spec)
    assert isinstance(loss, Loss)
    assert [loss.codec(number, 0) is not None for number in range(3)] == [True, False, False]


def test_the_profile_of_the_weights_is_preferred_and_two_such_profiles_are_refused() -> None:
    both = [profile_of(SPEC, weights="rev:1", step=1), profile_of(SPEC)]
    asked = [("model", "ecsq-mid")]
    assert Losses(asked, both).identity(SPEC, "t") == Losses(asked, both[:1]).identity(SPEC, "t")
    other = spec_of("model", weights="rev:2")
    assert Losses(asked, both).identity(other, "t") == Losses(asked, both[1:]).identity(other, "t")
    assert Losses(asked, both[:1]).find(other) == NO_PROFILE
    with pytest.raises(ProfileError, match="two profiles exist for model"):
        Losses(asked, [both[1], both[1]])


def test_ranks_use_their_own_part_of_a_profile() -> None:
    spec = spec_of("model", tensor_parallel=2)
    loss = losses("ecsq-mid").find(spec)
    assert isinstance(loss, Loss)
    codecs = [loss.codec(0, shard) for shard in range(3)]
    assert codecs[2] is None
    assert all(isinstance(one, Calibrated) for one in codecs[:2]) and codecs[0] is not codecs[1]


def test_a_latent_uses_a_profile_that_keeps_the_same_number_of_dims() -> None:
    fits, other = profile_of(MLA, exact_dims=16), profile_of(MLA, exact_dims=8)
    assert isinstance(Losses([("model", "ecsq-mid")], [fits]).find(MLA), Loss)
    assert Losses([("model", "ecsq-mid")], [other]).find(MLA) == SHAPE


def test_models_without_a_needed_profile_are_reported() -> None:
    asked = [("model", "ecsq-mid"), ("mod*", "cachegen-lo"), ("*", "q8"), ("x", "ecsq-lo")]
    assert Losses(asked, [profile_of(SPEC)]).without_profile() == [("x", "ecsq-lo")]
    assert len(Losses(asked).without_profile()) == 3


def test_many_spaces_of_one_model_share_their_codec() -> None:
    found = losses("ecsq-mid")
    some = {
        id(loss.codec(0, 0))
        for number in range(300)
        if isinstance(loss := found.find(spec_of("model", engine=str(number))), Loss)
    }
    assert len(some) == 1


def test_a_profile_with_a_changed_bit_gives_another_identity() -> None:
    profile = profile_of(SPEC)
    other = msgspec.structs.replace(profile, tokens=2)
    names = {Losses([("model", "ecsq-mid")], [one]).identity(SPEC, "t") for one in (profile, other)}
    assert len(names) == 2
