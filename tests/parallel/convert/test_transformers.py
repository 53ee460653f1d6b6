"""A conversion there and back is, to transformers, the model that it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megagent.parallel.convert import conversion
from megagent.parallel.degrees import Degrees
from tests.parallel import families
from tests.parallel.convert.folders import QUIET, read_folder, same


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_transformers_misses_nothing_in_a_converted_model_and_computes_the_same(
    family: str, tied: bool, tmp_path: Path
) -> None:
    vocab = families.VOCAB + 7  # the checkpoint holds 128 entries
    source = families.write_model(tmp_path / "model", family, tie_word_embeddings=tied, vocab_size=vocab)
    conversion.to_megatron(source, tmp_path / "there", Degrees(tp=4), QUIET)
    back = conversion.to_hf(tmp_path / "there", tmp_path / "back", None, QUIET)
    assert same(read_folder(back), read_folder(source))
    tokens = torch.randint(0, vocab, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs, ours = (families.load_model(folder)(tokens).logits for folder in (source, back))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
