"""verify sees one wrong bit, whatever the kinds of checkpoints; a digest is the same for both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megagent.errors import MegagentError
from megagent.parallel.convert import compare, conversion, copying
from megagent.parallel.convert.conversion import Options
from megagent.parallel.degrees import Degrees
from tests.parallel.convert.folders import QUIET, random_weights, write_folder


def compared(one: Path, other: Path) -> compare.Comparison:
    return compare.compare(conversion.open_any(one), conversion.open_any(other), quiet=True)


def test_a_conversion_is_equal_to_its_source(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", "mixtral")
    conversion.to_megatron(source, tmp_path / "there", Degrees(tp=2), QUIET)
    assert compared(source, tmp_path / "there") == compare.Comparison(4 * 19 + 3, (), ())


def test_one_bit_makes_a_difference(tmp_path: Path) -> None:
    weights = random_weights("qwen2")
    source = write_folder(tmp_path / "model", "qwen2", weights)
    weights["model.layers.2.mlp.down_proj.weight"].view(torch.int16)[7, 11] ^= 1
    conversion.to_megatron(write_folder(tmp_path / "other", "qwen2", weights), tmp_path / "there", Degrees(), QUIET)
    (sentence,) = compared(source, tmp_path / "there").differing
    assert sentence.startswith("model.layers.2.mlp.down_proj.weight differs in 1 of 96 values, by up to ")


def test_the_sign_of_a_zero_and_the_bits_of_a_nan_count(tmp_path: Path) -> None:
    weights = random_weights("qwen2")
    weights["model.norm.weight"][:2] = torch.tensor([0.0, float("nan")])
    source = write_folder(tmp_path / "model", "qwen2", weights)
    assert compared(source, source).differing == ()
    weights["model.norm.weight"][0] = -0.0
    assert len(compared(source, write_folder(tmp_path / "other", "qwen2", weights)).differing) == 1


def test_a_weight_that_is_no_number_is_as_far_off_as_can_be(tmp_path: Path) -> None:
    weights = random_weights("qwen2")
    source = write_folder(tmp_path / "model", "qwen2", weights)
    weights["model.norm.weight"][0] = float("nan")
    (sentence,) = compared(source, write_folder(tmp_path / "other", "qwen2", weights)).differing
    assert sentence == "model.norm.weight differs in 1 of 8 values, by up to inf"


def test_rounding_is_told_from_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK", 24)
    source = write_folder(tmp_path / "model", "qwen2", random_weights("qwen2", torch.float32))
    conversion.to_megatron(source, tmp_path / "there", Degrees(), Options(dtype="bf16", quiet=True))
    found = compared(source, tmp_path / "there")
    assert (found.differing, len(found.rounded)) == ((), found.tensors)


def test_different_models_are_not_compared(tmp_path: Path) -> None:
    one = write_folder(tmp_path / "one", "qwen2")
    other = write_folder(tmp_path / "other", "qwen2", rms_norm_eps=1e-5, num_hidden_layers=3)
    with pytest.raises(
        MegagentError, match="are different models.*\n  layers is 4 and 3\n  norm_eps is 1e-06 and 1e-05"
    ):
        compared(one, other)


def test_a_digest_depends_on_the_tensors_and_not_on_the_kind(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", "qwen2", files=2)
    conversion.to_megatron(source, tmp_path / "there", Degrees(tp=4), QUIET)
    one, other = (conversion.open_any(path) for path in (source, tmp_path / "there"))
    found = compare.digests(one, quiet=True)
    assert found == compare.digests(other, quiet=True)
    assert compare.digest_of(one, found) == compare.digest_of(other, found)
    name = "model.norm.weight"
    assert compare.digest_of(one, {**found, name: found["model.embed_tokens.weight"]}) != compare.digest_of(one, found)
