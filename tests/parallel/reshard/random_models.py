"""Random models of every family, at random degrees that can hold them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from megagent.parallel.degrees import Degrees
from megagent.parallel.models import Architecture
from tests.parallel.models.configs import TINY, tiny


def all_degrees(model: Architecture) -> list[Degrees]:
    found = [
        Degrees(tp=tp, pp=pp, vpp=vpp, ep=ep, dp=ep)
        for tp, pp, vpp, ep in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2))
    ]
    return [degrees for degrees in found if not model.problems(degrees)]


@st.composite
def placed_models(draw: st.DrawFn) -> tuple[Architecture, Degrees]:
    """A random model of any family, and random degrees that can hold it."""
    family = draw(st.sampled_from(sorted(TINY)))
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    etp = draw(st.sampled_from([None, 1, 2])) if "mo" in family or "mix" in family else None
    kv_heads = draw(st.sampled_from([number for number in (1, 2, 3, 4, 6) if number % tp == 0 or tp % number == 0]))
    model = tiny(
        family,
        num_hidden_layers=draw(st.integers(1, 7)),
        vocab_size=draw(st.integers(1, 100)),
        hidden_size=draw(st.integers(1, 5)),
        intermediate_size=4 * tp * draw(st.integers(1, 3)),
        moe_intermediate_size=4 * tp if family == "qwen3_moe" else None,
        num_attention_heads=int(np.lcm(kv_heads, tp)) * draw(st.integers(1, 3)),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        tie_word_embeddings=draw(st.booleans()),
    )
    degrees = Degrees(
        tp=tp,
        pp=draw(st.integers(1, 4)),
        vpp=draw(st.sampled_from([1, 1, 2])),
        ep=draw(st.sampled_from([1, 2, 4])) if model.experts else 1,
        etp=etp,
        dp=draw(st.sampled_from([1, 2, 4])),
        count_embedding=draw(st.booleans()),
        count_output=draw(st.booleans()),
    )
    assume(not model.problems(degrees))
    return model, degrees
